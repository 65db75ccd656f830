"""Lets workers decide together: whether to stop training, and when to exchange values."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    return own_list or any(_acts_on(callback, _METHODS["train"]) for callback in callbacks.callbacks)


def reads_variables(callbacks: keras.callbacks.CallbackList) -> bool:
    """Returns whether a callback may read variables of the model between batches without `Progress.before_save`."""
    import keras

    return type(callbacks) is not keras.callbacks.CallbackList or any(
        _acts_on(c, _METHODS["train"]) and not (_decides_alike(c) and _reads_nothing(c))
        for c in callbacks.callbacks
    )


class Ballot:
    """Stops all workers at the same step when any worker sets `model.stop_training`.

    The same applies to `stop_evaluating` and `stop_predicting`.

    The callbacks of Keras and kdist need no vote after each batch: Keras's decide from logs, which are equal
    on all workers, and kdist's agree with each other. Custom callbacks that act on batches may decide from a
    clock, a file or a signal, so they need a vote after each batch. Without these votes, a worker ignores the
    attribute until the next vote, because a signal handler or a thread may have set it. In any case, the workers
    vote after each epoch.
    """

    def __init__(self, runtime: Runtime, callbacks: keras.callbacks.CallbackList) -> None:
        import keras

        self._runtime = runtime
        custom = [callback for callback in callbacks.callbacks if not _decides_alike(callback)]
        mine = [kind for kind, methods in _METHODS.items() if any(_acts_on(c, methods) for c in custom)]
        if any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in callbacks.callbacks):
            mine.append(_AT_NAN)
        # Only some workers may have such a callback, but then all must vote.
        self._votes = set(itertools.chain(*gather(runtime, mine)))

    def before_batches(self, kind: str, stop: bool, agreed: bool = False) -> bool:
        """Returns whether the loop of a kind ("train", "test", "predict") stops after its first batch.

        `agreed` is the result of an earlier vote.
        """
        if f"{kind} begin" in self._votes and kind not in self._votes:
            return any_worker(self._runtime, stop)
        return agreed

    def after_batch(self, kind: str, stop: bool, agreed: bool, logs: Mapping[str, Any]) -> bool:
        """Returns whether the loop stops after this batch. `agreed` is the result of `before_batches`."""
        if self._runtime.num_workers == 1:
            return stop
        if kind in self._votes:
            return any_worker(self._runtime, stop)
        # Keras's `TerminateOnNaN` is the only callback without votes that stops in an epoch. All workers read the loss,
        # which is equal on all, because only some may have this callback.
        loss = logs.get("loss") if kind == "train" and _AT_NAN in self._votes else None
        return agreed or (loss is not None and not math.isfinite(loss))


# Callbacks of Keras and kdist that act on batches but read no variables, or call `Progress.before_save` first.
_NO_READERS = (
    *("keras.ProgbarLogger", "keras.TensorBoard", "keras.TerminateOnNaN"),
    *("kdist.BackupAndRestore", "kdist.RunLog", "kdist.Throughput"),
)
# The vote of a worker with `TerminateOnNaN`.
_AT_NAN = "train at NaN"
# The methods in which custom callbacks can stop the loop of a kind, at its beginning or after a batch.
_METHODS = {
    "train begin": ("on_epoch_begin",),
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "test begin": ("on_test_begin",),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict begin": ("on_predict_begin",),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


def _reads_nothing(callback: keras.callbacks.Callback) -> bool:
    name = f"{type(callback).__module__.partition('.')[0]}.{type(callback).__name__}"
    # Keras's callbacks that save after each epoch also have methods for batches.
    return name in _NO_READERS or vars(callback).get("save_freq") == "epoch"


def _decides_alike(callback: keras.callbacks.Callback) -> bool:
    has_own_functions = any(name in vars(callback) for name in itertools.chain(*_METHODS.values()))
    return type(callback).__module__.startswith(("keras.", "kdist.")) and not has_own_functions


def _acts_on(callback: keras.callbacks.Callback, names: Sequence[str]) -> bool:
    import keras

    # Functions can also be set on the object, as `LambdaCallback` does, and have no `__func__` then.
    methods = [(getattr(callback, name, None), getattr(keras.callbacks.Callback, name)) for name in names]
    return any(getattr(method, "__func__", method) is not base for method, base in methods)


def any_worker(runtime: Runtime, says: bool) -> bool:
    return any(gather(runtime, bool(says)))


class RegularExchange:
    """Lets workers exchange values regularly, after the same steps. Other steps cost almost nothing.

    Clocks differ between workers, but step counts do not. Therefore, at each exchange the chief measures the
    duration of the last steps, and sets the number of steps until the next exchange.

    Args:
        runtime: The runtime of the workers, or `None` for this process only.
        seconds: The approximate time between exchanges.
    """

    def __init__(self, runtime: Runtime | None, seconds: float) -> None:
        self._runtime = runtime
        self._seconds = seconds
        self._interval = 1
        self._last: tuple[int, float] | None = None
        self._next = 0

    def is_due(self, num_steps: int) -> bool:
        """Returns whether the workers exchange values after `num_steps` steps. The result is equal on all workers."""
        # After a restore of an earlier checkpoint, the count is smaller than at the last exchange.
        return num_steps >= self._next or (self._last is not None and num_steps < self._last[0])

    def exchange(self, num_steps: int, value: Any) -> list[Any]:
        """Exchanges a JSON value, and returns the values of all workers in the order of their indices."""
        now = time.monotonic()
        interval = 1
        if self._last is not None:
            steps, since = num_steps - self._last[0], now - self._last[1]
            # At most twice the last interval, because steps may become slower.
            interval = max(1, min(int(steps / max(since, 1e-6) * self._seconds), 2 * self._interval))
        mine = [interval, value]
        said = [mine] if self._runtime is None else gather(self._runtime, mine)
        self._interval = said[0][0]
        self._last, self._next = (num_steps, now), num_steps + self._interval
        return [theirs for _, theirs in said]
