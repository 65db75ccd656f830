"""`Progress`, the position of a `fit`, so that it can resume from a checkpoint in the middle of an epoch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import keras

from kdist.backends.contract import Runtime
from kdist.backends.messages import gather
from kdist.training.batches import GlobalBatches

_STEPS_OF_FILES = ("_batches_seen_since_last_saving", "_last_batch_seen")
# What Keras's callbacks keep from epoch to epoch, or from step to step: numbers and flags.
_REMEMBERED = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", *_STEPS_OF_FILES),
    keras.callbacks.OrbaxCheckpoint: ("best", *_STEPS_OF_FILES, "_total_batches_seen"),
    # Whether the weights are swapped with their averages. Then a backup contains swapped weights.
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
}


class Progress:
    """Tracks the position of a `fit`. Checkpoints store its state (JSON), so that a new `fit` can resume."""

    def __init__(self, batches: GlobalBatches, callbacks: keras.callbacks.CallbackList, epoch: int) -> None:
        self._batches = batches
        self._callbacks = list(callbacks.callbacks)
        self._restored: Mapping[str, Any] | None = None
        self.epoch = epoch
        """The current epoch, or the next one between epochs."""
        self.step = 0
        """The number of completed steps in the epoch."""
        self.num_steps = 0
        """The number of steps in all epochs that this process has completed."""
        self.is_resumed = False
        """Whether `fit` resumes in the middle of an epoch. Then it keeps the metrics of the checkpoint."""
        self.has_stopped = False
        """Whether a callback stopped the training after the epoch of the checkpoint."""
        self.before_save: Callable[[], None] = lambda: None
        """Completes the variables in the middle of an epoch. All workers must call it before they save."""
        self.at_end = contextlib.ExitStack()
        """Closes resources of callbacks after `fit`. Keras does not call callbacks if `fit` fails."""

    @property
    def runtime(self) -> Runtime:
        """The runtime of the workers that train."""
        return self._batches.runtime

    def record(self) -> None:
        """Starts to track the position in the data. `get_state` requires this."""
        self._batches.record()

    def after_step(self, end: int) -> None:
        """Updates the counters after the step with the index `end`."""
        self.num_steps += end + 1 - self.step
        self.step = end + 1
        self.is_resumed = False

    def after_epoch(self) -> None:
        """Updates the position after an epoch and its validation."""
        self.epoch, self.step = self.epoch + 1, 0
        self.is_resumed = False

    def get_state(self) -> dict[str, object]:
        """Returns the state that a new `fit` needs to resume here, as JSON. All workers must call it.

        All workers return the chief's state, so that `fit` can resume with any number of workers.
        """
        self._batches.runtime.finish_steps()  # the position counts them
        runtime, state = self._batches.runtime, self._state()
        mine = state if runtime.worker_index == 0 else {"has_stopped": state["has_stopped"]}
        states = gather(runtime, mine)
        return {**states[0], "has_stopped": any(state["has_stopped"] for state in states)}

    def _state(self) -> dict[str, object]:
        history = self._keras_history()
        return {
            "epoch": self.epoch,
            "step": self.step,
            # In the middle of an epoch, its validation and the end of the epoch would still follow.
            "has_stopped": bool(history.model.stop_training) and self.step == 0,
            "data": self._batches.position(),
            "history": {
                "epoch": list(history.epoch),
                "logs": json.loads(json.dumps(history.history, default=_plain)),
            },
            "callbacks": [[_name(callback), _state_of(callback)] for callback in self._callbacks],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves this `fit` to the position of `get_state`. Call it before the first epoch begins."""
        self.epoch, self.step = state["epoch"], state["step"]
        self.is_resumed = self.step > 0
        self.has_stopped = state.get("has_stopped", False)
        self._batches.go_to(state["data"], self.step)
        self._restored = state

    def restore_callbacks(self) -> None:
        """Restores the states of the callbacks. Called after `on_train_begin`, which resets them."""
        if self._restored is None:
            return
        self._restore_history(self._restored["history"])
        # Matched by name, because a worker may have fewer callbacks than the chief.
        states = list(self._restored["callbacks"])
        for callback in self._callbacks:
            found = next((entry for entry in states if entry[0] == _name(callback)), None)
            if found is not None:
                states.remove(found)
                _set_state_of(callback, found[1])

    def _keras_history(self) -> keras.callbacks.History:
        # Complete when backups are saved, because they come after it.
        return next(c for c in self._callbacks if isinstance(c, keras.callbacks.History))

    def _restore_history(self, saved: Any) -> None:
        history = self._keras_history()
        if isinstance(saved, list):  # the logs of each epoch, in backups of earlier versions
            names = dict.fromkeys(name for _, logs in saved for name in logs)
            values = {name: [logs[name] for _, logs in saved if name in logs] for name in names}
            saved = {"epoch": [epoch for epoch, _ in saved], "logs": values}
        history.epoch, history.history = list(saved["epoch"]), dict(saved["logs"])


def _plain(value: object) -> object:
    # A metric may be an array, for example with one value per class. Callbacks may add any value to the logs.
    array = keras.ops.convert_to_numpy(value)
    return str(value) if array.dtype == object else array.tolist()


def _name(callback: keras.callbacks.Callback) -> str:
    return type(callback).__name__


def _state_of(callback: keras.callbacks.Callback) -> object:
    if hasattr(callback, "get_state"):
        return callback.get_state()
    names = [name for kind, names in _REMEMBERED.items() if isinstance(callback, kind) for name in names]
    values = {name: getattr(callback, name, None) for name in names}
    return {name: None if v is None else float(v) for name, v in values.items()}


def _set_state_of(callback: keras.callbacks.Callback, state: Any) -> None:
    if hasattr(callback, "set_state"):
        callback.set_state(state)
        return
    for name, value in state.items():
        whole = value is not None and name != "best"
        setattr(callback, name, int(value) if whole else value)
