"""Restricts Keras callbacks that write files to the chief, and notifies the evaluators of these files.

This applies if a worker and the chief have a callback of the same kind with the same path. If the chief has
no such callback, or its path differs, the callback behaves as in plain Keras.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import keras

from kdist.backends.contract import Runtime
from kdist.checkpoint import end_of_training
from kdist.training import saving
from kdist.whole_files import is_remote, normal

if TYPE_CHECKING:
    UserCallbacks: TypeAlias = (
        keras.callbacks.CallbackList | keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None
    )
    """The argument `callbacks` of `fit`, `evaluate` and `predict`."""

# The attribute with the path or address that each kind writes to.
_PATHS = {
    "BackupAndRestore": "backup_dir",
    "CSVLogger": "filename",
    "ModelCheckpoint": "filepath",
    "OrbaxCheckpoint": "directory",
    "RemoteMonitor": "root",
    "TensorBoard": "log_dir",
}
_TALKERS = ("EarlyStopping", "LearningRateScheduler", "ModelCheckpoint", "ReduceLROnPlateau")


def describe(callbacks: UserCallbacks) -> list[list[str]]:
    """Returns the kind and the path of each callback that writes files, as JSON."""
    return [list(found) for found in map(_described, _members(callbacks)) if found is not None]


def speaking(callbacks: UserCallbacks) -> list[str]:
    """Returns the names of the callbacks that communicate between workers, so that all workers need them."""
    found = _members(callbacks)
    orbax = [f"OrbaxCheckpoint({str(c.directory)!r})" for c in found if _saves_together(c)]
    return [type(c).__name__ for c in found if getattr(c, "on_all_workers", False)] + orbax


def saved_paths(callbacks: UserCallbacks) -> list[str]:
    """Returns the paths to which `ModelCheckpoint` callbacks save the model."""
    found = [_described(callback) for callback in _members(callbacks)]
    return [path for kind, path in filter(None, found) if kind == "ModelCheckpoint"]


class Ending:
    """Notifies evaluators that watch the checkpoint directories of a `fit` when it has ended.

    The chief removes the file `.training-ended` when `fit` begins, and writes it after `fit` has succeeded.
    """

    def __init__(self, runtime: Runtime, callbacks: keras.callbacks.CallbackList) -> None:
        self._is_chief = runtime.worker_index == 0
        self._began = time.monotonic()
        # The paths up to the first placeholder.
        paths = [path.partition("{")[0] for path in saved_paths(callbacks) if not is_remote(path)]
        self._folders = set(map(os.path.dirname, paths))
        if self._is_chief:
            end_of_training.begin(self._folders)

    def leave(self) -> None:
        """Writes the file to the directories of this `fit` that an evaluator watches or will watch."""
        if self._is_chief:
            end_of_training.end(
                filter(end_of_training.is_wanted, {*self._folders, *end_of_training.saved_since(self._began)})
            )


@contextlib.contextmanager
def of_this_worker(
    callbacks: UserCallbacks, worker_index: int, chief_has: Sequence[Sequence[str]], is_divided: bool
) -> Iterator[UserCallbacks]:
    """Yields the callbacks that this worker runs, and undoes all changes to them at the end.

    Args:
        callbacks: The callbacks that the user passed on this worker.
        worker_index: The index of this worker.
        chief_has: The result of `describe` on the chief.
        is_divided: Whether variables are sharded over workers, so that all workers must read and save them.
    """
    if worker_index == 0:
        yield callbacks
        return
    shared = {tuple(entry) for entry in chief_has}
    with contextlib.ExitStack() as stack:
        kept = [c for c in _members(callbacks) if _prepare(c, shared, stack, is_divided)]
        if isinstance(callbacks, keras.callbacks.CallbackList):
            _change(stack, callbacks, "callbacks", kept)
            yield callbacks
        else:
            yield kept


def _prepare(
    callback: keras.callbacks.Callback,
    shared: set[tuple[str, ...]],
    stack: contextlib.ExitStack,
    is_divided: bool,
) -> bool:
    """Adapts a callback to a worker that is not the chief. Returns whether the worker runs it."""
    if isinstance(callback, _kinds(_TALKERS)):
        _change(stack, callback, "verbose", 0)
    found = _described(callback)
    if found is None:
        return True
    if found not in shared:
        for name in ("on_epoch_end", "on_train_batch_end"):
            _change(stack, callback, name, _alone(getattr(callback, name)))
        return True
    kind, _ = found
    if kind == "ModelCheckpoint" or _saves_together(callback):
        return True  # `model.save` waits for the chief's file
    if kind == "OrbaxCheckpoint":
        _change(stack, callback, "checkpointer", _NoCheckpointer())  # still reads sharded variables
        return True
    if kind == "BackupAndRestore" and is_divided:
        _change(stack, callback, "on_train_end", lambda logs=None: None)  # the chief deletes the backup
        return True
    is_own = not type(callback).__module__.startswith("keras.")
    if (kind in ("CSVLogger", "TensorBoard") and is_own) or (kind == "TensorBoard" and is_divided):
        # A custom subclass may run the model, and sharded variables also need all workers.
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        _change(stack, callback, _PATHS[kind], folder if kind == "TensorBoard" else f"{folder}/log.csv")
        return True
    return False


def _saves_together(callback: keras.callbacks.Callback) -> bool:
    """Returns whether Orbax itself saves on all processes together, which it only does on JAX."""
    kinds = _kinds(("OrbaxCheckpoint",))
    return any(isinstance(callback, kind) for kind in kinds) and bool(callback.is_multihost_enabled())


class _NoCheckpointer:
    """Replaces Orbax's checkpointer and its futures, and writes nothing."""

    def __getattr__(self, name: str) -> Callable[..., _NoCheckpointer]:
        return lambda *args, **kwargs: self


def _alone(method: Callable[..., object]) -> Callable[..., object]:
    def called(*args: object, **kwargs: object) -> object:
        with saving.alone():
            return method(*args, **kwargs)

    return called


def _change(stack: contextlib.ExitStack, owner: object, name: str, value: object) -> None:
    before = vars(owner).get(name, owner)  # the instance dictionary does not contain methods
    setattr(owner, name, value)
    if before is owner:
        stack.callback(vars(owner).pop, name, None)
    else:
        stack.callback(setattr, owner, name, before)


def _described(callback: keras.callbacks.Callback) -> tuple[str, str] | None:
    for kind, attribute in _PATHS.items():
        if isinstance(callback, _kinds((kind,))):
            path = str(getattr(callback, attribute))
            return kind, path if kind == "RemoteMonitor" else normal(path)
    return None


def _kinds(names: Sequence[str]) -> tuple[type, ...]:
    return tuple(getattr(keras.callbacks, name) for name in names if hasattr(keras.callbacks, name))


def _members(callbacks: UserCallbacks) -> list[keras.callbacks.Callback]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [callback for callback in keras.tree.flatten(callbacks) if callback is not None]
