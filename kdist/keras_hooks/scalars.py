"""Hooks for scalars that losses, layers and metrics compute from the rows of a replica."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING

from kdist.keras_hooks.wrapping import RunningReplica, running_model_replica, wrap

if TYPE_CHECKING:
    import keras

    from kdist.values import Tensor


# For each loss, layer or metric: which of its scalars, in their order in a step, are sums over the rows. All
# others are means.
_sums: weakref.WeakKeyDictionary[object, tuple[bool, ...]] = weakref.WeakKeyDictionary()
# The scalars that `handed` records.
_handed: weakref.WeakKeyDictionary[object, list[Tensor | float]] = weakref.WeakKeyDictionary()


def add_up(owner: object, are_sums: tuple[bool, ...]) -> None:
    """Sets which scalars of an `OwnLoss`, a layer or a metric are sums over the rows."""
    if isinstance(owner, Hashable):
        _sums[owner] = are_sums


def _sums_of(owner: object) -> tuple[bool, ...]:
    return _sums.get(owner, ()) if isinstance(owner, Hashable) else ()


@contextlib.contextmanager
def handed(owner: object) -> Iterator[list[Tensor | float]]:
    """Yields a list that collects the scalars that a layer adds as losses, or that a metric receives."""
    _handed[owner] = []
    try:
        yield _handed[owner]
    finally:
        del _handed[owner]


def of_all_rows(replica: RunningReplica, total: Tensor) -> Tensor:
    """Scales a sum over a replica's rows, so that the mean over the replicas is the sum over all rows."""
    import keras

    if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(total.dtype)):
        total = keras.ops.cast(total, keras.config.floatx())
    return total / replica.scalar(replica.rows.scalar_weight, total.dtype)


def hook_scalars() -> None:
    import keras

    def update_state(
        original: Callable[..., object],
        self: keras.metrics.Metric,
        values: Tensor | float,
        sample_weight: Tensor | None = None,
    ) -> object:
        replica = running_model_replica()
        if sample_weight is None and _handed and self in _handed and _is_scalar(values):
            _handed[self].append(values)
        if replica is not None and sample_weight is None and _is_scalar(values):
            sample_weight = replica.scalar(replica.rows.scalar_weight, self.dtype)
            if any(_sums_of(self)):
                values = of_all_rows(replica, keras.ops.convert_to_tensor(values, dtype=self.dtype))
        return original(self, values, sample_weight)

    def add_loss(original: Callable[..., object], self: keras.Layer, loss: object) -> None:
        replica, known = running_model_replica(), _sums_of(self)
        if _handed and self in _handed:
            _handed[self] += map(keras.ops.sum, keras.tree.flatten(loss))
        if replica is not None and any(known):
            first = len(self._get_own_losses())
            loss = [
                of_all_rows(replica, scalar) if known[(first + i) % len(known)] else scalar
                for i, scalar in enumerate(keras.tree.flatten(loss))
            ]
        original(self, loss)

    wrap(keras.metrics.Mean, "update_state", update_state)
    wrap(keras.metrics.Sum, "update_state", update_state)
    wrap(keras.Layer, "add_loss", add_loss)


def _is_scalar(values: Tensor | float) -> bool:
    # Python lists have no shape, and a traced tensor cannot be converted to an array.
    return len(values.shape) == 0 if hasattr(values, "shape") else not isinstance(values, (list, tuple))


class OwnLoss:
    """Wraps a loss that may be a sum over the rows."""

    def __init__(self, loss: keras.losses.Loss) -> None:
        self.loss = loss
        self.name = loss.name

    def __call__(self, *args: object) -> Tensor:
        """Returns the loss. In a replica, `of_all_rows` scales it if it is a sum."""
        value, replica = self.call(*args), running_model_replica()
        return of_all_rows(replica, value) if replica is not None and any(_sums.get(self, ())) else value

    def call(self, *args: object) -> Tensor:
        return self.loss(*args)
