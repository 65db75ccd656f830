"""Lets workers decide together whether to stop training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdist.backends.contract import Runtime
from kdist.backends.messages import gather

if TYPE_CHECKING:
    import keras


def act_on_batches(callbacks: keras.callbacks.CallbackList) -> bool:
    """Returns whether any callback in a `CallbackList` needs calls for each batch.

    If not, kdist skips the calls, because Keras's list would still convert the logs of each step to numbers.
    """
    import keras

    own_list = type(callbacks) is not keras.callbacks.CallbackList
    return own_list or any(_acts_on_batches(callback) for callback in callbacks.callbacks)


def reads_variables(callbacks: keras.callbacks.CallbackList) -> bool:
    """Returns whether a callback may read variables of the model between batches without `Progress.before_save`."""
    import keras

    return type(callbacks) is not keras.callbacks.CallbackList or any(
        _acts_on_batches(c) and not (_decides_alike(c) and _reads_nothing(c)) for c in callbacks.callbacks
    )


class Ballot:
    """Stops all workers at the same step when any worker sets `model.stop_training`.

    The callbacks of Keras and kdist need no vote after each batch: Keras's decide from logs, which are equal
    on all workers, and kdist's agree with each other. Custom callbacks that act on batches may decide from a
    clock, a file or a signal, so they need a vote after each batch. In any case, the workers also vote after
    each epoch.
    """

    def __init__(self, runtime: Runtime, callbacks: keras.callbacks.CallbackList) -> None:
        self._runtime = runtime
        wanted = any(_acts_on_batches(c) and not _decides_alike(c) for c in callbacks.callbacks)
        # Only some workers may have such a callback, but then all must vote.
        self._votes_after_batch = runtime.num_workers > 1 and any_worker(runtime, wanted)

    def after_batch(self, stop: bool) -> bool:
        """Returns whether training stops after this batch."""
        return any_worker(self._runtime, stop) if self._votes_after_batch else stop


# Callbacks of Keras and kdist that act on batches but read no variables, or call `Progress.before_save` first.
_NO_READERS = (
    *("keras.ProgbarLogger", "keras.TensorBoard", "keras.TerminateOnNaN"),
    *("kdist.BackupAndRestore", "kdist.RunLog", "kdist.Throughput"),
)
_BATCH_METHODS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def _reads_nothing(callback: keras.callbacks.Callback) -> bool:
    name = f"{type(callback).__module__.partition('.')[0]}.{type(callback).__name__}"
    # Keras's callbacks that save after each epoch also have methods for batches.
    return name in _NO_READERS or vars(callback).get("save_freq") == "epoch"


def _decides_alike(callback: keras.callbacks.Callback) -> bool:
    has_own_functions = any(name in vars(callback) for name in _BATCH_METHODS)
    return type(callback).__module__.startswith(("keras.", "kdist.")) and not has_own_functions


def _acts_on_batches(callback: keras.callbacks.Callback) -> bool:
    import keras

    # Functions can also be set on the object, as `LambdaCallback` does, and have no `__func__` then.
    methods = [
        (getattr(callback, name, None), getattr(keras.callbacks.Callback, name)) for name in _BATCH_METHODS
    ]
    return any(getattr(method, "__func__", method) is not base for method, base in methods)


def any_worker(runtime: Runtime, says: bool) -> bool:
    """Returns whether any worker passes a true value."""
    return any(gather(runtime, bool(says)))
