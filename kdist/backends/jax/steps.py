"""`JaxSteps`: runs the steps of one model as one program over all devices.

Keras's JAX trainer is stateless internally (`train_step(state, data) -> logs, state`), and kdist places this
state on the mesh. The program sees the whole global batch. Therefore every loss, mask, metric, clipping and
moving statistic is the same as on a single device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import keras
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from kdist import keras_hooks, tracing
from kdist.arrays.row_exchange import gather_rows
from kdist.arrays.splitting import have_all_rows
from kdist.backends.contract import ReplicaBatches
from kdist.backends.jax import moments
from kdist.backends.jax.collectives import next_turn
from kdist.backends.jax.core import JaxCore
from kdist.backends.jax.fused_sums import GRADIENT, over_rows
from kdist.backends.jax.kept_gradients import CannotKeep, Kept, KeptOnDevices, on_each_device
from kdist.backends.jax.storage import divided, is_divided, stored
from kdist.backends.kept_gradients import KeepingSteps
from kdist.cluster import logs
from kdist.communication.options import hint_ignored

if TYPE_CHECKING:
    _State: TypeAlias = tuple[Sequence[jax.Array], ...]
    """The values of groups of variables."""
    from kdist.arrays.types import Structure

# The parts of each step's state, in the order of Keras's JAX trainer.
_STATE = {
    "train": ("trainable_variables", "non_trainable_variables", "optimizer", "metrics_variables"),
    "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    "predict": ("trainable_variables", "non_trainable_variables"),
}


class JaxSteps(KeepingSteps[KeptOnDevices]):
    """Runs `train_step`, `test_step` or `predict_step` of a model on global batches.

    Between steps, the state is here, and `sync` writes it to the variables. Until then, variables that are
    not sharded keep their last values in separate memory on the first device. A failed step does not
    affect these values. Sharded variables can lose their values, because a step reuses their memory.

    With `run_eagerly=True` or `jit_compile=False`, every worker computes the whole global batch on its first
    device, with ordinary arrays. Use this only for debugging.

    Each device holds the predictions for all rows of the batch while they are read.

    The model is held by a weak reference, because a table of models contains the step functions.
    """

    runtime: JaxCore

    def __init__(self, runtime: JaxCore, model: keras.Model, kind: str) -> None:
        super().__init__(runtime, model, kind)
        self._state: Any = None
        self._eager = bool(model.run_eagerly) or not model.jit_compile
        self._step = _stateless_step(self._model, kind)
        self._compiled = self._compile()
        self._is_slow_loop: bool | None = None
        self._compression = runtime.compression or ("powersgd" if runtime.low_rank is not None else None)
        self._slots: list[Any] = []
        can_fuse = runtime.fuses_sums if self._compression is None else runtime.can_fuse
        self._can_fuse = can_fuse and kind != "predict"
        self.can_keep = runtime.can_fuse and not self._eager and kind == "train"
        if self._eager:
            self._note_uncompressed("of uncompiled steps", "every worker computes the whole batch.")
        elif not self._can_fuse:
            self._note_uncompressed("in fit", "the variables are sharded, so that XLA sums the gradients.")

    def __enter__(self) -> JaxSteps:
        """Syncs the state of other steps of the model, for example of a `fit` whose callback evaluates."""
        self.model.jax_state_sync()
        self._working = self.runtime.group.working()
        self._working.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc: Any) -> None:
        """Writes the state to the variables; after an error, the last state that was computed."""
        if kind is not None:
            self._forget_failed()
            if self.kept is not None:
                self.kept.drop(exc[0])
            if self._has_lost_divided():
                exc[0].add_note(
                    "The step reused the memory of the model's sharded variables, so their values are lost. "
                    "Create the model again and restore a checkpoint."
                )
        self._working.__exit__(None, None, None)
        self.sync()

    def __call__(self, batches: Sequence[ReplicaBatches]) -> Structure:
        """Runs one step per batch; returns the last logs, or for `predict` the rows of all batches."""
        if self._can_loop(batches):
            return self._run(*batches)
        outputs = [self._run(batch) for batch in batches]
        if self.kind != "predict":
            return outputs[-1]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)

    def _can_loop(self, batches: Sequence[ReplicaBatches]) -> bool:
        """Returns whether one program can run all these steps: all workers must come to the same conclusion."""
        if self._eager or self.kind == "predict" or not 1 < len(batches) == self.model.steps_per_execution:
            return False
        leaves, structures = zip(*(jax.tree.flatten(batch.parts) for batch in batches), strict=True)
        if not all(isinstance(leaf, (np.ndarray, jax.Array)) for of_batch in leaves for leaf in of_batch):
            return False
        kinds = [
            (structure, [(leaf.shape, leaf.dtype) for leaf in of_batch], batch.split)
            for batch, of_batch, structure in zip(batches, leaves, structures, strict=True)
        ]
        return all(kind == kinds[0] for kind in kinds) and not self._loops_slowly(batches[0])

    def _loops_slowly(self, batch: ReplicaBatches) -> bool:
        """Returns whether a loop takes longer than separate steps.

        XLA computes gradients of convolutions on CPUs ten times as slowly in a loop.
        """
        if self._is_slow_loop is None and self.runtime.local_devices[0].platform == "cpu":
            state = self._read() if self._state is None else self._state
            program = jax.make_jaxpr(self._traced)(state, self.runtime.join_parts(batch))
            self._is_slow_loop = "conv_general_dilated" in str(program)
        return bool(self._is_slow_loop)

    def keep_gradients(self, keeps: bool) -> None:
        """Also writes the state to the variables first, because the gradients are added to some of them."""
        if self.kept is not None:
            self.sync()
        super().keep_gradients(keeps)

    def new_kept(self) -> KeptOnDevices:
        return KeptOnDevices(self.runtime, self.model)

    def _run(self, *batches: ReplicaBatches) -> Structure:
        """Runs one step, or several steps as one program."""
        fuses = self._can_fuse or self.keeps
        has_all_rows = fuses and any(have_all_rows(batch.split) for batch in batches)
        if self.keeps and (has_all_rows or len(batches) > 1):
            self.keep_gradients(False)
        if self._state is None:
            # Read the variables again, because a callback may have changed them since the last sync.
            self._state = self._read()
            keras_hooks.show_state(self.model, self.sync)
        if self._eager:
            (batch,) = batches
            data = batch.parts[0]
            if not have_all_rows(batch.split):
                data = gather_rows(self.runtime.group, batch.parts)
            outputs, self._state = self._step(self._state, self.runtime.place_eagerly(data))
            return self.runtime.show_eager(outputs)
        is_loop = len(batches) > 1
        data = _stacked(self.runtime, batches) if is_loop else self.runtime.join_parts(batches[0])
        try:
            if self.keeps or (self._can_fuse and not has_all_rows):
                outputs = self._run_fused(data, is_loop)
            else:
                if self._can_fuse:
                    self._note_uncompressed(
                        "of batches that the replicas do not divide", "XLA sums their gradients."
                    )
                outputs, self._state = self._compiled(False, is_loop)(self._state, data)
        except CannotKeep as reason:
            logs.logger.info("kdist sends the gradients of each batch, because the step has %s.", reason)
            self.can_keep = False
            self.keep_gradients(False)
            return self._run(*batches)
        except BaseException:
            self._forget_failed()
            raise
        self.runtime.throttle((outputs, self._state))
        if self.runtime.topology.is_central:
            self.sync()  # moves the state back to the central device
        self._show_divided()
        return self.runtime.show(outputs)

    def _run_fused(self, data: Structure, is_loop: bool) -> Structure:
        memory, kept = self.runtime.memory, self.kept if self.keeps else None
        turn = next_turn(self.runtime)
        low_rank = self.runtime.low_rank if self.kind == "train" else None
        if low_rank is not None and not self._slots:
            firsts = map(low_rank.arrays, self.model.trainable_variables)
            self._slots = [tuple(on_each_device(self.runtime, array) for array in each) for each in firsts]
        arrays: list[Any] = [[], self._slots] if low_rank is not None else []
        if kept is not None:
            kept.next_batch()
            arrays = [kept.arrays, self._slots]
        program = self._compiled(True, is_loop, None if kept is None else kept.is_due)
        outputs, (turn, self._state, arrays) = program((turn, self._state, arrays), data)
        if memory is not None:
            memory.turn = turn
        if kept is not None:
            kept.arrays = arrays[0]
        self._slots = arrays[1] if arrays else []
        return outputs

    def sync(self) -> None:
        """Writes the state to the model's variables without copying; the next step reads them again."""
        state, self._state = self._state, None
        if state is None:
            return
        keras_hooks.hide_state(self.model)
        # If an execution has failed, raise its error here, rather than where its values are used.
        try:
            with tracing.span("until ready", "step"):
                jax.block_until_ready((state, self._slots))
        except BaseException:
            self._slots = []
            raise
        for variables, values in zip(_state_variables(self.model, self.kind), state, strict=True):
            shown = values if self._eager else self.runtime.show_variables(variables, values)
            for variable, value in zip(variables, shown, strict=True):
                if is_divided(variable) and not self._eager:
                    keras_hooks.set_native_value(variable, value)
                else:
                    variable.assign(value)

    def _read(self) -> tuple[list[jax.Array], ...]:
        groups = _state_variables(self.model, self.kind)
        if self._eager:
            return tuple([variable.value for variable in variables] for variables in groups)
        return tuple(self.runtime.place_variables(variables) for variables in groups)

    def _compile(self) -> Callable[..., Callable[..., tuple[Structure, Any]]]:
        """Returns a function that returns the compiled step, with fused sums or as XLA divides it.

        If the devices keep gradients, its third argument is whether their sum is due, and otherwise `None`.

        The step leaves each variable in its layout. A loop of steps takes several batches as one array.
        """
        runtime, traced = self.runtime, self._traced

        def looped(is_loop: bool, state: _State, data: Structure) -> tuple[Structure, _State]:
            if not is_loop:
                return traced(state, data)

            def body(state: _State, data: Structure) -> tuple[_State, Structure]:
                outputs, state = traced(state, data)
                return state, outputs

            state, outputs = jax.lax.scan(body, state, data)
            return jax.tree.map(lambda leaf: leaf[-1], outputs), state

        def fused(
            is_loop: bool,
            is_due: bool | None,
            carry: tuple[jax.Array, _State, list[Any]],
            data: Structure,
        ) -> tuple[Structure, tuple[jax.Array, Structure, Sequence[jax.Array]]]:
            turn, state, arrays = carry
            kept = Kept(arrays, is_due) if arrays else None
            step = functools.partial(traced, is_marked=kept is not None)
            memory, compression = runtime.memory, runtime.compression
            try:
                return over_rows(step, runtime.mesh, memory, turn, state, data, is_loop, compression, kept)
            except Exception as reason:  # errors of the step itself are raised again
                if is_due is not None:
                    raise CannotKeep(str(reason)) from reason
                message = "kdist leaves the sums of the %s steps of this model to XLA: %s."
                logs.logger.info(message, self.kind, reason)
                self._note_uncompressed("of a step of fit", f"XLA sums the gradients ({reason}).")
                outputs, state = looped(is_loop, state, data)
                return outputs, (turn, state, arrays)

        @functools.cache
        def compiled(
            is_fused: bool, is_loop: bool, is_due: bool | None = None
        ) -> Callable[..., tuple[Structure, Any]]:
            # The first call is a step, so that the model has all its variables.
            groups = _state_variables(self.model, self.kind)
            carry: Any = tuple(runtime.shardings(variables) or runtime.replicated for variables in groups)
            program: Any = functools.partial(looped, is_loop)
            if is_fused:
                carry = (runtime.replicated, carry, runtime.by_rows)
                program = functools.partial(fused, is_loop, is_due)
            program.__name__ = program.func.__name__  # of the program in profiles
            return jax.jit(program, donate_argnums=0, out_shardings=(runtime.replicated, carry))

        return compiled

    def _traced(self, state: _State, data: Structure, is_marked: bool = False) -> tuple[Structure, _State]:
        """Runs the step on a global batch while JAX traces it."""
        runtime, groups = self.runtime, _state_variables(self.model, self.kind)
        layouts = contextlib.nullcontext() if runtime.storage is None else runtime.storage.outputs()
        marked: Any = contextlib.nullcontext()
        if is_marked or runtime.compression is not None:
            marked = keras_hooks.marking_gradients(lambda gradient: checkpoint_name(gradient, GRADIENT))
        with layouts, marked, moments.over(runtime.by_batch):
            state = tuple(list(map(divided, *pair)) for pair in zip(groups, state, strict=True))
            outputs, state = self._step(state, runtime.divide(data))
        return outputs, tuple(list(map(stored, *pair)) for pair in zip(groups, state, strict=True))

    def _note_uncompressed(self, what: str, why: str) -> None:
        if self._compression is not None and self.kind == "train":
            hint_ignored(f"compression={self._compression!r} {what}", why, self.runtime.worker_index)

    def _has_lost_divided(self) -> bool:
        variables = [v for group in _state_variables(self.model, self.kind) for v in group]
        return any(is_divided(v) and keras_hooks.native_value(v).is_deleted() for v in variables)

    def _show_divided(self) -> None:
        """Sets sharded variables to their new values, because the step has reused the old memory."""
        if self.runtime.storage is None:
            return
        for variables, values in zip(_state_variables(self.model, self.kind), self._state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                if is_divided(variable):
                    keras_hooks.set_native_value(variable, value)

    def _forget_failed(self) -> None:
        """Drops a state that a failed execution has consumed or left without values.

        The variables then keep the values of the last sync.
        """
        try:
            jax.block_until_ready((self._state, self._slots))  # an execution can fail after its dispatch
        except (RuntimeError, ValueError):  # deleted, or a backend error
            keras_hooks.hide_state(self.model)
            self._state, self._slots = None, []


def _state_variables(model: keras.Model, kind: str) -> list[Sequence[keras.Variable]]:
    groups = [getattr(model, name) for name in _STATE[kind]]
    return [
        group.variables if name == "optimizer" else group
        for name, group in zip(_STATE[kind], groups, strict=True)
    ]


def _stacked(runtime: JaxCore, batches: Sequence[ReplicaBatches]) -> Structure:
    """Returns arrays over the mesh with the rows of several global batches, which have equal shapes and splits."""
    num_rows = batches[0].split[-1][1]
    sharding = runtime.replicated if have_all_rows(batches[0].split) else runtime.by_rows_of_steps
    everyone = zip(*(batch.parts for batch in batches), strict=True)
    columns = [[jax.tree.leaves(part) for part in parts] for parts in everyone]  # without `None`
    stacked = []
    for leaves, device in zip(columns, runtime.local_devices, strict=True):
        is_host = all(isinstance(leaf, np.ndarray) for leaf in leaves[0])
        stack = np.stack if is_host else jax.numpy.stack
        arrays = [stack(each) for each in zip(*leaves, strict=True)]
        stacked.append(runtime.put(arrays, device) if is_host and not runtime.is_single else arrays)
    joined = stacked[0]
    if not runtime.is_single:
        joined = [
            jax.make_array_from_single_device_arrays(
                (len(batches), num_rows, *each[0].shape[2:]), sharding, list(each)
            )
            for each in zip(*stacked, strict=True)
        ]
    return jax.tree.unflatten(jax.tree.structure(batches[0].parts[0]), joined)


def _stateless_step(
    model_ref: Callable[[], keras.Model], kind: str
) -> Callable[[_State, Structure], tuple[Structure, _State]]:
    def step(state: _State, data: Structure) -> tuple[Structure, _State]:
        model = model_ref()
        if kind == "predict":
            outputs, non_trainable_variables = model.predict_step(state, data)
            return outputs, (state[0], non_trainable_variables)
        keras_hooks.forget_layer_losses(model)
        return getattr(model, f"{kind}_step")(state, data)

    return step
