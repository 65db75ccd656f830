"""What a Keras variable says of its writes in replicas: its `aggregation` and its `synchronization`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras

from kdist.errors import InvalidArgumentError


def aggregation_of(variable: Any) -> str:
    """Says how writes to a Keras variable in a replica are aggregated: "sum", "mean" or "only_first_replica".

    `none` means the mean for floating-point variables (moving statistics) and the first replica for others
    (counters), so that replicas never drift apart silently.
    """
    how = variable.aggregation
    if how == "mean" and not keras.backend.is_float_dtype(variable.dtype):
        raise InvalidArgumentError(
            'aggregation="mean" is for variables of floating point.',
            received={"variable": variable.path, "dtype": variable.dtype},
            hint='Use aggregation="sum" or "only_first_replica".',
        )
    if how in ("sum", "mean", "only_first_replica"):
        return how
    return "mean" if keras.backend.is_float_dtype(variable.dtype) else "only_first_replica"


def is_on_read(variable: Any) -> bool:
    """Says whether each replica has a component of a Keras variable, which lasts from `run` to `run`."""
    return variable.synchronization == "on_read"


def share_of(variable: Any, value: Any, replica_id: Any, num_replicas: int) -> Any:
    """Returns the component of an on-read variable that a replica gets of a value assigned outside of replicas.

    The components of all replicas aggregate to the value: of a sum each has its part, whole numbers with the rest
    on the first replicas; else each has the value.

    Args:
        variable: The Keras variable.
        value: A tensor.
        replica_id: Of the replica, over all workers; a number or a backend scalar.
        num_replicas: Number of replicas over all workers.
    """
    if aggregation_of(variable) != "sum":
        return value
    ops = keras.ops
    dtype = keras.backend.standardize_dtype(value.dtype)
    if keras.backend.is_float_dtype(dtype):
        return value / ops.cast(num_replicas, dtype)
    if dtype == "bool":
        return ops.logical_and(value, ops.equal(replica_id, 0))
    number = ops.cast(num_replicas, dtype)
    has_one_more = ops.mod(value, number) > ops.cast(replica_id, dtype)
    return ops.floor_divide(value, number) + ops.cast(has_one_more, dtype)


def check_branch(variable: Any) -> None:
    """Raises for a sum that is set in a branch, of which nobody knows before whether it is taken."""
    if aggregation_of(variable) == "sum" and not is_on_read(variable):
        raise InvalidArgumentError(
            'A variable of aggregation="sum" cannot be set in a branch of `cond`, only added to.',
            received={"variable": variable.path},
            hint='Use `assign_add`, or create the variable with synchronization="on_read".',
        )


class NotesAdditions:
    """A mixin for scopes that must tell `variable.assign_add` from `variable.assign`, and each layer's losses."""

    _additions = 0

    @functools.cached_property
    def loss_ids(self) -> dict[int, Any]:
        """The layers that were used in this scope, and by what Keras knows their losses; see `keras_hooks.losses`."""
        return {}

    @property
    def is_adding(self) -> bool:
        """Whether what is written now is an addition to the present value."""
        return self._additions > 0

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Within this, writes are additions."""
        self._additions += 1
        try:
            yield
        finally:
            self._additions -= 1
