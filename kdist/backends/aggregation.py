"""What becomes of writes to Keras variables in replicas, those of metrics too: who notes them, and aggregates them.

A variable says how, by its `aggregation` and its `synchronization`.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from kdist.backends.replica import Replica
from kdist.errors import InvalidArgumentError


def aggregation_of(variable: Any) -> str:
    """Says how writes to a Keras variable in a replica are aggregated: "sum", "mean" or "only_first_replica".

    `none` means the mean for floating-point variables (moving statistics) and the first replica for others
    (counters), so that replicas never drift apart silently.
    """
    how = variable.aggregation
    if how == "mean" and not keras.backend.is_float_dtype(variable.dtype):
        raise InvalidArgumentError(
            f'The variable {variable.path!r} has aggregation="mean" but is not floating-point.',
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
    on the first replicas; else each has the value. The replica's id is a number or a backend scalar.
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
            f'The variable {variable.path!r} has aggregation="sum" and is assigned in a branch of `cond`.',
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


@dataclass
class _Write:
    """A variable that a replica has written, since when, and whether it was set or only added to."""

    variable: Any
    old: Any
    is_set: bool = False


class ReplicaScope(NotesAdditions, keras.StatelessScope):
    """Shows each replica its own copy of every Keras variable, and notes what a step writes.

    A public `keras.StatelessScope` intercepts all reads and writes of Keras variables in a thread; this one
    lets them through to the replica's native variable. At the end of a step (or when a metric's result is
    asked for), `aggregate` makes the written variables equal on all replicas again. Of an on-read variable each
    replica of `run` keeps its component instead, and `show` takes what they aggregate to.
    """

    def __init__(self, replica: Replica) -> None:
        # Losses that layers add are kept by the scope, since the layers' own lists are shared by the replicas.
        super().__init__(collect_losses=True, initialize_variables=False)
        self._replica = replica
        self._has_components = not replica.is_model_step and replica.num_replicas_in_sync > 1
        self._written: dict[int, _Write] = {}
        self._untracked = 0
        replica.scope = self

    @abstractmethod
    def local(self, variable: Any) -> Any:
        """Returns the replica's native variable or tensor for a Keras variable."""

    @abstractmethod
    def write(self, variable: Any, value: Any) -> None:
        """Assigns to the replica's native variable, in place."""

    @abstractmethod
    def snapshot(self, variable: Any) -> Any:
        """Returns the present value as a tensor that later writes do not change."""

    @abstractmethod
    def show(self, variable: Any, total: Any) -> None:
        """Takes what an on-read variable is outside of replicas; the components stay."""

    def get_current_value(self, variable: Any) -> Any:
        """Overrides the lookup of `keras.StatelessScope`."""
        return self.local(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Overrides the recording of `keras.StatelessScope`: writes through, and remembers the old value."""
        variable, value = update
        if not self._untracked:
            self._note(variable)
        self.write(variable, value)

    def has_component(self, variable: Any) -> bool:
        """Says whether this replica has a component of a variable that is aggregated when it is read."""
        return self._has_components and is_on_read(variable)

    def share_of(self, variable: Any, value: Any) -> Any:
        """This replica's component of what is assigned to an on-read variable outside of replicas."""
        replica = self._replica
        return share_of(variable, value, replica.replica_id_in_sync_group, replica.num_replicas_in_sync)

    def old_value(self, variable: Any) -> Any:
        """Returns the value from which a first write is counted; called just before that write."""
        return self.snapshot(variable)

    @contextlib.contextmanager
    def untracked(self) -> Iterator[None]:
        """Within this, writes are known to be equal on all replicas and need no aggregation."""
        self._untracked += 1
        try:
            yield
        finally:
            self._untracked -= 1

    @property
    def is_untracked(self) -> bool:
        """Whether what is written now needs no aggregation."""
        return self._untracked > 0

    def aggregate(self, only_on_read: bool = False) -> None:
        """Makes all variables written since the last call equal on all replicas: one collective a dtype."""
        written = [w for w in self._written.values() if not only_on_read or self.has_component(w.variable)]
        for write in written:
            del self._written[id(write.variable)]
        if not written:
            return
        totals = self._replica.all_reduce_packed([self._contribution(write) for write in written])
        for write, total in zip(written, totals, strict=True):
            if self.has_component(write.variable):
                self.show(write.variable, total)
            else:
                self.aggregated(write.variable, write.old + total if self._is_difference(write) else total)

    def aggregated(self, variable: Any, value: Any) -> None:
        """Takes the value that all replicas share now."""
        self.write(variable, value)

    def _note(self, variable: Any) -> None:
        key = id(variable)
        if key not in self._written:
            old = None if self.has_component(variable) else self.old_value(variable)
            self._written[key] = _Write(variable, old)
        # A model's step gives what one device would, whose `v.assign(v + x)` is an addition too.
        if not (self.is_adding or self._replica.is_model_step or self.has_component(variable)):
            self._written[key].is_set = True

    def _is_difference(self, write: _Write) -> bool:
        """Whether a sum is counted from its old value: what is set on all replicas does not contain that."""
        is_sum = aggregation_of(write.variable) == "sum"
        return is_sum and not write.is_set and not self.has_component(write.variable)

    def _contribution(self, write: _Write) -> Any:
        replica = self._replica
        value = self.snapshot(write.variable)
        if self._is_difference(write):
            value = value - write.old
        how = aggregation_of(write.variable)
        if how == "sum" and not replica.is_model_step:
            return value
        if how == "sum":
            return value * replica.scalar(replica.rows.counts, value.dtype)
        if how == "mean":
            return value * replica.scalar(replica.rows.share, value.dtype)
        first = replica.replica_id_in_sync_group == 0
        if isinstance(first, bool):
            return value if first else keras.ops.zeros_like(value)
        return value * replica.scalar(first, value.dtype)
