"""User functions in replicas on JAX: one program over all devices, with Keras's state as input and output."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import keras
from jax.sharding import PartitionSpec

from kdist import keras_hooks
from kdist.backends import debugging
from kdist.backends.gradients import check_loss, split_aux
from kdist.backends.jax import tables, uneven_run
from kdist.backends.jax.collectives import MeshCollectives, SumsInMemory, next_turn
from kdist.backends.jax.components import has_components
from kdist.backends.jax.core import JaxCore
from kdist.backends.jax.programs import Call, Outputs, Placed, discover, function_key
from kdist.backends.jax.replicas import JaxReplica
from kdist.backends.jax.row_rules import NoRule
from kdist.backends.jax.scopes import GradientScope, JaxScope, PlainScope, Values, initial_value
from kdist.backends.jax.storage import divided, stored
from kdist.backends.jax.tables import Tables
from kdist.backends.workers import Workers
from kdist.cluster import logs
from kdist.communication.options import hint_ignored
from kdist.context import current_replica, require_no_merge_call
from kdist.errors import KdistError
from kdist.topology import Topology
from kdist.values import DistributedValues

if TYPE_CHECKING:
    from kdist.arrays.types import Args, Function, Kwargs, P, R, Structure, Tensor
    from kdist.backends.jax.scopes import Held
    from kdist.context import StrategyLike

    _Arrays: TypeAlias = Sequence[jax.Array]
    _Helds: TypeAlias = Sequence[Held]
    _Results: TypeAlias = tuple[list[Held], list[jax.Array]]
    """The values of written variables, and the arrays in the result of a function."""

_MOST_PROGRAMS = 128
_MANY_PROGRAMS = 16


class JaxFunctions(JaxCore):
    """Runs user functions in the replicas, and keeps their programs and the variables' values on all devices."""

    def __init__(self, topology: Topology, group: Workers) -> None:
        super().__init__(topology, group)
        self._placed = Placed(self)
        self._programs: collections.OrderedDict[Hashable, _Program] = collections.OrderedDict()
        self._counts: collections.Counter[object] = collections.Counter()

    def run(self, strategy: StrategyLike, fn: Function, args: Args, kwargs: Kwargs) -> Sequence[Structure]:
        """Calls a function in every replica, as one compiled program."""
        leave_function()
        require_no_merge_call()
        call = Call(args, kwargs, len(self.devices))
        key = (function_key(fn), call.key())
        if uneven_run.on_any_worker(self, call.data):
            return uneven_run.run(self, strategy, fn, call, self._placed)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(self, strategy, fn, call)
            self._limit(key)
        self._programs.move_to_end(key)
        with self.group.working():
            return program(self._placed, call)

    def _limit(self, key: tuple[Any, ...]) -> None:
        if len(self._programs) > _MOST_PROGRAMS:
            self._programs.popitem(last=False)
        code = key[0][1]
        self._counts[code] += 1
        if self._counts[code] == _MANY_PROGRAMS and self.worker_index == 0:
            logs.logger.warning(
                "strategy.run has compiled %s %r %d times, because it treats Python numbers and captured "
                "variables as constants. Pass values that change as arrays in `args`, and use few shapes.",
                key[0][0],
                getattr(code, "co_name", code),
                _MANY_PROGRAMS,
            )


class SpeaksForAll(BaseException):
    """Stops the trace of a function that calls `strategy.run`, which compiles itself, or reads a dataset."""


class _Running(threading.local):
    def __init__(self) -> None:
        self.first_calls: list[_Function] = []
        self.traces = 0


_running = _Running()


def leave_function() -> None:
    """Marks a running `kdist.function` as acting for all replicas, so that it is not compiled."""
    for function in _running.first_calls:
        function.speaks_for_all = True
    if _running.traces:
        raise SpeaksForAll


