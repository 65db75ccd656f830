"""Where each worker writes: workers that see the same folder share it, others write a checkpoint of their own."""

from __future__ import annotations

import contextlib
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
class Place:
    """Where this worker writes its shard.

    Args:
        temporary: The folder, while it is being written.
        final: What it is called afterwards.
        members: The workers that write into it.
        rank: Which of them this one is; the first one commits.
        token: Of the folder.
        lock: A descriptor that keeps others from taking the folder for one left behind.
        lost: Gives the workers that are known to be lost.
        is_waiting: Whether it is other workers that a save waits for now.
    """

    temporary: str
    final: str
    members: Sequence[int]
    rank: int
    token: str
    lock: int | None = None
    lost: Callable[[], Collection[int]] = frozenset
    is_waiting: bool = False

    def release(self) -> None:
        """Lets go of the folder."""
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)


@dataclass(frozen=True)
class Wish:
    """What this worker is about to save.

    Args:
        directory: Where.
        prefix: The name, "ckpt"; of a checkpoint with a number, what comes before it.
        number: Chooses the number, on the chief; `None` for a checkpoint without one.
        facts: Must be equal on all workers.
        failure: What became of this worker's last save, if it failed.
    """

    directory: str
    prefix: str
    number: Callable[[], int] | None
    facts: Any
    failure: str | None


def meet(runtime: Runtime | None, wish: Wish) -> tuple[Place, str, int | None]:
    """Finds out who writes where. Collective.

    Returns:
        This worker's place; what all folders of this save are known by; its number.

    Raises:
        CheckpointError: On all workers: one cannot write, has failed before, or saves something else.
    """
    token = secrets.token_hex(8)
    index = runtime.worker_index if runtime is not None else 0
    mine = os.path.join(wish.directory, layout.temporary(wish.prefix, token))
    lock, problem = _make(mine) if wish.failure is None else (None, wish.failure)
    number = None
    try:
        if problem is None and wish.number is not None and index == 0:
            number = wish.number()
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    said = {"token": token, "problem": problem, "facts": wish.facts, "number": number}
    everyone = [said] if runtime is None else gather(runtime, said)
    place = Place(mine, "", [index], 0, token, lock, runtime.lost_workers if runtime else frozenset)
    try:
        _check(everyone, wish.directory)
        number = everyone[0]["number"]
        name = wish.prefix if number is None else layout.numbered(wish.prefix, number)
        place.final = os.path.join(wish.directory, name)
        _join_others(runtime, wish, place, [other["token"] for other in everyone])
    except BaseException:
        place.release()
        shutil.rmtree(mine, ignore_errors=True)
        raise
    if place.rank == 0:
        with contextlib.suppress(OSError):  # what cannot be removed does no harm
            clean(wish.directory, {other["token"] for other in everyone})
    return place, everyone[0]["token"], number


def _join_others(runtime: Runtime | None, wish: Wish, place: Place, tokens: Sequence[str]) -> None:
    """Finds the first worker whose folder is to be seen here: that is the one to write into."""
    if runtime is None or runtime.num_workers == 1:
        return
    folders = [os.path.join(wish.directory, layout.temporary(wish.prefix, token)) for token in tokens]
    first = next(i for i, folder in enumerate(folders) if os.path.isdir(folder))
    firsts = gather(runtime, first)
    place.members = [worker for worker, leader in enumerate(firsts) if leader == first]
    place.rank = place.members.index(runtime.worker_index)
    if place.rank:
        # All workers have said what they see: nobody looks for this folder any more.
        place.release()
        shutil.rmtree(place.temporary, ignore_errors=True)
        place.temporary, place.token = folders[first], tokens[first]


def _check(everyone: Sequence[dict[str, Any]], directory: str) -> None:
    for index, said in enumerate(everyone):
        if said["problem"] is not None:
            raise CheckpointError(
                f"A checkpoint cannot be saved: worker {index}: {said['problem']}",
                received={"directory": directory},
                hint=""
                if "Received:" in said["problem"]
                else "Free or choose another directory, and save again.",
            )
    for index, said in enumerate(everyone):
        if said["facts"] != everyone[0]["facts"]:
            raise CheckpointError(
                f"All workers must save the same objects, but worker 0 and worker {index} have different ones.",
                received={"worker_0": everyone[0]["facts"], f"worker_{index}": said["facts"]},
                hint="Create the same Checkpoint on every worker, and save it at the same step.",
            )


def _make(folder: str) -> tuple[int | None, str | None]:
    """Makes a folder that nobody takes for one left behind; returns its lock, and what went wrong."""
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        os.mkdir(folder)
        return _lock(folder), None
    except OSError as error:
        return None, f"{type(error).__name__}: {error}"


def _lock(folder: str) -> int | None:
    try:
        import fcntl
    except ImportError:
        return None
    fd = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def clean(directory: str, live: set[str]) -> None:
    """Removes what saves that were killed have left, and puts back what one of them had moved aside.

    Args:
        directory: Where.
        live: Tokens of folders that are being written.
    """
    for entry in os.listdir(directory):
        path = os.path.join(directory, entry)
        old = layout.replaced_of(entry)
        if old is not None:
            target = os.path.join(directory, old)
            if os.path.exists(os.path.join(target, layout.INDEX)):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.rename(path, target)
        elif layout.temporary_of(entry) is not None and not entry.endswith(tuple(live)) and _is_left(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_left(folder: str) -> bool:
    """Says whether nobody writes into a folder any more."""
    try:
        import fcntl

        fd = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        with contextlib.suppress(OSError):
            return time.time() - os.stat(folder).st_mtime > _OLD
        return False
    finally:
        os.close(fd)
