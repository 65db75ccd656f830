"""Which checkpoints a folder has: kdist's, and the files of `keras.callbacks.ModelCheckpoint`."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from kdist.checkpoint import layout

_FILES = (".keras", ".weights.h5")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


@dataclass(frozen=True)
class Watched:
    """A checkpoint as it was when the folder was looked at."""

    path: str
    saved_at: float  # by the clock of whoever saved it, or of the file system
    number: int | None  # 12 of "ckpt-12" and of "model-12.keras"
    is_file: bool  # whether it is a file of Keras's
    stamp: tuple[int, ...] = ()  # of a file: becomes another when it is written to

    @property
    def has_changed(self) -> bool:
        """Whether it was written to since, or has gone."""
        return self.is_file and _stamp(self.path) != self.stamp


class Folder:
    """Gives the newest checkpoint of a folder, each once, and none before one that was given.

    kdist's checkpoints appear all at once. A file of Keras's may be half written, so it counts once it has stayed the
    same for a while.

    Args:
        path: Of the folder, which need not be there yet.
        settle_seconds: How long a file must have stayed the same.
    """

    def __init__(self, path: str, settle_seconds: float) -> None:
        self.path = path
        self.is_waiting = False
        """Whether the last look has seen a file that may still be written to."""
        self._settle_seconds = settle_seconds
        self._last = (float("-inf"), -1)
        self._first_seen: dict[Watched, float] = {}
        self._passed_over: set[Watched] = set()

    def newest(self) -> Watched | None:
        """Looks at the folder; returns the newest checkpoint that is complete and new, or `None`."""
        now = time.monotonic()
        there = self._list()
        self._first_seen = {item: self._first_seen.get(item, now) for item in there}
        complete = [item for item in there if self._is_complete(item, now)]
        self.is_waiting = len(complete) < len(there)
        return max(complete, key=_order, default=None)

    def _is_complete(self, item: Watched, now: float) -> bool:
        return not item.is_file or now - self._first_seen[item] >= self._settle_seconds

    def done_with(self, item: Watched) -> None:
        """Never gives this checkpoint, nor an older one, again."""
        self._last = max(self._last, _order(item))

    def pass_over(self, item: Watched) -> None:
        """Never gives this checkpoint again, unless it is written anew; an older one will do."""
        self._passed_over.add(item)

    def _list(self) -> list[Watched]:
        found = [Watched(item.path, item.saved_at, item.number, False) for item in layout.find(self.path)]
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            names = []
        for name in names:
            path = os.path.join(self.path, name)
            if name.endswith(_FILES) and not name.startswith(".") and (stamp := _stamp(path)):
                found.append(Watched(path, stamp[0] / 1e9, _number_in(name), True, stamp))
        return [item for item in found if _order(item) > self._last and item not in self._passed_over]


def _order(item: Watched) -> tuple[float, int]:
    return item.saved_at, -1 if item.number is None else item.number


def _stamp(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _number_in(name: str) -> int | None:
    """The last whole number in a name: 7 of "07-0.31.keras"."""
    stem = next(name.removesuffix(end) for end in _FILES if name.endswith(end))
    whole = [found for found in _NUMBER.findall(stem) if "." not in found]
    return int(whole[-1]) if whole else None