class _Program:
    """A user function, compiled for arguments with the same key as its first call."""

    def __init__(self, runtime: JaxCore, strategy: StrategyLike, fn: Function, call: Call) -> None:
        self._runtime = runtime
        self._strategy = strategy
        self._fn = fn
        self._num_replicas = runtime.num_replicas
        self._call = call
        self._scalar = [not parts[0].shape for parts in call.data]
        self._knows_written = False
        self._variables = self._discover(call)
        self._knows_written = True
        self._ids = jax.jit(self._find_ids)
        shardings = runtime.shardings(self._written)
        results = {} if shardings is None else {"out_shardings": (None, (shardings, None))}
        self._compiled = jax.jit(self._whole, donate_argnums=0, **results)

    def __call__(self, placed: Placed, call: Call) -> Sequence[Structure]:
        debugging.check_all(self._runtime, self._collectives)
        inputs = self._runtime.join_values(call.data)
        written = placed.read(self._written, donated=True)
        read = placed.read(self._only_read)
        looked = self._tables.pull(lambda: self._ids(written, read, inputs))
        turn, (state, outputs) = self._compiled(written, next_turn(self._runtime), read, looked, inputs)
        if self._runtime.memory is not None:
            self._runtime.memory.turn = turn
        placed.write(self._written, state)
        self._runtime.throttle((state, outputs))
        # `addressable_data` would return any shard, because the array is declared equal on all devices.
        shards = [out.addressable_shards for out in outputs]
        number = len(self._runtime.devices)
        pairs = [*zip(shards, self._outputs.same, strict=True)]
        return [self._outputs.fill([p[0 if same else i].data for p, same in pairs]) for i in range(number)]

    def _discover(self, call: Call) -> list[keras.Variable]:
        """Traces the function without compiling it, until all its variables are known."""
        inputs = self._runtime.join_values(call.data)
        large = getattr(self._strategy, "tables", ())  # only with parameter servers
        how = (self._over, inputs, self._runtime.broadcast_variables, self._initial_value)
        found = tables.discover(large, *how) if large else None
        self._tables, values = found or (Tables(), discover(*how))
        self._written = list(values.written.values())
        self._only_read = [v for v in values.variables if id(v) not in values.written]
        return [*self._written, *self._only_read]

    def _over(self, values: Values) -> Callable[[_Arrays], list[jax.Array]]:
        return self._over_mesh(lambda data: self._replica(values, data)[1])

    def _whole(
        self, written: _Helds, turn: jax.Array, read: _Helds, looked: Sequence[_Arrays], inputs: _Arrays
    ) -> tuple[jax.Array, _Results]:
        def body(
            turn: jax.Array, written: _Helds, read: _Helds, looked: Sequence[_Arrays], inputs: _Arrays
        ) -> tuple[jax.Array, _Results]:
            memory = self._runtime.memory
            sums = SumsInMemory(memory, turn) if self._fits_memory and memory is not None else None
            with self._tables.look(looked):
                results = self._replica(self._values(written, read), inputs, sums)
            return turn if sums is None else sums.turn, results

        written, read = list(map(divided, self._written, written)), list(map(divided, self._only_read, read))
        try:
            turn, (state, outputs) = self._over_mesh(body)(turn, written, read, looked, inputs)
        except NoRule:  # this trace took another branch of the function than the first trace
            self._fits_memory = False
            turn, (state, outputs) = self._over_mesh(body)(turn, written, read, looked, inputs)
        return turn, (list(map(stored, self._written, state)), outputs)

    def _find_ids(self, written: _Helds, read: _Helds, inputs: _Arrays) -> list[jax.Array]:
        """Returns the indices of the rows to look up; JAX omits computation that they do not need."""
        with self._tables.find() as finding:
            self._replica(self._values(written, read), inputs)
        return finding.ids

    def _values(self, written: _Helds, read: _Helds) -> Values:
        variables = [*self._variables, *self._tables.variables]
        return Values(variables, [*written, *read, *self._tables.values()], self._initial_value)

    def _initial_value(self, variable: keras.Variable) -> Held:
        value = initial_value(variable)
        return (value, value) if has_components(self._runtime, variable) else value

    def _over_mesh(self, body: Callable[..., R]) -> Callable[..., R]:
        if self._num_replicas == 1:
            return body
        split, whole = self._runtime.by_rows.spec, PartitionSpec()

        def mapped(*args: object) -> R:
            specs = (*[whole] * (len(args) - 1), split)
            # Without the check, each device can keep its own result in its shard.
            return jax.shard_map(
                body, mesh=self._runtime.mesh, in_specs=specs, out_specs=whole, check_vma=False
            )(*args)

        return mapped

    def _replica(self, values: Values, inputs: _Arrays, sums: SumsInMemory | None = None) -> _Results:
        """Runs the function on one device; returns the values of written variables and the arrays."""
        if self._num_replicas > 1:
            inputs = [part[0] if scalar else part for part, scalar in zip(inputs, self._scalar, strict=True)]
        collectives = MeshCollectives(self._runtime, sums)
        replica = JaxReplica(self._strategy, collectives)
        try:
            with replica, JaxScope(replica, values) as scope:
                args, kwargs = self._call.fill(inputs)
                result = self._fn(*args, **kwargs)
                scope.aggregate()
            self._collectives = replica.log
            self._fits_memory = collectives.fits_memory
        except (KdistError, NoRule):
            raise
        except Exception as error:
            error.add_note("Raised in the function of all replicas: JAX traces it once.")
            raise
        self._outputs = Outputs(result, replica.same)
        # Traces can disagree on whether a value is new, so the first trace determines the written variables.
        written = self._written if self._knows_written else list(values.written.values())
        return values.results(written), self._outputs.take()


