"""Finds checkpoints in a directory: kdist's checkpoints and files of `keras.callbacks.ModelCheckpoint`."""

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
    """A checkpoint as it was when the directory was listed."""

    path: str
    saved_at: float  # set by the saving process or the file system
    number: int | None  # 12 for "ckpt-12" and "model-12.keras"
    is_file: bool  # whether it is a Keras file
    stamp: tuple[int, ...] = ()  # changes with each write

    @property
    def has_changed(self) -> bool:
        """Whether a file was written or deleted since then."""
        return self.is_file and _stamp(self.path) != self.stamp


@dataclass
class Folder:
    """Finds the newest checkpoint of a directory that is not yet done or skipped.

    kdist's checkpoints appear atomically. A Keras file may be incomplete, so it counts only after it has not
    changed for `settle_seconds`.
    """

    path: str  # of the directory, which need not exist yet
    settle_seconds: float

    def __post_init__(self) -> None:
        self.is_waiting = False
        """Whether the last call of `newest` found a file that may be incomplete."""
        self._last = (float("-inf"), -1)
        self._first_seen: dict[Watched, float] = {}
        self._passed_over: set[Watched] = set()
        self.excluded: list[set[str]] = []
        """The real paths of files that are not checkpoints."""

    def newest(self) -> Watched | None:
        """Returns the newest complete checkpoint that is not done or skipped; `None` if there is none."""
        now = time.monotonic()
        there = self._list()
        self._first_seen = {item: self._first_seen.get(item, now) for item in there}
        settled = now - self.settle_seconds
        complete = [item for item in there if not item.is_file or self._first_seen[item] <= settled]
        self.is_waiting = len(complete) < len(there)
        return max(complete, key=_order, default=None)

    def done_with(self, item: Watched) -> None:
        """Excludes this checkpoint and all older checkpoints."""
        self._last = max(self._last, _order(item))

    def pass_over(self, item: Watched) -> None:
        """Skips this checkpoint, unless it is written again. Older checkpoints stay eligible."""
        self._passed_over.add(item)

    def _list(self) -> list[Watched]:
        found = [Watched(item.path, item.saved_at, item.number, False) for item in layout.find(self.path)]
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            names = []
        for name in names:
            path = os.path.join(self.path, name)
            if any(os.path.realpath(path) in paths for paths in self.excluded):
                continue
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
    """Returns the last whole number in a name, for example 7 for "07-0.31.keras"."""
    stem = next(name.removesuffix(end) for end in _FILES if name.endswith(end))
    whole = [found for found in _NUMBER.findall(stem) if "." not in found]
    return int(whole[-1]) if whole else None
