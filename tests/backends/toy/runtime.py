"""The replicas of the toy backend, their variables and collectives, and the steps of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from kdist import keras_hooks
from kdist.arrays.row_exchange import decode, encode, gather_rows
from kdist.arrays.rows import map_leaves, to_dense
from kdist.backends.aggregation import ReplicaScope, share_of
from kdist.backends.contract import ReplicaBatches, Runtime, StepFunction
from kdist.backends.model_step import ReplicatedSteps
from kdist.backends.replica import Replica, RowShare, equal_shares, shares_of
from kdist.backends.threads import Baton, ReplicaThreads
from kdist.backends.variable_table import VariableTable
from kdist.backends.workers import Workers
from kdist.context import StrategyLike
from kdist.topology import Topology

Arrays = list[np.ndarray]


class ToyRuntime(Runtime):
    """Runs functions and steps in one thread per replica."""

    def __init__(self, topology: Topology, group: Workers) -> None:
        super().__init__(topology, group)
        self.threads = ReplicaThreads([f"replica {i}" for i in self.replica_ids])
        self.components: VariableTable[tuple[np.ndarray, Arrays]] = VariableTable()
        """The local replicas' values of on-read variables, and the value outside that they aggregate to."""

    def place(self, parts: Sequence[Any]) -> list[Any]:
        """Copies the arrays."""
        return [part if part is None else map_leaves(_copied, part) for part in parts]

    def exchange(self, arrays: Sequence[np.ndarray]) -> list[Arrays]:
        """Returns the arrays of every worker."""
        return [decode(data) for data in self.group.all_gather_bytes(encode([*arrays]))]

    def sum_over_workers(self, tensors: Sequence[np.ndarray]) -> Arrays:
        """Sums arrays in the order of the workers."""
        return [sum(parts[1:], parts[0]) for parts in zip(*self.exchange(tensors), strict=True)]

    def gather_over_workers(self, tensor: np.ndarray) -> np.ndarray:
        """Concatenates the rows of the workers."""
        return gather_rows(self.group, [tensor])

    def broadcast_variables(self, variables: Sequence[keras.Variable]) -> None:
        """Sends the chief's values to all workers."""
        chiefs = self.exchange([variable.value for variable in variables])[0]
        for variable, value in zip(variables, chiefs, strict=True):
            variable.assign(value)

    def step_function(self, model: keras.Model, kind: str) -> StepFunction:
        """Returns the steps of a model."""
        return ToySteps(self, model, kind)

    def run(self, strategy: StrategyLike, fn: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
        """Calls a function in each local replica."""

        return self.in_replicas(strategy, lambda replica: replica.call(fn, args, kwargs))

    def in_replicas(
        self, strategy: Any, body: Callable[[ToyReplica], Any], shares: Sequence[RowShare] | None = None
    ) -> list[Any]:
        """Calls a function in the thread, the context and the scope of each local replica."""
        state = keras_hooks.ThreadState()
        scopes: dict[int, ToyScope] = {}

        def one_replica(index: int, baton: Baton) -> Any:
            replica = ToyReplica(strategy, index, baton, shares)
            # The first replica runs in the thread of the caller, which has this state.
            with state if index else contextlib.nullcontext(), replica, ToyScope(replica) as scopes[index]:
                return body(replica)

        try:
            results = self.threads.run(one_replica)
        except BaseException:
            self.components = VariableTable()
            raise
        scopes[0].commit()
        return results


def _copied(leaf: Any) -> Any:
    return None if leaf is None else np.array(to_dense(leaf))


class ToyReplica(Replica):
    """A replica in its thread."""

    def __init__(self, strategy: Any, index: int, baton: Baton, shares: Sequence[RowShare] | None) -> None:
        runtime = self.runtime = strategy.runtime
        replica_id, number = runtime.replica_ids[index], runtime.num_replicas
        share = (shares or equal_shares(number))[replica_id]
        super().__init__(strategy, replica_id, number, share, index, is_model_step=shares is not None)
        self._baton = baton

    def all_reduce_sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums over the local replicas in their order, then over the workers."""

        def combine(values: Sequence[Sequence[Any]]) -> Arrays:
            return self.runtime.sum_over_workers([sum(p[1:], p[0]) for p in zip(*values, strict=True)])

        what = ("sum", [(tensor.dtype, tensor.shape) for tensor in tensors])
        return self._baton.meet(self.local_index, what, tensors, combine)

    def all_reduce_with_gradient(self, tensor: Any) -> Any:
        """Sums a tensor, without a gradient."""
        return self.all_reduce_sum([tensor])[0].copy()

    def gather_tensor(self, tensor: Any, axis: int) -> Any:
        """Concatenates the tensors of all replicas along an axis, without a gradient."""
        what = ("gathering", tensor.dtype)
        rows = self._baton.meet(
            self.local_index,
            what,
            np.moveaxis(tensor, axis, 0),
            lambda values: self.runtime.gather_over_workers(np.concatenate(values)),
        )
        return np.moveaxis(rows, 0, axis).copy()

    def call_once(self, what: str, value: Any, merge: Callable[[Any], Any]) -> Any:
        """Calls the function in the last local replica."""
        result = self._baton.meet(self.local_index, (what, None), value, merge)
        self.scope.start_again()
        return result


class ToyScope(ReplicaScope):
    """Gives a replica its own values of the variables until the end of the step, when all replicas agree."""

    def __init__(self, replica: ToyReplica) -> None:
        super().__init__(replica)
        self._index, self._runtime = replica.local_index, replica.runtime
        self._own: dict[int, tuple[keras.Variable, np.ndarray]] = {}

    def local(self, variable: keras.Variable) -> np.ndarray:
        """Returns the value in this replica."""
        if keras_hooks.native_value(variable) is None:
            self._initialize(variable)
        if self.has_component(variable):
            return self._components(variable)[self._index]
        real = keras_hooks.native_value(variable)
        return self._own.get(id(variable), (variable, real))[1]

    def write(self, variable: keras.Variable, value: Any) -> None:
        """Sets the value in this replica."""
        self.local(variable)
        value = np.array(value, variable.dtype)
        if self.has_component(variable):
            self._components(variable)[self._index] = value
        else:
            self._own[id(variable)] = variable, value

    def snapshot(self, variable: keras.Variable) -> np.ndarray:
        """Returns the value. A write replaces the array, and does not change it."""
        return self.local(variable)

    def show(self, variable: keras.Variable, total: np.ndarray) -> None:
        """Stores the aggregated value in the variable itself."""
        self._runtime.components[variable] = total, self._components(variable)
        keras_hooks.set_native_value(variable, total)

    def change_real_variables(self, change: Callable[[], Any]) -> Any:
        """Calls a function without this scope."""
        self.commit()
        with keras_hooks.without_scope():
            return change()

    def commit(self) -> None:
        """Writes this replica's values, which are equal in all replicas now, into the variables."""
        for variable, value in self._own.values():
            keras_hooks.set_native_value(variable, value)
        self.start_again()

    def start_again(self) -> None:
        """Reads the values of the variables again."""
        self._own.clear()

    def _components(self, variable: keras.Variable) -> Arrays:
        real, known = keras_hooks.native_value(variable), self._runtime.components.get(variable)
        if known is None or known[0] is not real:  # the variable is new, or was assigned outside of `run`
            number = self._runtime.num_replicas
            known = real, [share_of(variable, real, i, number) for i in self._runtime.replica_ids]
            self._runtime.components[variable] = known
        return known[1]

    def _initialize(self, variable: keras.Variable) -> None:
        with keras_hooks.without_scope(), keras.StatelessScope():
            pass  # Keras initializes new variables at the end of such a scope
        if self._runtime.num_workers > 1:
            self._runtime.broadcast_variables([variable])


class ToySteps(ReplicatedSteps):
    """Runs Keras's step in each local replica."""

    runtime: ToyRuntime

    def run(self, batch: ReplicaBatches) -> list[Any]:
        """Runs the step."""

        def body(replica: ToyReplica) -> Any:
            return self.in_replica(replica, batch.parts[replica.local_index])

        with self.around_replicas():
            return self.runtime.in_replicas(keras_hooks.strategy_of(self.model), body, shares_of(batch.split))