def function(fn: Callable[P, R], **options: object) -> Callable[P, R]:
    """Returns a compiled function, unless it acts for all replicas; `strategy.run` compiles by itself."""
    if options:
        hint_ignored(f"options={sorted(options)} of kdist.function", "JAX compiles all functions.")
    compiled = _Function(fn)

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if current_replica() is not None or keras_hooks.stateless_scope() is not None:
            return fn(*args, **kwargs)
        return compiled(*args, **kwargs)

    return wrapper


class _Function:
    """A function that runs outside replicas. Its first call shows whether it can be compiled.

    A trace would also show this. However, side effects before it stops (reading a batch, increasing a
    counter) would happen twice.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._was_called = False
        self.speaks_for_all = False
        self._programs: dict[Hashable, _PlainProgram] = {}

    def __call__(self, *args: object, **kwargs: object) -> Any:
        leaves = keras.tree.flatten((args, kwargs))
        if self.speaks_for_all or any(isinstance(leaf, DistributedValues) for leaf in leaves):
            return self._fn(*args, **kwargs)
        if not self._was_called:
            return self._call_first(args, kwargs)
        call = Call(args, kwargs, 1)
        key = call.key()
        try:
            if key not in self._programs:
                self._programs[key] = _PlainProgram(self._fn, call)
        except SpeaksForAll:  # in a branch that the first call did not take
            self.speaks_for_all = True
            return self._fn(*args, **kwargs)
        return self._programs[key](call)

    def _call_first(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Structure:
        _running.first_calls.append(self)
        try:
            result = self._fn(*args, **kwargs)
        finally:
            _running.first_calls.pop()
        self._was_called = True
        return result


class _PlainProgram:
    """A function that runs outside replicas, compiled for arguments with the same key."""

    def __init__(self, fn: Function, call: Call) -> None:
        self._fn = fn
        self._call = call
        values = discover(
            lambda values: lambda data: self._trace(values, data)[1], [parts[0] for parts in call.data]
        )
        self._variables = values.variables
        self._written = list(values.written.values())
        self._compiled = jax.jit(
            lambda values, data: self._trace(Values(self._variables, values, initial_value), data)
        )

    def __call__(self, call: Call) -> Structure:
        values = [variable.value for variable in self._variables]
        state, arrays = self._compiled(values, [parts[0] for parts in call.data])
        for variable, value in zip(self._written, state, strict=True):
            variable.assign(value)
        return self._outputs.fill(arrays)

    def _trace(self, values: Values, data: _Arrays) -> _Results:
        _running.traces += 1
        try:
            with PlainScope(values):
                args, kwargs = self._call.fill(data)
                result = self._fn(*args, **kwargs)
        finally:
            _running.traces -= 1
        self._outputs = Outputs(result)
        return values.results(list(values.written.values())), self._outputs.take()


def value_and_grad(
    fn: Callable[P, object], variables: Sequence[keras.Variable], has_aux: bool
) -> Callable[P, tuple[Structure, list[Tensor | None]]]:
    """Returns a function that computes a loss and its gradients with `jax.value_and_grad`."""

    def wrapper(*args: P.args, **kwargs: P.kwargs) -> tuple[Structure, list[Tensor | None]]:
        outer = keras_hooks.stateless_scope()
        caught: list[Any] = []

        def pure(values: Sequence[jax.Array]) -> tuple[jax.Array, tuple[list[jax.Array], list[jax.Array]]]:
            with tables.using(variables, values) as shown, GradientScope(outer, variables, shown) as scope:
                loss, aux = split_aux(fn(*args, **kwargs), has_aux)
                check_loss(loss)
            caught[:] = [scope, Outputs(aux)]
            return loss, (caught[1].take(), scope.results())

        (loss, (data, written)), gradients = jax.value_and_grad(pure, has_aux=True)(tables.given(variables))
        tables.note(variables, gradients)
        scope, outputs = caught
        scope.write_outside(written)
        if not has_aux:
            return loss, list(gradients)
        return (loss, outputs.fill(data)), list(gradients)

    return wrapper
