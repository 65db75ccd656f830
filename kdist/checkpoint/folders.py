"""Decides where each worker writes: to a directory shared with other workers, or to a separate one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kdist.backends.contract import Runtime
from kdist.backends.messages import exchange, gather
from kdist.checkpoint import layout, storage
from kdist.errors import CheckpointError
from kdist.whole_files import is_remote

# Seconds until a temporary directory is stale on (network) file systems and stores that cannot lock directories.
_OLD = 3600.0


@dataclass
class Folder:
    """The directory to which this worker writes its shard."""

    temporary: str  # Its path during the save.
    final: str  # Its path after the commit.
    members: Sequence[int]  # The workers that write into it.
    rank: int  # This worker's position in `members`. Rank 0 commits.
    token: str
    lock: int | None = None  # A locked descriptor. It shows that the directory is not stale.
    lost: Callable[[], Collection[int]] = frozenset  # Returns the workers that are known to be lost.
    is_waiting: bool = False  # Whether the save currently waits for other workers.
    number: int | None = None  # The number in the name, if kdist chose it. Then no checkpoint is replaced.
    # In an object store, a part of its file names. There, it has its final path from the beginning.
    tag: str = ""
    is_committed: bool = False  # Whether a store may have the index. Then a failed save removes nothing.

    def release(self) -> None:
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)


@dataclass(frozen=True)
class Wish:
    """This worker's request to save a checkpoint."""

    directory: str
    prefix: str  # the name without the number, such as "ckpt"
    number: Callable[[], int] | None  # the largest number of all workers counts; `None` for none
    replaces: bool  # whether a checkpoint of the same name may be replaced
    facts: object  # must be equal on all workers
    failure: str | None  # why this worker's last save failed, if it did


def gather_from(runtime: Runtime | None, value: object) -> list[Any]:
    """Gathers a JSON value from every worker, or only from this process if there is no runtime."""
    if runtime is None:
        return [value]
    return [said["value"] for said in exchange(runtime, "saving or restoring a checkpoint", {"value": value})]


def prepare(runtime: Runtime | None, wish: Wish) -> tuple[Folder, str, int | None]:
    """Creates the temporary directory and agrees with the other workers where each one writes. Collective.

    Returns this worker's directory, the id of the save, and the number of the checkpoint.

    Raises:
        CheckpointError: On all workers, if a worker cannot write, its last save failed or its objects differ.
    """
    token = secrets.token_hex(8)
    index = 0 if runtime is None else runtime.worker_index
    mine = os.path.join(wish.directory, layout.temporary(wish.prefix, token))
    lock, number, problem = None, None, wish.failure
    try:
        if problem is None:
            lock = _make(mine)
            if wish.number is not None:
                number = wish.number()
    except CheckpointError as error:  # of an object store
        problem = str(error)
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    folder = Folder(mine, "", [index], 0, token, lock, runtime.group.lost if runtime else frozenset)
    try:
        everyone = gather_from(
            runtime, {"token": token, "problem": problem, "facts": wish.facts, "number": number}
        )
        _check(everyone, wish.directory)
        # Each worker's own disk may contain other checkpoints.
        number = None if number is None else max(other["number"] for other in everyone)
        folder.number = None if wish.replaces else number
        name = wish.prefix if number is None else layout.numbered(wish.prefix, number)
        folder.final = os.path.join(wish.directory, name)
        _join_others(runtime, wish, folder, [other["token"] for other in everyone])
    except BaseException:
        folder.release()
        remove(mine)
        raise
    if folder.rank == 0 and not folder.tag:  # `put_index` cleans object stores
        with contextlib.suppress(OSError):  # stale files are harmless
            clean(wish.directory, {other["token"] for other in everyone})
    return folder, everyone[0]["token"], number


