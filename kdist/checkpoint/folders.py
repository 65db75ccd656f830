"""Where each worker writes: workers that see the same folder share it, others write a checkpoint of their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdist.backends.messages import gather
from kdist.checkpoint import layout
from kdist.errors import CheckpointError

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime

# Where folders cannot be locked (some file systems of a network), a folder this old counts as left behind.
_OLD = 3600.0


@dataclass
class Folder:
    """Where this worker writes its shard."""

    temporary: str  # while it is being written
    final: str  # what it is called afterwards
    members: Sequence[int]  # the workers that write into it
    rank: int  # which of them this one is; the first one commits
    token: str
    lock: int | None = None  # a descriptor that keeps others from taking the folder for one left behind
    lost: Callable[[], Collection[int]] = frozenset  # the workers that are known to be lost
    is_waiting: bool = False  # whether it is other workers that a save waits for now

    def release(self) -> None:
        """Lets go of the folder."""
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)


@dataclass(frozen=True)
class Wish:
    """What this worker is about to save."""

    directory: str
    prefix: str  # the name, "ckpt"; of a checkpoint with a number, what comes before it
    number: Callable[[], int] | None  # chooses it, on the chief; `None` for a checkpoint without one
    facts: Any  # must be equal on all workers
    failure: str | None  # what became of this worker's last save, if it failed


def gather_from(runtime: Runtime | None, value: Any) -> list[Any]:
    """Gathers a JSON value from every worker; from this process alone where no strategy has joined others."""
    return [value] if runtime is None else gather(runtime, value)


def prepare(runtime: Runtime | None, wish: Wish) -> tuple[Folder, str, int | None]:
    """Makes the folder to write into, and finds out who writes where. Collective.

    Returns:
        This worker's folder; what all folders of this save are known by; its number.

    Raises:
        CheckpointError: On all workers: one cannot write, has failed before, or saves something else.
    """
    token = secrets.token_hex(8)
    index = 0 if runtime is None else runtime.worker_index
    mine = os.path.join(wish.directory, layout.temporary(wish.prefix, token))
    lock, number, problem = None, None, wish.failure
    try:
        if problem is None:
            lock = _make(mine)
            if wish.number is not None and index == 0:
                number = wish.number()
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    everyone = gather_from(
        runtime, {"token": token, "problem": problem, "facts": wish.facts, "number": number}
    )
    folder = Folder(mine, "", [index], 0, token, lock, runtime.group.lost if runtime else frozenset)
    try:
        _check(everyone, wish.directory)
        number = everyone[0]["number"]
        name = wish.prefix if number is None else layout.numbered(wish.prefix, number)
        folder.final = os.path.join(wish.directory, name)
        _join_others(runtime, wish, folder, [other["token"] for other in everyone])
    except BaseException:
        folder.release()
        remove(mine)
        raise
    if folder.rank == 0:
        with contextlib.suppress(OSError):  # what cannot be removed does no harm
            clean(wish.directory, {other["token"] for other in everyone})
    return folder, everyone[0]["token"], number


def _join_others(runtime: Runtime | None, wish: Wish, folder: Folder, tokens: Sequence[str]) -> None:
    """Finds the first worker whose folder is to be seen here: that is the one to write into."""
    if runtime is None or runtime.num_workers == 1:
        return
    paths = [os.path.join(wish.directory, layout.temporary(wish.prefix, token)) for token in tokens]
    first = next(i for i, path in enumerate(paths) if os.path.isdir(path))
    firsts = gather(runtime, first)
    folder.members = [worker for worker, leader in enumerate(firsts) if leader == first]
    folder.rank = folder.members.index(runtime.worker_index)
    if folder.rank:
        # All workers have said what they see: nobody looks for this folder any more.
        folder.release()
        remove(folder.temporary)
        folder.temporary, folder.token = paths[first], tokens[first]


def _check(everyone: Sequence[dict[str, Any]], directory: str) -> None:
    for index, said in enumerate(everyone):
        if said["problem"] is not None:
            explained = "Received:" in said["problem"]
            raise CheckpointError(
                f"Worker {index} cannot save the checkpoint: {said['problem']}",
                received={"directory": directory},
                hint="" if explained else f"Fix the cause on worker {index}, or choose another directory.",
            )
    for index, said in enumerate(everyone):
        if said["facts"] != everyone[0]["facts"]:
            raise CheckpointError(
                f"Cannot save the checkpoint: the objects of worker 0 and worker {index} differ.",
                received={"worker_0": everyone[0]["facts"], f"worker_{index}": said["facts"]},
                hint="Create the same kdist.Checkpoint on every worker, and save it at the same step.",
            )


def _make(path: str) -> int:
    """Makes a folder that nobody takes for one left behind; returns its lock."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.mkdir(path)
    fd = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # where folders cannot be locked
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def clean(directory: str, live: set[str]) -> None:
    """Removes what saves that were killed have left, and puts back what one of them had moved aside.

    `live` are the tokens of folders that are being written. A directory with other files is
    somebody else's, whatever its name.
    """
    for entry in os.listdir(directory):
        path = os.path.join(directory, entry)
        old = layout.replaced_of(entry)
        if old is not None:
            target = os.path.join(directory, old)
            if layout.is_checkpoint(target):
                if layout.is_of_a_save(path):
                    remove(path)
            elif layout.is_checkpoint(path):
                with contextlib.suppress(OSError):
                    os.rename(path, target)
        elif layout.temporary_of(entry) is None or entry.endswith(tuple(live)):
            continue
        elif layout.is_of_a_save(path) and _is_left(path):
            remove(path)


def _is_left(path: str) -> bool:
    """Says whether nobody writes into a folder any more."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        with contextlib.suppress(OSError):
            return time.time() - os.stat(path).st_mtime > _OLD
        return False
    finally:
        os.close(fd)


def remove(path: str) -> None:
    """Deletes a folder; what cannot be deleted is left for the next save."""
    shutil.rmtree(path, ignore_errors=True)
