"""`DistributedValues` and `PerReplica`: one value for each replica of this worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class DistributedValues:
    """A value that has a component for each replica of this worker.

    What iterating over a distributed dataset, `Strategy.experimental_distribute_values_from_function` and
    `Strategy.run` give where a worker has several replicas. `Strategy.experimental_local_results` returns the
    components.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedValues

    Args:
        values: The components, in the order of the local replicas.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, in the order of the local replicas."""
        return self._values

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


def regroup(parts: Sequence[Any], map_structure: Callable[..., Any]) -> Any:
    """Turns one structure a replica into one structure of `PerReplica` leaves.

    As in `tf.distribute`, a worker with a single replica gets its structure as it is.

    Args:
        parts: Structures of the same shape, one a local replica.
        map_structure: `keras.tree.map_structure`; this module imports no Keras.
    """
    if len(parts) == 1:
        return parts[0]

    def join(*leaves: Any) -> Any:
        return None if all(leaf is None for leaf in leaves) else PerReplica(leaves)

    return map_structure(join, *parts)


def local_results(
    value: Any, map_structure: Callable[..., Any], flatten: Callable[[Any], list[Any]]
) -> tuple:
    """Returns one structure a replica: the reverse of `regroup`."""
    sizes = {len(leaf.values) for leaf in flatten(value) if isinstance(leaf, DistributedValues)}
    if not sizes:
        return (value,)

    def component(index: int) -> Callable[[Any], Any]:
        return lambda leaf: leaf.values[index] if isinstance(leaf, DistributedValues) else leaf

    return tuple(map_structure(component(i), value) for i in range(max(sizes)))
