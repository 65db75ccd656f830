"""`JaxSteps`: runs the steps of one model as one program over all devices.

Keras's JAX trainer is stateless inside (`train_step(state, data) -> logs, state`) and its state is what is
placed on the mesh. Since the program sees the whole global batch, every loss, mask, metric, clipping and
moving statistic is the one of a single device.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np

from kdist import keras_hooks, tracing
from kdist.arrays.gathering import gather_rows
from kdist.arrays.splitting import have_all_rows
from kdist.backends.contract import ReplicaBatches, StepFunction
from kdist.backends.jax import moments
from kdist.backends.jax.core import JaxCore
from kdist.backends.jax.storage import divided, is_divided, stored

# What each step's state consists of, in the order of Keras's JAX trainer.
_STATE = {
    "train": ("trainable_variables", "non_trainable_variables", "optimizer", "metrics_variables"),
    "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    "predict": ("trainable_variables", "non_trainable_variables"),
}


class JaxSteps(StepFunction):
    """Runs `train_step`, `test_step` or `predict_step` of a model on global batches.

    Between steps the state lives here, replicated over all devices; `sync` shows it in the variables. The
    variables keep their last values meanwhile, in memory of their own on the first device, so that an error
    in a step never leaves them without a value.

    With `run_eagerly` or `jit_compile=False` there is no program to divide: every worker computes the whole
    global batch on its first device. This is for debugging; every value is then an ordinary array.

    Predictions are gathered: each device holds the outputs for all rows of the batch while they are read.

    The model is held weakly, since step functions are kept in a table of models.
    """

    def __init__(self, runtime: JaxCore, model: Any, kind: str) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)
        self._runtime = runtime
        self._kind = kind
        self._state: Any = None
        self._eager = bool(model.run_eagerly) or not model.jit_compile
        step = _stateless_step(self._model, kind)
        if self._eager:
            self._step = step
        else:
            self._step = self._compile(step)

    def __enter__(self) -> JaxSteps:
        """Ends what other steps of the model have under way, such as the `fit` whose callback evaluates."""
        self._model().jax_state_sync()
        self._working = self._runtime.group.working()
        self._working.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc: Any) -> None:
        """Shows the state in the variables; after an error, the last state that was computed."""
        if kind is not None:
            self._forget_failed()
            if self._has_lost_divided():
                exc[0].add_note(
                    "The step reused the memory of the model's sharded variables, so their values are lost. "
                    "Create the model again and restore a checkpoint."
                )
        self._working.__exit__(None, None, None)
        self.sync()

    def __call__(self, batches: Sequence[ReplicaBatches]) -> Any:
        """Runs one step a batch. Returns the last logs (train, test) or the rows of all batches (predict)."""
        outputs = [self._run(batch) for batch in batches]
        if self._kind != "predict":
            return outputs[-1]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)

    def _run(self, batch: ReplicaBatches) -> Any:
        if self._state is None:
            # A callback may have changed anything since the last sync: the variables are the truth.
            self._state = self._read()
            keras_hooks.show_state(self._model(), self.sync)
        if self._eager:
            data = batch.parts[0]
            if not have_all_rows(batch.split):
                data = gather_rows(self._runtime.group, batch.parts)
            outputs, self._state = self._step(self._state, self._runtime.place_eagerly(data))
            return self._runtime.show_eager(outputs)
        data = self._runtime.join_parts(batch)
        try:
            outputs, self._state = self._step(self._state, data)
        except BaseException:
            self._forget_failed()
            raise
        self._runtime.throttle((outputs, self._state))
        if self._runtime.is_central:
            self.sync()  # back to the device that holds it
        self._show_divided()
        return self._runtime.show(outputs)

    def sync(self) -> None:
        """Shows the state in the model's variables, without copying; the next step reads them again."""
        state, self._state = self._state, None
        if state is None:
            return
        keras_hooks.hide_state(self._model())
        # An execution that failed after it was started raises here, and not where its values are used.
        with tracing.span("until ready", "step"):
            jax.block_until_ready(state)
        for variables, values in zip(_state_variables(self._model(), self._kind), state, strict=True):
            shown = values if self._eager else self._runtime.show_variables(variables, values)
            for variable, value in zip(variables, shown, strict=True):
                if is_divided(variable) and not self._eager:
                    keras_hooks.set_native_value(variable, value)
                else:
                    variable.assign(value)

    def _read(self) -> Any:
        groups = _state_variables(self._model(), self._kind)
        if self._eager:
            return tuple([variable.value for variable in variables] for variables in groups)
        return tuple(self._runtime.place_variables(variables) for variables in groups)

    def _compile(self, step: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Returns the program of the step, which leaves each variable as its layout says."""
        runtime = self._runtime

        def traced(state: Any, data: Any) -> tuple[Any, Any]:
            groups = _state_variables(self._model(), self._kind)
            layouts = contextlib.nullcontext() if runtime.storage is None else runtime.storage.outputs()
            with layouts, moments.over(runtime.by_batch):
                state = tuple(list(map(divided, *pair)) for pair in zip(groups, state, strict=True))
                outputs, state = step(state, runtime.divide(data))
            return outputs, tuple(list(map(stored, *pair)) for pair in zip(groups, state, strict=True))

        @functools.cache
        def compiled() -> Callable[[Any, Any], tuple[Any, Any]]:  # once the model has all its variables
            groups = _state_variables(self._model(), self._kind)
            state = tuple(runtime.shardings(variables) or runtime.replicated for variables in groups)
            return jax.jit(traced, donate_argnums=0, out_shardings=(runtime.replicated, state))

        return lambda state, data: compiled()(state, data)

    def _has_lost_divided(self) -> bool:
        variables = [v for group in _state_variables(self._model(), self._kind) for v in group]
        return any(is_divided(v) and keras_hooks.native_value(v).is_deleted() for v in variables)

    def _show_divided(self) -> None:
        """Shows divided variables their new parts: the step has taken the memory of the old ones."""
        if self._runtime.storage is None:
            return
        for variables, values in zip(_state_variables(self._model(), self._kind), self._state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                if is_divided(variable):
                    keras_hooks.set_native_value(variable, value)

    def _forget_failed(self) -> None:
        """Drops a state that a failed execution has taken or left without values.

        The variables keep the values of the last sync then.
        """
        try:
            jax.block_until_ready(self._state)  # an execution may fail after it was started
        except (RuntimeError, ValueError):  # deleted; or the engine's error
            keras_hooks.hide_state(self._model())
            self._state = None


def _state_variables(model: Any, kind: str) -> list[Sequence[Any]]:
    groups = [getattr(model, name) for name in _STATE[kind]]
    return [
        group.variables if name == "optimizer" else group
        for name, group in zip(_STATE[kind], groups, strict=True)
    ]


def _stateless_step(model_ref: Callable[[], Any], kind: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    def step(state: Any, data: Any) -> tuple[Any, Any]:
        model = model_ref()
        if kind == "predict":
            outputs, non_trainable_variables = model.predict_step(state, data)
            return outputs, (state[0], non_trainable_variables)
        keras_hooks.forget_layer_losses(model)
        return getattr(model, f"{kind}_step")(state, data)

    return step
