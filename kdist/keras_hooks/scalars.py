"""Scalars that losses, layers and metrics make of the rows of a replica."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from kdist.keras_hooks.wrapping import running_model_replica, wrap

# Which scalars of a loss, a layer or a metric, in their order in a step, are sums over the rows: what is not here is
# a mean.
_sums: weakref.WeakKeyDictionary[Any, tuple[bool, ...]] = weakref.WeakKeyDictionary()
# Those that are noted.
_handed: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def add_up(owner: Any, are_sums: tuple[bool, ...]) -> None:
    """Says which of the scalars of an `OwnLoss`, or that a layer or a metric hands to Keras, are sums over the rows."""
    if isinstance(owner, Hashable):
        _sums[owner] = are_sums


def _sums_of(owner: Any) -> tuple[bool, ...]:
    return _sums.get(owner, ()) if isinstance(owner, Hashable) else ()


@contextlib.contextmanager
def handed(owner: Any) -> Iterator[list[Any]]:
    """Gives a list of the scalars that a layer adds as losses, or that a metric takes, within this."""
    _handed[owner] = []
    try:
        yield _handed[owner]
    finally:
        del _handed[owner]


def of_all_rows(replica: Any, total: Any) -> Any:
    """Returns a sum over a replica's rows as that of as many rows as all replicas have: their mean is the whole sum."""
    import keras

    if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(total.dtype)):
        total = keras.ops.cast(total, keras.config.floatx())
    return total / replica.scalar(replica.rows.scalar_weight, total.dtype)


def hook_scalars() -> None:
    import keras

    def update_state(original: Callable[..., Any], self: Any, values: Any, sample_weight: Any = None) -> Any:
        replica = running_model_replica()
        if sample_weight is None and _handed and self in _handed and _is_scalar(values):
            _handed[self].append(values)
        if replica is not None and sample_weight is None and _is_scalar(values):
            sample_weight = replica.scalar(replica.rows.scalar_weight, self.dtype)
            if any(_sums_of(self)):
                values = of_all_rows(replica, keras.ops.convert_to_tensor(values, dtype=self.dtype))
        return original(self, values, sample_weight)

    def add_loss(original: Callable[..., Any], self: Any, loss: Any) -> None:
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


def _is_scalar(values: Any) -> bool:
    # A list of the user's has no shape; a traced tensor may not be turned into an array.
    return len(values.shape) == 0 if hasattr(values, "shape") else not isinstance(values, (list, tuple))


class OwnLoss:
    """Stands for a loss of the user's that may be a sum over the rows."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self.name = loss.name

    def __call__(self, *args: Any) -> Any:
        """Returns its value; of a sum, in a replica, as the part that it is of the sum over all rows."""
        value, replica = self.call(*args), running_model_replica()
        return of_all_rows(replica, value) if replica is not None and any(_sums.get(self, ())) else value

    def call(self, *args: Any) -> Any:
        """Returns what the user's returns."""
        return self.loss(*args)
