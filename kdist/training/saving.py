"""Saves Keras files of a model once for all workers. The file is complete when `save` returns on any worker.

Workers may call `model.save` in three ways: all with the same path, only the chief, or each with a different
path. No call may hang or lose a file. Therefore, the chief never waits. It posts the state and the path that
it saves. A worker that saves the same state to the same path waits for the chief's file. If in doubt, a
worker writes its own file. This does no harm, because all files have the same contents and are moved into
place when complete. If variables are sharded over workers, all workers must call `save`, because the chief
does not have all values.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kdist import keras_hooks, tracing
from kdist.backends.contract import Runtime
from kdist.cluster import logs
from kdist.context import StrategyLike
from kdist.whole_files import is_remote, normal, write_whole

# A worker waits this long for the chief to begin a save of the same file. Then it writes its own.
PATIENCE_SECONDS = 30.0
# The limit after a timeout: if the chief did not take part in one save, it probably skips the next one.
_IMPATIENCE_SECONDS = 1.0
# The limit for a write by the chief.
_WRITING_SECONDS = 600.0
_PAUSE = 0.02

_is_alone: ContextVar[bool] = ContextVar("kdist_saves_alone", default=False)
_keeps_files: ContextVar[bool] = ContextVar("kdist_keeps_files", default=False)


def save(
    strategy: StrategyLike, model: keras.Model, target: object, write: Callable[[object], object]
) -> object:
    """Saves a file of a model once for all workers that call this. The hooks in Keras's `save` call it.

    Workers with the same state of the model share a file. `write` is Keras's function, which writes to the path that
    it receives. Returns its result, or `None` if another worker wrote the file.
    """
    runtime = strategy.runtime

    def write_intact(path: object) -> object:
        result = write(path)
        runtime.group.check_intact()  # an error here keeps an incomplete file from getting its final name
        return result

    with tracing.span("saving a file", "save"), whole(strategy, model):
        return _save(runtime, model, target, write_intact)


def whole(strategy: StrategyLike, model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which any worker can read the whole current state. All workers must enter it."""
    keras_hooks.sync_state(model)
    return strategy.runtime.kept_whole(keras_hooks.all_variables(model))


def _save(runtime: Runtime, model: keras.Model, target: object, write: Callable[[object], object]) -> object:
    if not isinstance(target, (str, os.PathLike)):
        return write(target)
    path = normal(target)
    if runtime.num_workers == 1:
        return write_whole(path, write, runtime.worker_index)[0]
    wanted = (path, fingerprint(model))
    if runtime.worker_index == 0:
        return _log.announce(runtime, wanted, write)
    if not _is_alone.get() and _log.is_written(runtime, wanted):
        return None
    if _keeps_files.get() and os.path.exists(path):
        return None
    return write_whole(path, write, runtime.worker_index)[0]


def keeping_files() -> contextlib.AbstractContextManager[None]:
    """Returns a context that overwrites no files, for `overwrite=False`: Keras only asks on the chief."""
    return _within(_keeps_files)


