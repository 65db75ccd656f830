"""`Progress`: where a `fit` is, so that a checkpoint can go on from there, in the middle of an epoch too."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import keras

from kdist.backends.contract import Runtime
from kdist.backends.messages import gather
from kdist.training.batches import GlobalBatches

# What Keras's own callbacks remember from epoch to epoch, in numbers.
_REMEMBERED = {
    "EarlyStopping": ("wait", "best", "best_epoch", "stopped_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": ("best", "epochs_since_last_save"),
}


class Progress:
    """Where a `fit` is. Its state is JSON; a checkpoint that holds it brings a new `fit` to the same place."""

    def __init__(self, batches: GlobalBatches, callbacks: Any, epoch: int) -> None:
        self._batches = batches
        self._callbacks = list(callbacks.callbacks)
        self._restored: Mapping[str, Any] | None = None
        self._history: list[Any] = []
        self.epoch = epoch
        """The epoch under way, or the next one."""
        self.step = 0
        """Steps of it that have been taken."""
        self.num_steps = 0
        """Steps of all epochs that this process has taken."""
        self.is_resumed = False
        """Whether the epoch goes on in its middle: its metrics are those of the checkpoint."""
        self.at_end = contextlib.ExitStack()
        """What callbacks have open while `fit` runs. If it fails, Keras does not tell them."""

    @property
    def runtime(self) -> Runtime:
        """The workers that train."""
        return self._batches.runtime

    def record(self) -> None:
        """From now on `get_state` may be called: the data keeps count of where it is."""
        self._batches.record()

    def after_step(self, end: int) -> None:
        """Notes that the step of index `end` has been taken."""
        self.num_steps += end + 1 - self.step
        self.step = end + 1
        self.is_resumed = False

    def after_epoch(self, logs: Mapping[str, Any]) -> None:
        """Notes that the epoch has ended, its validation too, with these logs."""
        # Keras's own history hears of them only after all callbacks.
        self._history.append([self.epoch, dict(logs)])
        self.epoch, self.step = self.epoch + 1, 0
        self.is_resumed = False

    def get_state(self) -> dict[str, Any]:
        """Returns, as JSON, what a new `fit` needs to go on from here. All workers must call it.

        It is the chief's on all of them, so that any number of workers can go on.
        """
        return dict(gather(self._batches.runtime, self._state())[0])

    def _state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "data": self._batches.position(),
            "history": [[epoch, keras.tree.map_structure(_number, logs)] for epoch, logs in self._history],
            "callbacks": [[_name(callback), _state_of(callback)] for callback in self._callbacks],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Lets this `fit`, which has not begun its first epoch, go on where `get_state` was called."""
        self.epoch, self.step = state["epoch"], state["step"]
        self.is_resumed = self.step > 0
        self._history = list(state["history"])
        self._batches.go_to(state["data"], self.step)
        self._restored = state

    def restore_callbacks(self) -> None:
        """Gives callbacks what they remembered. Called once all have begun, where they forget."""
        if self._restored is None:
            return
        keras_history = next(c for c in self._callbacks if isinstance(c, keras.callbacks.History))
        for epoch, logs in self._history:
            keras_history.epoch.append(epoch)
            for name, value in logs.items():
                keras_history.history.setdefault(name, []).append(value)
        # By their names: not every worker has all of them.
        states = list(self._restored["callbacks"])
        for callback in self._callbacks:
            found = next((entry for entry in states if entry[0] == _name(callback)), None)
            if found is not None:
                states.remove(found)
                _set_state_of(callback, found[1])


def _number(value: Any) -> Any:
    # A metric may have a value for each class.
    return keras.ops.convert_to_numpy(value).tolist()


def _name(callback: Any) -> str:
    return type(callback).__name__


def _state_of(callback: Any) -> Any:
    if hasattr(callback, "get_state"):
        return callback.get_state()
    names = _REMEMBERED.get(type(callback).__name__, ())
    values = {name: getattr(callback, name, None) for name in names}
    return {name: None if v is None else float(v) for name, v in values.items()}


def _set_state_of(callback: Any, state: Any) -> None:
    if hasattr(callback, "set_state"):
        callback.set_state(state)
        return
    for name, value in state.items():
        whole = value is not None and name != "best"
        setattr(callback, name, int(value) if whole else value)
