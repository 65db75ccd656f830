"""`DistributedValues` and `PerReplica`, with one value per replica of this worker, and `ReduceOp`."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol, Self

from kdist.errors import InvalidArgumentError


class Tensor(Protocol):
    """A tensor of any framework or a NumPy array: the properties and operators that all of them have."""

    @property
    def shape(self) -> Any:
        """The lengths of the axes: a tuple, `torch.Size` or `tf.TensorShape`."""

    @property
    def dtype(self) -> object:
        """The dtype, an object of the framework; see `rows.dtype_name`."""

    def __getitem__(self, key: Any, /) -> Self: ...
    def __add__(self, other: Any, /) -> Self: ...
    def __sub__(self, other: Any, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...
    def __truediv__(self, other: Any, /) -> Self: ...


class ReduceOp(enum.Enum):
    """The operation that reduces the values of all replicas to one value.

    * `SUM`: Add all the values.
    * `MEAN`: Take the arithmetic mean of the values.

    You can also pass its name, in upper or lower case: `"SUM"`, `"mean"`.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReduceOp
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, value: object) -> ReduceOp:
        """Returns the operation for a name or an operation.

        Raises:
            InvalidArgumentError: If there is no such operation.
        """
        name = getattr(value, "name", value)  # also accepts the `ReduceOp` of `tf.distribute`
        if isinstance(name, str) and name.upper() in cls.__members__:
            return cls[name.upper()]
        raise InvalidArgumentError(
            "reduce_op is not kdist.ReduceOp.SUM, kdist.ReduceOp.MEAN or one of their names.",
            received={"reduce_op": value},
            hint='Use "SUM" or "MEAN", for example strategy.reduce("SUM", value, axis=None)',
        )


class DistributedValues:
    """A value with one component per replica of this worker.

    If a worker has several replicas, distributed datasets yield such values. `Strategy.run` and
    `Strategy.experimental_distribute_values_from_function` return them. To get the components, call
    `Strategy.experimental_local_results`.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedValues

    Args:
        values: The components, in the order of the local replicas.
    """

    def __init__(self, values: Sequence[object]) -> None:
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, in the order of the local replicas."""
        return self._values

    # TensorFlow's protocol for values that enter and leave a `tf.function`.
    def __tf_flatten__(self) -> tuple[object, tuple[object, ...]]:
        return (type(self),), self._values

    @classmethod
    def __tf_unflatten__(
        cls, metadata: tuple[type[DistributedValues]], components: Sequence[object]
    ) -> DistributedValues:
        return metadata[0](components)

    def __repr__(self) -> str:
        lines = "".join(f"  {i}: {value!r},\n" for i, value in enumerate(self._values))
        return f"{type(self).__name__}:{{\n{lines}}}"


class PerReplica(DistributedValues):
    """A value whose components may differ between replicas, such as their rows of a batch.

    Example:

    >>> from kdist.values import PerReplica
    >>> PerReplica([3, 4]).values
    (3, 4)
    """


def is_same(leaves: Sequence[object]) -> bool:
    """Returns whether all replicas have the same object, or equal Python values."""
    first = leaves[0]
    by_value = type(first) in (bool, int, float, complex, str, bytes)
    return all(leaf is first or (by_value and type(leaf) is type(first) and leaf == first) for leaf in leaves)


def regroup(parts: Sequence[object], always_wrap: bool = True) -> Any:
    """Turns one structure per replica into one structure of `PerReplica` leaves.

    As in `tf.distribute`, the structure of a single replica is returned unchanged.

    Args:
        parts: Structures of the same shape, one per local replica.
        always_wrap: If `False`, a leaf for which `is_same` is true stays one value. `None` always does.
    """
    if len(parts) == 1:
        return parts[0]
    import keras

    def join(*leaves: object) -> object:
        same = leaves[0] is None if always_wrap else True
        return leaves[0] if same and is_same(leaves) else PerReplica(leaves)

    return keras.tree.map_structure(join, *parts)


def component(value: object, index: int) -> Any:
    """Returns one local replica's part of a structure. Plain values are the same for all replicas."""
    import keras

    def take(leaf: object) -> object:
        if not isinstance(leaf, DistributedValues):
            return leaf
        if index >= len(leaf.values):
            raise InvalidArgumentError(
                f"A distributed value has no component for replica {index} of this worker.",
                received={"components": len(leaf.values), "replica": index},
                hint="Use a value that this strategy created.",
            )
        return leaf.values[index]

    return keras.tree.map_structure(take, value)


def local_results(value: object, num_local: int) -> tuple[Any, ...]:
    """Returns one structure per local replica, the reverse of `regroup`; `(value,)` for a plain value."""
    import keras

    if not keras.tree.is_nested(value) and not isinstance(value, DistributedValues):
        return (value,)
    return tuple(component(value, i) for i in range(num_local))
