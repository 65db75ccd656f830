"""Keras's callbacks that write files, under a strategy: the chief's write, the others' do not.

A callback of another worker counts as the chief's if it is of the same kind and writes to the same path. One with
a path of its own, or that the chief does not have, does what it does in plain Keras.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from kdist.training import saving
from kdist.training.whole_files import normal

# What each kind writes to.
_PATHS = {
    "BackupAndRestore": "backup_dir",
    "CSVLogger": "filename",
    "ModelCheckpoint": "filepath",
    "RemoteMonitor": "root",
    "TensorBoard": "log_dir",
}
_TALKERS = ("EarlyStopping", "LearningRateScheduler", "ModelCheckpoint", "ReduceLROnPlateau")


def describe(callbacks: Any) -> list[list[str]]:
    """Returns the kind and the path of each callback that writes, as JSON."""
    return [list(found) for found in map(_described, _members(callbacks)) if found is not None]


@contextlib.contextmanager
def of_this_worker(callbacks: Any, worker_index: int, chief_has: Sequence[Sequence[str]]) -> Iterator[Any]:
    """Gives the callbacks that this worker is to run, and leaves them as they were at the end.

    `chief_has` is what `describe` said on the chief.
    """
    if worker_index == 0:
        yield callbacks
        return
    shared = {tuple(entry) for entry in chief_has}
    with contextlib.ExitStack() as stack:
        kept = [callback for callback in _members(callbacks) if _prepare(callback, shared, stack) is not None]
        if isinstance(callbacks, keras.callbacks.CallbackList):
            _change(stack, callbacks, "callbacks", kept)
            yield callbacks
        else:
            yield kept


def _prepare(callback: Any, shared: set[tuple[str, ...]], stack: contextlib.ExitStack) -> Any:
    """Returns a callback as a worker beside the chief runs it, or `None` if it does not."""
    if isinstance(callback, _kinds(_TALKERS)):
        _change(stack, callback, "verbose", 0)
    found = _described(callback)
    if found is None:
        return callback
    if found not in shared:
        for name in ("on_epoch_end", "on_train_batch_end"):
            _change(stack, callback, name, _alone(getattr(callback, name)))
        return callback
    kind, _ = found
    if kind == "ModelCheckpoint":
        return callback  # `model.save` waits for the chief's file
    if kind in ("CSVLogger", "TensorBoard") and not type(callback).__module__.startswith("keras."):
        # A class of the user's may compute with the model, and then needs all workers.
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        _change(stack, callback, _PATHS[kind], folder if kind == "TensorBoard" else f"{folder}/log.csv")
        return callback
    return None


def _alone(method: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with saving.alone():
            return method(*args, **kwargs)

    return called


def _change(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    before = vars(owner).get(name, owner)  # methods are not in an object's own dictionary
    setattr(owner, name, value)
    if before is owner:
        stack.callback(vars(owner).pop, name, None)
    else:
        stack.callback(setattr, owner, name, before)


def _described(callback: Any) -> tuple[str, str] | None:
    for kind, attribute in _PATHS.items():
        if isinstance(callback, _kinds((kind,))):
            path = str(getattr(callback, attribute))
            return kind, path if kind == "RemoteMonitor" else normal(path)
    return None


def _kinds(names: Sequence[str]) -> tuple[type, ...]:
    return tuple(getattr(keras.callbacks, name) for name in names if hasattr(keras.callbacks, name))


def _members(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [callback for callback in keras.tree.flatten(callbacks) if callback is not None]
