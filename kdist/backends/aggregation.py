"""Records and aggregates writes to Keras variables in replicas, including the variables of metrics.

The `aggregation` and `synchronization` of a variable determine how its writes are aggregated.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from kdist.backends.replica import Replica
from kdist.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kdist.arrays.types import R, Tensor, TensorT


def aggregation_of(variable: keras.Variable) -> str:
    """Returns how replicas aggregate writes to a Keras variable: "sum", "mean" or "only_first_replica".

    kdist treats `none` as the mean for floating-point variables (moving statistics), and as the first replica
    for other variables (counters). Otherwise, the replicas would silently drift apart.
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


def is_on_read(variable: keras.Variable) -> bool:
    """Returns whether each replica keeps its own component of a Keras variable between calls of `run`."""
    return variable.synchronization == "on_read"


def share_of(
    variable: keras.Variable, value: TensorT, replica_id: int | Tensor, num_replicas: int
) -> TensorT:
    """Returns a replica's component of an on-read variable after an assignment outside of replicas.

    The components aggregate to the value. For a sum, each replica gets an equal part, and the first replicas
    get the remainder of an integer. Otherwise, each gets the value. `replica_id` can be a backend scalar.
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


def check_branch(variable: keras.Variable) -> None:
    """Raises an error if a branch sets a sum, because kdist cannot predict whether the branch is taken."""
    if aggregation_of(variable) == "sum" and not is_on_read(variable):
        raise InvalidArgumentError(
            f'The variable {variable.path!r} has aggregation="sum" and is assigned in a branch of `cond`.',
            received={"variable": variable.path},
            hint='Use `assign_add`, or create the variable with synchronization="on_read".',
        )


class NotesAdditions:
    """A mixin for scopes that distinguish `assign_add` from `assign`, and the losses of each layer."""

    _additions = 0

    @functools.cached_property
    def loss_ids(self) -> dict[int, tuple[keras.Layer, set[int]]]:
        """The layers that this scope has used, and the keys of their losses; see `keras_hooks.losses`."""
        return {}

    @property
    def is_adding(self) -> bool:
        """Whether the current write adds to the present value."""
        return self._additions > 0

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """A context manager in which all writes are additions."""
        self._additions += 1
        try:
            yield
        finally:
            self._additions -= 1


@dataclass
class _Write:
    """A variable that a replica has written, its old value, and whether it was set or only added to."""

    variable: keras.Variable
    old: Any
    is_set: bool = False


class ReplicaScope(NotesAdditions, keras.StatelessScope):
    """Gives each replica its own copy of every Keras variable, and records the writes of a step.

    A `keras.StatelessScope` intercepts all reads and writes of Keras variables in a thread. This subclass
    passes them to the replica's native variable. At the end of a step, before a `merge_call`, or when a
    metric's result is read, `aggregate` makes the written variables equal on all replicas again. However,
    each replica of `run` keeps its component of an on-read variable, and `show` receives the aggregated value.
    """

    def __init__(self, replica: Replica) -> None:
        # The scope collects the losses that layers add, because the replicas share the lists of the layers.
        super().__init__(collect_losses=True, initialize_variables=False)
        self._replica = replica
        self._has_components = not replica.is_model_step and replica.num_replicas_in_sync > 1
        self._written: dict[int, _Write] = {}
        self._untracked = 0
        replica.scope = self

    @abstractmethod
    def local(self, variable: keras.Variable) -> Tensor:
        """Returns the replica's native variable or tensor for a Keras variable."""

    @abstractmethod
    def write(self, variable: keras.Variable, value: Tensor) -> None:
        """Assigns to the replica's native variable, in place."""

    @abstractmethod
    def snapshot(self, variable: keras.Variable) -> Tensor:
        """Returns the present value as a tensor that later writes do not change."""

    @abstractmethod
    def show(self, variable: keras.Variable, total: Tensor) -> None:
        """Stores the aggregated value of an on-read variable. The components do not change."""

    @abstractmethod
    def change_real_variables(self, change: Callable[[], R]) -> R:
        """Calls a function once for all local replicas, which reads and writes the variables themselves."""

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        """Overrides the lookup of `keras.StatelessScope`."""
        return self.local(variable)

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        """Overrides the recording of `keras.StatelessScope`: writes the variable and keeps its old value."""
        variable, value = update
        if not self._untracked:
            self._note(variable)
        self.write(variable, value)

    def has_component(self, variable: keras.Variable) -> bool:
        """Returns whether this replica has its own component of a variable, aggregated when it is read."""
        return self._has_components and is_on_read(variable)

    def old_value(self, variable: keras.Variable) -> Tensor:
        """Returns the value before the first write of a step. Called just before that write."""
        return self.snapshot(variable)

    @contextlib.contextmanager
    def untracked(self) -> Iterator[None]:
        """A context manager for writes that are equal on all replicas and need no aggregation."""
        self._untracked += 1
        try:
            yield
        finally:
            self._untracked -= 1

    @property
    def is_untracked(self) -> bool:
        """Whether the current write needs no aggregation."""
        return self._untracked > 0

    def aggregate(self, only: Callable[[keras.Variable], bool] | None = None) -> None:
        """Makes variables that `only` selects, and that were written since the last call, equal on all replicas.

        Uses one collective per dtype.
        """
        written = [w for w in self._written.values() if only is None or only(w.variable)]
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

    def aggregated(self, variable: keras.Variable, value: Tensor) -> None:
        """Stores the aggregated value, which is equal on all replicas."""
        self.write(variable, value)

    def _note(self, variable: keras.Variable) -> None:
        key = id(variable)
        if key not in self._written:
            old = None if self.has_component(variable) else self.old_value(variable)
            self._written[key] = _Write(variable, old)
        # The step of a model must match one device, where `v.assign(v + x)` is also an addition.
        if not (self.is_adding or self._replica.is_model_step or self.has_component(variable)):
            self._written[key].is_set = True

    def _is_difference(self, write: _Write) -> bool:
        """Returns whether the additions to the old value are summed, instead of newly set values."""
        is_sum = aggregation_of(write.variable) == "sum"
        return is_sum and not write.is_set and not self.has_component(write.variable)

    def _contribution(self, write: _Write) -> Tensor:
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
