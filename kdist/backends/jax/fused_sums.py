"""Runs a step on the rows of each device, so that all sums over the devices travel in one collective.

XLA's partitioner places an all-reduce at every gradient, loss and metric, and gloo sends one tensor after the
other. With small models, a step then mostly waits. Here, kdist traces the step of the global batch and runs its
operations on each device: with that device's rows, with equal arrays, or with parts of a sum. Operations that need
the whole sum wait until no other operation can run. Then one sum adds all parts, with an all-reduce or in memory that
the workers share.

Each operation keeps its meaning for the global batch, so the results match one device. If an operation has no
rule, the error `NoRule` contains its name, and XLA divides the program instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.sharding import Mesh, PartitionSpec

from kdist.backends.jax import row_rules
from kdist.backends.jax.collectives import SumsInMemory, SumsOfXla
from kdist.backends.jax.kept_gradients import Kept
from kdist.backends.jax.row_rules import SUM, WHOLE, NoRule, Value, bind
from kdist.backends.replica import WIDE
from kdist.communication.shared_memory import SharedMemory

if TYPE_CHECKING:
    from kdist.arrays.types import Structure

GRADIENT = "kdist gradient"
_INLINED = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
_INLINED |= {"custom_vjp_call": "call_jaxpr"}
_MOST_GATHERED = 1 << 16  # bytes of an array that all devices get whole although they have its rows


def over_rows(
    step: Callable[..., tuple[Structure, Structure]],
    mesh: Mesh,
    memory: SharedMemory | None,
    turn: jax.Array,
    state: Structure,
    data: Structure,
    is_loop: bool,
    compression: str | None = None,
    kept: Kept | None = None,
) -> tuple[Structure, tuple[jax.Array, Structure, Sequence[jax.Array]]]:
    """Runs a step, or a loop of steps, on the devices of a mesh with one axis.

    Args:
        step: Takes the state and a global batch; returns outputs and the new state.
        mesh: The mesh.
        memory: The shared memory in which the workers sum, or `None` if XLA sums.
        turn: The array that the previous program returned. It orders the sums in shared memory.
        state: Arrays that are equal on all devices.
        data: A global batch, whose rows the devices divide evenly, or such batches along a first axis.
        is_loop: Whether the data contains several batches.
        compression: A 16-bit dtype for the sums of the arrays that `checkpoint_name` names `GRADIENT`.
        kept: The arrays that each device keeps; gradients of earlier batches only for one batch.

    Returns:
        The outputs of the last step, and a tuple of the next `turn`, the state, both equal on all devices, and what
        each device keeps.

    Raises:
        NoRule: If a part of the step cannot run on rows.
    """
    (axis,) = mesh.axis_names
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), data) if is_loop else data
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)

    def on_rows(
        turn: jax.Array, state: Structure, arrays: Sequence[jax.Array], data: Structure
    ) -> tuple[Structure, Structure]:
        def one(carry: tuple[jax.Array, Structure, Any], batch: Structure) -> tuple[Structure, Structure]:
            turn, state, arrays = carry
            sums = (
                SumsInMemory(memory, turn) if memory is not None else SumsOfXla(axis, mesh.size, compression)
            )
            values = [Value(leaf, WHOLE) for leaf in jax.tree.leaves(state)]
            values += [Value(leaf, 0) for leaf in jax.tree.leaves(batch)]
            inside = None if kept is None else Kept(jax.tree.map(lambda a: a[0], arrays), kept.is_due)
            results = _Program(axis, mesh.size, sums, compression, inside).run(closed, values, is_whole=True)
            outputs, state = jax.tree.unflatten(jax.tree.structure(shapes), [r.array for r in results])
            arrays = [] if inside is None else jax.tree.map(lambda a: a[None], [inside.arrays, inside.slots])
            return (getattr(sums, "turn", turn), state, arrays), outputs

        if not is_loop:
            carry, outputs = one((turn, state, arrays), data)
            return outputs, carry
        carry, outputs = lax.scan(one, (turn, state, arrays), data)
        return jax.tree.map(lambda leaf: leaf[-1], outputs), carry

    equal, rows = PartitionSpec(), PartitionSpec(axis)
    specs = (equal, equal, rows, PartitionSpec(None, axis) if is_loop else rows)
    out_specs = (equal, (equal, equal, rows))
    mapped = jax.shard_map(on_rows, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return mapped(turn, state, [] if kept is None else [kept.arrays, kept.slots], data)


class _Operation(NamedTuple):
    """An equation of the step without calls of other functions; inputs and outputs are indices of values."""

    equation: JaxprEqn
    inputs: list[int]
    outputs: list[int]


class _Incomplete(Exception):
    """Stops an operation until some of its inputs are whole."""

    def __init__(self, inputs: Sequence[int]) -> None:
        self.inputs = inputs


class _OtherCarry(Exception):
    """Repeats the trace of a loop with another division of its carry."""


class _Program:
    """Runs the operations of a step on one device, inside `shard_map`; see `over_rows`.

    `sums` sums arrays of one dtype over all devices; `None` inside a loop, where operations cannot wait.
    """

    def __init__(
        self,
        axis: str,
        number: int,
        sums: Callable[[Sequence[jax.Array]], list[jax.Array]] | None,
        compression: str | None = None,
        kept: Kept | None = None,
    ) -> None:
        self._axis, self._number, self._sums, self._compression = axis, number, sums, compression
        self._kept = kept
        self._named: dict[int, int] = {}
        self._gradients: set[int] = set()
        self._values: dict[int, Value] = {}
        self._makers: dict[int, _Operation] = {}
        self._cuts: dict[tuple[int, int], jax.Array] = {}
        self._count = 0

    def run(self, closed: ClosedJaxpr, values: Sequence[Value], is_whole: bool = False) -> list[Value]:
        """Runs all operations; returns the results, which are equal on all devices if `is_whole`."""
        operations: list[_Operation] = []
        inputs = [self._new(value) for value in values]
        outputs = self._inline(closed, inputs, operations)
        for operation in reversed(operations):  # a gradient can be the sum of several ones
            of_gradient = operation.equation.params.get("name") == GRADIENT
            is_addition = operation.equation.primitive.name == "add_any"
            if of_gradient or (is_addition and operation.outputs[0] in self._gradients):
                self._gradients.update(operation.inputs)
        if self._kept is not None:
            named = [each for each in operations if each.equation.params.get("name") == GRADIENT]
            if len(named) != (len(self._kept.arrays) or len(self._kept.slots)):
                raise NoRule("some variables without a gradient")
            self._named = {operation.outputs[0]: i for i, operation in enumerate(named)}
            self._gradients.update(self._named)
        while operations:
            waiting: list[_Operation] = []
            wanted: dict[int, None] = {}
            for operation in operations:
                if not all(index in self._values for index in operation.inputs):
                    waiting.append(operation)
                    continue
                try:
                    self._apply(operation)
                except _Incomplete as incomplete:
                    wanted |= dict.fromkeys(incomplete.inputs)
                    waiting.append(operation)
            operations = waiting
            if waiting:
                known = [index for index in outputs if index in self._values and is_whole]
                if self._kept is not None and self._kept.waiting and not wanted:
                    self._kept.sum_waiting(self._number, partial(self._sum_parts, known))
                else:
                    self._complete([*wanted, *known])
        if is_whole:
            self._complete(outputs)
        return [self._values[index] for index in outputs]

    def _new(self, value: Value | None = None) -> int:
        self._count += 1
        if value is not None:
            self._values[self._count] = value
        return self._count

    def _inline(self, closed: ClosedJaxpr, inputs: list[int], operations: list[_Operation]) -> list[int]:
        """Adds the operations of a function and of the functions that it calls; returns its outputs."""
        jaxpr = closed.jaxpr
        names: dict[Var, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        names |= {v: self._new(Value(c, WHOLE)) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}

        def index(atom: Var | Literal) -> int:
            return self._new(Value(atom.val, WHOLE)) if isinstance(atom, Literal) else names[atom]

        for equation in jaxpr.eqns:
            given = [index(atom) for atom in equation.invars]
            inner = equation.params.get(_INLINED.get(equation.primitive.name, ""))
            if inner is not None:
                found = self._inline(inner, given, operations)
            else:
                found = [self._new() for _ in equation.outvars]
                operations.append(_Operation(equation, given, found))
            names |= dict(zip(equation.outvars, found, strict=True))
        return [index(atom) for atom in jaxpr.outvars]

    def _apply(self, operation: _Operation) -> None:
        equation = operation.equation
        values = [self._values[index] for index in operation.inputs]
        divisions = [value.division for value in values]
        name = equation.primitive.name
        if equation.effects:
            raise NoRule(f"{name}, which has side effects")
        if name == "name" and self._kept is not None and operation.outputs[0] in self._named:
            results = self._kept.replace(self._named[operation.outputs[0]], self._divide(values[0], SUM))
            if not results:
                raise _Incomplete([])
        elif name == "sharding_constraint":
            is_replicated = equation.params["sharding"].is_fully_replicated
            if divisions[0] is SUM or (is_replicated and divisions[0] is not WHOLE):
                raise _Incomplete(operation.inputs)
            results = values
        elif name == "reshard":  # does nothing, because no axis of the mesh is explicit
            results = values
        elif all(division is WHOLE for division in divisions):
            results = [Value(a, WHOLE) for a in bind(equation, [v.array for v in values])]
            self._makers |= dict.fromkeys(operation.outputs, operation)
        elif name == "scan":
            results = self._scan(equation, values)
        elif SUM in divisions:
            # A regularizer adds to a gradient that this device may keep.
            cannot_wait = self._sums is None or (self._named and operation.outputs[0] in self._gradients)
            if cannot_wait and name in row_rules.ADDITIVE and set(divisions) == {SUM, WHOLE}:
                values = [v if v.division is SUM else Value(self._first_only(v.array), SUM) for v in values]
                divisions = [SUM] * len(values)
            if not row_rules.is_linear(equation, divisions):
                raise _Incomplete([i for i, d in zip(operation.inputs, divisions, strict=True) if d is SUM])
            results = [Value(a, SUM) for a in bind(equation, [v.array for v in values])]
        else:
            results = self._on_rows(operation, values)
        for variable, index, result in zip(equation.outvars, operation.outputs, results, strict=True):
            self._check_shape(name, variable.aval.shape, result)
            self._values[index] = result

    def _check_shape(self, name: str, shape: Sequence[int], result: Value) -> None:
        """Raises an error if an operation returns other rows than its rule promised."""
        found, expected = np.shape(result.array), list(shape)
        if result.division not in (WHOLE, SUM):
            expected[result.division] //= self._number
        if list(found) != expected:
            raise NoRule(f"{name}, which returned the shape {found} instead of {tuple(expected)}")

    def _on_rows(self, operation: _Operation, values: list[Value]) -> list[Value]:
        """Runs an operation on rows, if it has a rule for their axis; otherwise, its inputs must be whole."""
        plan = row_rules.plan(operation.equation, [v.division for v in values], self._number)
        if plan is None:
            raise _Incomplete(
                [i for i, v in zip(operation.inputs, values, strict=True) if v.division is not WHOLE]
            )
        arrays = [
            value.array if axis is None or value.division is not WHOLE else self._cut(index, axis)
            for index, value, axis in zip(operation.inputs, values, plan.inputs, strict=True)
        ]
        if plan.is_first_only:
            arrays[0] = self._first_only(arrays[0])
        return [Value(a, plan.output) for a in bind(operation.equation, arrays, **plan.params)]

    def _first_only(self, array: jax.Array) -> jax.Array:
        """Returns an array on the first device and zeros on the others, so that a sum has it once."""
        return jnp.where(lax.axis_index(self._axis) == 0, array, jnp.zeros_like(array))

    def _cut(self, index: int, axis: int) -> jax.Array:
        """Returns this device's rows of an array that is equal on all devices, and computes only these rows."""
        key = index, axis
        if key not in self._cuts:
            array = self._values[index].array
            if np.shape(array)[axis] % self._number:
                raise NoRule(f"{np.shape(array)[axis]} rows of an array on {self._number} devices")
            self._cuts[key] = self._cut_maker(index, axis)
        return self._cuts[key]

    def _cut_maker(self, index: int, axis: int) -> jax.Array:
        array = self._values[index].array
        size = np.shape(array)[axis] // self._number
        maker = self._makers.get(index)
        if maker is not None and maker.equation.primitive.name in row_rules.ELEMENTWISE:
            inner = [self._values[i].array for i in maker.inputs]
            is_cut = [np.ndim(other) > axis and np.shape(other)[axis] > 1 for other in inner]
            arrays = [
                self._cut(i, axis) if cut else other
                for i, other, cut in zip(maker.inputs, inner, is_cut, strict=True)
            ]
            return bind(maker.equation, arrays)[0]
        if maker is not None and maker.equation.primitive.name == "broadcast_in_dim":
            params = maker.equation.params
            (source,) = maker.inputs
            value, shape = self._values[source].array, list(params["shape"])
            shape[axis] = size
            if axis in params["broadcast_dimensions"]:
                inner = params["broadcast_dimensions"].index(axis)
                if np.shape(value)[inner] == np.shape(array)[axis]:
                    value = self._cut(source, inner)
            return bind(maker.equation, [value], shape=tuple(shape))[0]
        start = lax.axis_index(self._axis) * size
        if maker is not None and axis == 0 and row_rules.can_draw_rows(maker.equation):
            return row_rules.draw_rows(maker.equation, self._values[maker.inputs[0]].array, start, size)
        return lax.dynamic_slice_in_dim(array, start, size, axis)

    def _complete(self, wanted: Sequence[int]) -> None:
        """Makes values equal on all devices, with one all-reduce per dtype."""
        parts: dict[np.dtype, dict[int, jax.Array]] = {}
        for index in wanted:
            value = self._values[index]
            if value.division is WHOLE:
                continue
            array = value.array if value.division is SUM else self._embed(value)
            is_small = index in self._gradients and array.dtype.name in WIDE
            dtype = np.dtype(self._compression if self._compression and is_small else array.dtype)
            parts.setdefault(dtype, {})[index] = array.astype(dtype)
        if parts and self._sums is None:
            raise NoRule("a sum inside a loop")
        for arrays in parts.values():
            assert self._sums is not None
            for index, total in zip(arrays, self._sums([*arrays.values()]), strict=True):
                dtype = self._values[index].array.dtype  # a bool is summed as an integer
                self._values[index] = Value(total.astype(dtype), WHOLE)

    def _sum_parts(self, others: Sequence[int], parts: Sequence[jax.Array]) -> list[jax.Array]:
        self._complete([*(indices := [self._new(Value(part, SUM)) for part in parts]), *others])
        return [self._values[index].array for index in indices]

    def _embed(self, value: Value) -> jax.Array:
        """Returns rows inside an array of zeros: the sum over the devices is the whole array."""
        array, axis = value.array, value.division
        shape = list(array.shape)
        shape[axis] *= self._number
        if math.prod(shape) * array.dtype.itemsize > _MOST_GATHERED:
            raise NoRule(f"an array of shape {tuple(shape)} that all devices need whole")
        if array.dtype == bool:
            array = array.astype(np.int32)
        start = lax.axis_index(self._axis) * array.shape[axis]
        return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, array.dtype), array, start, axis)

    def _scan(self, equation: JaxprEqn, values: list[Value]) -> list[Value]:
        """Runs a loop whose body needs no sums, such as the time steps of a recurrent layer."""
        params = equation.params
        first, last = row_rules.carry_of_scan(params)
        constants, xs = values[:first], values[last:]
        if any(x.division == 0 for x in xs) or any(v.division is SUM for v in values):
            raise NoRule("a loop over rows or sums")
        divisions = [value.division for value in values[first:last]]
        inner_xs = [x.division if x.division in (WHOLE, SUM) else x.division - 1 for x in xs]
        found: list[Any] = []

        def body(carry: list[jax.Array], rows: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            program = _Program(self._axis, self._number, None)
            inputs = [*constants, *map(Value, carry, divisions), *map(Value, rows, inner_xs)]
            results = program.run(params["jaxpr"], inputs)
            carried, ys = results[: last - first], results[last - first :]
            for i, (old, new) in enumerate(zip(divisions, carried, strict=True)):
                if old is WHOLE and new.division is not WHOLE:
                    divisions[i] = new.division
                    raise _OtherCarry
            found[:] = [y.division for y in ys]
            return [self._divide(new, d) for new, d in zip(carried, divisions, strict=True)], [
                y.array for y in ys
            ]

        for _ in range(len(divisions) + 1):
            start = [self._divide(v, d) for v, d in zip(values[first:last], divisions, strict=True)]
            options = {name: params[name] for name in ("length", "reverse", "unroll")}
            try:
                carry, ys = lax.scan(body, start, [x.array for x in xs], **options)
            except _OtherCarry:
                continue
            outer = [d if d in (WHOLE, SUM) else d + 1 for d in found]
            return [*map(Value, carry, divisions), *map(Value, ys, outer)]
        raise NoRule("a loop")

    def _divide(self, value: Value, division: Any) -> jax.Array:
        if value.division == division:
            return value.array
        if value.division is not WHOLE:
            raise NoRule("a gradient or a carry of a loop whose division changes")
        if division is SUM:
            return self._first_only(value.array)
        size = value.array.shape[division] // self._number
        return lax.dynamic_slice_in_dim(value.array, lax.axis_index(self._axis) * size, size, division)