def _join_others(runtime: Runtime | None, wish: Wish, folder: Folder, tokens: Sequence[str]) -> None:
    """Selects the directory of the first worker whose directory is visible here. All workers see a store."""
    if is_remote(folder.final):
        folder.temporary, folder.token, folder.tag = folder.final, tokens[0], f"-{tokens[0]}"
        (folder.rank,), folder.members = folder.members, range(len(tokens))
        return
    if runtime is None or runtime.num_workers == 1:
        return
    paths = [os.path.join(wish.directory, layout.temporary(wish.prefix, token)) for token in tokens]
    first = next(i for i, path in enumerate(paths) if os.path.isdir(path))
    firsts = gather(runtime, first)
    folder.members = [worker for worker, leader in enumerate(firsts) if leader == first]
    folder.rank = folder.members.index(runtime.worker_index)
    if folder.rank:
        # After the gather, no worker looks for this directory any more.
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


def _make(path: str) -> int | None:
    """Creates a directory and returns its lock, which shows other processes that it is not stale."""
    if is_remote(path):
        storage.of(path)  # raises an error if its package is not installed
        return None
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.mkdir(path)
    fd = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some network file systems cannot lock directories
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def clean(directory: str, live: set[str]) -> None:
    """Removes the remains of killed saves, and puts back a checkpoint that a killed save had renamed.

    `live` contains the tokens of directories that are in use. A directory with unknown files and without an
    index is never removed, even if its name matches.
    """
    entries = os.listdir(directory)
    temporary = [entry for entry in entries if layout.temporary_of(entry) and not entry.endswith(tuple(live))]
    left = {entry for entry in temporary if _is_left(os.path.join(directory, entry))}
    # Another save may be between its two renames. It shares its token with the checkpoint that it replaces.
    running = tuple({entry[-16:] for entry in temporary} - {entry[-16:] for entry in left})
    for entry in entries:
        path = os.path.join(directory, entry)
        old = layout.replaced_of(entry)
        if old is not None:
            target = os.path.join(directory, old)
            if layout.is_checkpoint(target):
                if layout.is_of_a_save(path):
                    remove(path)
            elif layout.is_checkpoint(path) and not entry.endswith(running):
                with contextlib.suppress(OSError):
                    os.rename(path, target)
        elif entry in left:
            remove(path)


def _is_left(path: str) -> bool:
    """Returns whether a temporary directory is stale: not locked, or old if it cannot be locked."""
    if not layout.is_of_a_save(path):
        return False
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


def clean_store(path: str, kept: Collection[str]) -> None:
    """Removes files of killed saves from an object store, if the newest of a directory is older than an hour.

    Killed saves may have written to `path`, a new checkpoint with the shards `kept`, or to another number.
    """
    store = storage.Remote(path)
    directory, name = storage.split(path)
    prefix = layout.prefix_of(name)
    now = store.modified(os.path.join(path, layout.INDEX))  # by the clock of the store
    whole = {found.path for found in layout.find(directory, prefix)}
    same = [other for other in store.names(directory) if prefix and layout.prefix_of(other) == prefix]
    for place in {path, *(os.path.join(directory, other) for other in same)} - (whole - {path}):
        own = [name for name in store.names(place) if layout.is_own(name)]
        left = [os.path.join(place, name) for name in own if place != path or name not in kept]
        if left and max(map(store.modified, left)) < now - _OLD:
            store.remove(left)


def remove(path: str, is_wanted: Callable[[str], bool] | None = None) -> None:
    """Deletes a directory. In an object store, deletes the files of a checkpoint, its index first.

    Files that cannot be deleted stay until the next save. In a store, `is_wanted` selects files other than the
    index by their names.
    """
    if not is_remote(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError, CheckpointError):
        store = storage.Remote(path)
        if is_wanted is None:
            store.remove([os.path.join(path, layout.INDEX)])
        names = filter(layout.is_own, store.names(path))
        store.remove([os.path.join(path, name) for name in names if is_wanted is None or is_wanted(name)])
