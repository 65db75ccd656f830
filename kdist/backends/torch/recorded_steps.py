"""Chooses the steps of a model that are recorded, and replays them; see `recording`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kdist import keras_hooks
from kdist.arrays.rows import flatten
from kdist.backends import debugging
from kdist.backends.contract import ReplicaBatches
from kdist.backends.torch.core import TorchCore
from kdist.backends.torch.recording import Recording
from kdist.backends.torch.replay import compiled
from kdist.cluster import logs

if TYPE_CHECKING:
    import keras

    from kdist.arrays.types import Structure

# Batches of more shapes than this, as in data without padding, are not worth the memory.
_MOST_SHAPES = 16
# A recording takes as long as some replays save, so a model whose attributes change too often is not recorded.
_REPLAYS_PER_RECORDING = 4
_MOST_RECORDINGS = 10
_ATTRIBUTE = "_kdist_recorded"

Run = Callable[..., list[Any]]


@dataclasses.dataclass
class _Seen:
    """The recorded step for batches with the same shapes, and how many replays its recordings have cost."""

    cost: int = 0
    program: Callable[[Sequence[torch.Tensor | None]], Structure] | None = None
    state: keras_hooks.StepState | None = None


class RecordedSteps:
    """The recorded steps of one kind ("train", "test" or "predict") of one model, by the shapes of the batch.

    A step is recorded if its Python code is Keras's own, because custom code can do something else in each step.
    With `jit_compile=True`, custom code is recorded too, as on JAX and TensorFlow.
    """

    def __init__(self, runtime: TorchCore, model: keras.Model, kind: str) -> None:
        self._runtime, self._device = runtime, runtime.torch_devices[0].type
        self._kind = kind
        # The model owns the steps, because they refer to its variables. Otherwise, it could never be freed.
        self._key = (kind, id(self))
        others = vars(model).get(_ATTRIBUTE, {}).items()
        # Without the steps of this kind from before `compile`.
        vars(model)[_ATTRIBUTE] = {key: steps for key, steps in others if key[0] != kind} | {self._key: {}}
        self._reason = _reason_against(runtime, model)
        if self._reason:
            self._log()

    def run(self, model: keras.Model, batch: ReplicaBatches, run: Run) -> list[Structure]:
        """Runs a step with `run`, or replays a recorded step. The third batch of the same shapes replays."""
        if self._reason:
            return run(batch)
        leaves = flatten(batch.parts[0])
        shapes = _shapes(batch.parts[0])
        # Autocast and the detection of anomalies change the meaning of PyTorch's operations for a while.
        if shapes is None or torch.is_autocast_enabled(self._device) or torch.is_anomaly_enabled():
            return run(batch)
        known = vars(model)[_ATTRIBUTE].get(self._key)
        if known is None:  # a callback has compiled the model again
            return run(batch)
        key = (shapes, tuple(batch.split))
        seen = known.get(key)
        if seen is None:
            # Not recorded yet, because Keras creates some objects during a first step.
            if len(known) < _MOST_SHAPES:
                known[key] = _Seen()
            return run(batch)
        if seen.program is not None and seen.state is not None and seen.state.is_that_of(model):
            seen.cost -= seen.cost > 0
            return [seen.program(leaves)]
        return self._record(model, batch, leaves, run, seen)

    def _record(
        self,
        model: keras.Model,
        batch: ReplicaBatches,
        leaves: list[torch.Tensor | None],
        run: Run,
        seen: _Seen,
    ) -> list[Structure]:
        metrics = [keras_hooks.native_value(variable) for variable in model.metrics_variables]
        variables = list(keras_hooks.step_tensors(model))
        if self._runtime.low_rank is not None:
            for _, slots in self._runtime.low_rank.slots.items():
                variables += itertools.chain(*slots)
        recording = Recording(leaves, variables, metrics)
        results = run(batch, recording)
        seen.cost += _REPLAYS_PER_RECORDING
        if seen.cost > _MOST_RECORDINGS * _REPLAYS_PER_RECORDING:
            recording.refuse("attributes of the model change too often")
        if not keras_hooks.has_own_values(model):
            recording.refuse("parameter servers hold the variables")
        if reason := _custom_code(model):  # also what came after the first step
            recording.refuse(reason)
        parameters = [p for p in model.parameters() if p.grad is not None] if self._kind == "train" else []
        seen.program = compiled(recording, results[0], parameters)
        seen.state = keras_hooks.StepState(model)
        if seen.program is None:
            self._reason = recording.reason
            self._log()
        return results

    def _log(self) -> None:
        message = "kdist does not record the %s steps of this model, so that they are slower: %s."
        logs.logger.info(message, self._kind, self._reason)


def _reason_against(runtime: TorchCore, model: keras.Model) -> str:
    """Returns the reason why no step of a model can be recorded, or an empty string."""
    if len(runtime.devices) > 1:
        return "this worker has several replicas"
    if runtime.storage is not None or runtime.copies_of[0] is not None:
        return "the strategy keeps the variables elsewhere"
    if debugging.is_on():
        return "KDIST_DEBUG=1 is set"
    if getattr(model, "run_eagerly", False):
        return "the model was compiled with run_eagerly=True"
    return _custom_code(model)


def _custom_code(model: keras.Model) -> str:
    if getattr(model, "jit_compile", False):
        return ""
    own = keras_hooks.own_code(model)
    return f"{own} is custom code, which kdist only records with compile(jit_compile=True)" if own else ""


def _shapes(part: Structure) -> Hashable | None:
    """Returns the structure, shapes and dtypes of a batch as a key; `None` if it contains other objects."""
    if isinstance(part, torch.Tensor):
        return (part.shape, part.dtype, part.stride()) if part.layout is torch.strided else None
    if part is None:
        return ()
    keys: object = type(part)
    if isinstance(part, dict):
        keys = tuple(sorted(part))
        part = [part[key] for key in keys]
    elif not isinstance(part, (list, tuple)):
        return None
    shapes = tuple(map(_shapes, part))
    return None if None in shapes else (keys, shapes)