def alone() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a worker does not wait for the chief, because the chief does not save."""
    return _within(_is_alone)


@contextlib.contextmanager
def _within(flag: ContextVar[bool]) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def fingerprint(model: keras.Model) -> str:
    """Returns a hash of the weights and the optimizer, which is equal on all workers with the same state."""
    variables = list(model.weights)
    if getattr(model, "optimizer", None) is not None:
        variables += model.optimizer.variables
    facts = [[list(v.shape), str(v.dtype), _checksum(keras.ops.convert_to_numpy(v))] for v in variables]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=12).hexdigest()


def _checksum(array: np.ndarray) -> int:
    # Runs at memory speed, because models have gigabytes. A cryptographic hash is slower.
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    words = len(data) // 8 * 8
    total = int(data[:words].view(np.uint64).sum(dtype=np.uint64))
    return total ^ zlib.crc32(data[words:].tobytes()) ^ zlib.crc32(data[:4096].tobytes())


@dataclass
class _Post:
    """A save on the chief: the path and the fingerprint, and the result when it has finished."""

    number: int
    wanted: tuple[str, str]
    end: dict[str, Any] | None = None


class _Log:
    """The list of the chief's saves, which the chief posts and the others read. There is one per process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_posted = 0
        self._posts: list[_Post] = []
        self._mine: Counter[tuple[str, str]] = Counter()
        self._patience = PATIENCE_SECONDS

    def announce(
        self, runtime: Runtime, wanted: tuple[str, str], write: Callable[[object], object]
    ) -> object:
        """Runs on the chief: writes the file, and informs the other workers before and after."""
        with self._lock:
            number, self._num_posted = self._num_posted, self._num_posted + 1
        end: dict[str, object] = {"failed": True}
        _post(runtime, _key("save", number), list(wanted))
        try:
            result, written = write_whole(wanted[0], write, runtime.worker_index)
            end = {"file": written, "stat": _stat(written)}
            return result
        finally:
            _post(runtime, _key("saved", number), end)

    def is_written(self, runtime: Runtime, wanted: tuple[str, str]) -> bool:
        """Runs on the other workers: waits for the chief's file, and returns whether this worker sees it."""
        with self._lock:
            try:
                return self._wait(runtime, wanted)
            except Exception as error:  # backends raise different errors when the chief has exited
                logs.logger.warning(
                    "worker %d writes its own copy of %s, because the chief (worker 0) does not respond. Read the log "
                    "of worker 0. The connection reports: %s",
                    runtime.worker_index,
                    wanted[0],
                    str(error)[:200],
                )
                return False
            finally:
                self._mine[wanted] += 1

    def _wait(self, runtime: Runtime, wanted: tuple[str, str]) -> bool:
        start = time.monotonic()
        while True:
            same = [post for post in self._posts if post.wanted == wanted]
            if len(same) > self._mine[wanted]:
                self._patience = PATIENCE_SECONDS
                return self._wait_for_end(runtime, same[-1])
            if self._read_next(runtime):
                continue
            if self._is_elsewhere(wanted):
                return False
            if time.monotonic() - start > self._patience:
                self._warn_of_waiting(runtime, wanted[0])
                return False
            time.sleep(_PAUSE)

    def _is_elsewhere(self, wanted: tuple[str, str]) -> bool:
        """Returns whether the chief saves this state to a path that this worker has not saved to."""
        posted = Counter(post.wanted for post in self._posts if post.wanted[1] == wanted[1])
        return any(count > self._mine[other] for other, count in posted.items() if other != wanted)

    def _wait_for_end(self, runtime: Runtime, post: _Post) -> bool:
        deadline = time.monotonic() + _WRITING_SECONDS
        while post.end is None:
            text = runtime.group.look_up(_key("saved", post.number))
            post.end = json.loads(text) if text is not None else None
            if post.end is None:
                if time.monotonic() > deadline:
                    self._warn_of_waiting(runtime, post.wanted[0])
                    return False
                time.sleep(_PAUSE)
        if "failed" in post.end:
            return False  # this worker then tries: it gets the same error, or succeeds
        if is_remote(post.wanted[0]):
            return True
        written = post.end["file"]
        if _stat(written) == post.end["stat"]:
            return True
        # The chief's next save may have overwritten the file. This worker must not restore the older state.
        while self._read_next(runtime):
            pass
        newer = any(p.wanted[0] == post.wanted[0] and p.number > post.number for p in self._posts)
        return newer and _stat(written) is not None

    def _read_next(self, runtime: Runtime) -> bool:
        text = runtime.group.look_up(_key("save", len(self._posts)))
        if text is not None:
            path, state = json.loads(text)
            self._posts.append(_Post(len(self._posts), (path, state)))
        return text is not None

    def _warn_of_waiting(self, runtime: Runtime, path: str) -> None:
        logs.logger.warning(
            "worker %d writes its own copy of %s, because the chief (worker 0) has not saved the same model there. "
            "Call `save` on all workers at the same step, with the same path.",
            runtime.worker_index,
            path,
        )
        self._patience = _IMPATIENCE_SECONDS


def _key(event: str, number: int) -> str:
    """Returns the key of a post: "save" before the chief writes a file, "saved" after it."""
    return f"kdist/{event}/{number}"


def _post(runtime: Runtime, key: str, value: object) -> None:
    try:
        runtime.group.post(key, json.dumps(value))
    except Exception as error:  # the save itself does not need the other workers
        logs.logger.warning(
            "cannot announce this save to the other workers, so they write their own copies. Read their logs. "
            "The connection reports: %s",
            str(error)[:200],
        )


def _stat(path: str) -> list[int] | None:
    """Returns the size and the time of a file, which all workers that share the directory see alike."""
    try:
        with os.scandir(os.path.dirname(path)):
            pass  # opening a directory makes NFS refresh its cache
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


_log = _Log()
