"""How workers decide together to stop."""

from __future__ import annotations

from typing import Any

from kdist.backends.contract import Runtime
from kdist.backends.messages import gather


def act_on_batches(callbacks: Any) -> bool:
    """Says whether anybody in a `CallbackList` is to be told of batches.

    Where nobody is, Keras's own list turns the logs of each step into numbers all the same.
    """
    import keras

    own_list = type(callbacks) is not keras.callbacks.CallbackList
    return own_list or any(_acts_on_batches(callback) for callback in callbacks.callbacks)


class Ballot:
    """Lets `model.stop_training`, set on any worker, stop all at the same step.

    Keras's own callbacks decide from logs, which are equal on all workers, and kdist's agree among themselves: they
    need no vote after each batch.
    A callback of the user's that acts on batches may decide from anything (a clock, a file, a signal), and then
    every batch ends with a vote. Every epoch ends with one in any case.
    """

    def __init__(self, runtime: Runtime, callbacks: Any) -> None:
        self._runtime = runtime
        wanted = any(_acts_on_batches(c) and not _decides_alike(c) for c in callbacks.callbacks)
        # A worker may have a callback that the others lack: all vote as soon as one wants to.
        self._votes_after_batch = runtime.num_workers > 1 and agree_to_stop(runtime, wanted)

    def after_batch(self, stop: bool) -> bool:
        """Says whether training stops after this batch."""
        return agree_to_stop(self._runtime, stop) if self._votes_after_batch else stop


def _decides_alike(callback: Any) -> bool:
    kind = type(callback)
    return kind.__module__.startswith(("keras.", "kdist.")) and kind.__name__ != "LambdaCallback"


_BATCH_METHODS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def _acts_on_batches(callback: Any) -> bool:
    import keras

    if isinstance(callback, keras.callbacks.LambdaCallback):
        return True  # has the functions in attributes, not in methods of its class
    base = keras.callbacks.Callback
    return any(getattr(type(callback), name, None) is not getattr(base, name) for name in _BATCH_METHODS)


def agree_to_stop(runtime: Runtime, stop: bool) -> bool:
    """Says whether any worker wants to stop."""
    return any(gather(runtime, bool(stop)))
