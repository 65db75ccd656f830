"""The JAX functions that kdist's own parameter servers need."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import keras
import numpy as np

from kdist.backends.coordination import Engine
from kdist.backends.jax import tables

if TYPE_CHECKING:
    from kdist.arrays.types import Structure
    from kdist.backends.coordination import Record


class JaxEngine(Engine):
    """Implements `Engine` with immutable arrays: a new value is always a new array."""

    def __init__(self) -> None:
        # The compiled steps of each optimizer. The keys are the ids of the variables.
        self._programs: weakref.WeakKeyDictionary[
            keras.Optimizer, dict[tuple[int, ...], Callable[[Sequence[np.ndarray]], None]]
        ] = weakref.WeakKeyDictionary()

    def load(self, variable: keras.Variable, held: jax.Array | None, array: np.ndarray) -> jax.Array:
        with jax.ensure_compile_time_eval():  # the first read may happen in a trace
            return keras.ops.convert_to_tensor(array, dtype=variable.dtype)

    def mark(self, held: jax.Array) -> jax.Array:
        return held

    def is_changed(self, held: jax.Array, mark: object) -> bool:
        return held is not mark

    def table(self, record: Record) -> None:
        """Does nothing, because programs look up rows before they run."""

    def by_rows(self, variable: keras.Variable, gradient: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        return tables.by_rows(variable, gradient)

    def train_step(self, model: keras.Model, data: Structure) -> Structure:
        """Runs Keras's stateless step with the values that variables have in the surrounding scope."""
        # The optimizer's step runs elsewhere, so the values of its per-variable state do not matter here.
        slots = model.optimizer.variables
        own = [v.value if v.ndim == 0 else jax.numpy.zeros(v.shape, v.dtype) for v in slots]
        groups = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
        others, metrics = ([v.value for v in group] for group in groups[1:])
        with tables.in_step_of(model):
            state = (tables.given(model.trainable_variables), others, own, metrics)
            logs, (_, new_others, new_own, new_metrics) = model.train_step(state, data)
        old, new = [*others, *metrics], [*new_others, *new_metrics]
        changes = [*zip([*groups[1], *groups[2]], old, new, strict=True)]
        # A `MultiOptimizer` counts its steps here.
        changes += [one for one in zip(slots, own, new_own, strict=True) if one[0].ndim == 0]
        for variable, before, value in changes:
            if value is not before:
                variable.assign(value)
        return logs

    def apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[np.ndarray], variables: Sequence[keras.Variable]
    ) -> None:
        programs = self._programs.setdefault(optimizer, {})
        key = tuple(map(id, variables))
        if key not in programs:
            programs[key] = _compiled(optimizer, list(variables))
        programs[key](gradients)


def _compiled(
    optimizer: keras.Optimizer, variables: list[keras.Variable]
) -> Callable[[Sequence[np.ndarray]], None]:
    state = [*variables, *optimizer.variables]

    @jax.jit
    def step(values: Sequence[jax.Array], gradients: Sequence[jax.Array]) -> list[jax.Array]:
        with keras.StatelessScope(list(zip(state, values, strict=True))) as scope:
            optimizer.apply(gradients, variables)
        found = [scope.get_current_value(variable) for variable in state]
        return [value if new is None else new for value, new in zip(values, found, strict=True)]

    def run(gradients: Sequence[np.ndarray]) -> None:
        for variable, value in zip(state, step([v.value for v in state], list(gradients)), strict=True):
            variable.assign(value)

    return run
