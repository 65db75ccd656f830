"""What `kdist.callbacks.RunLog` has written in a folder, as the whole run of all workers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kdist.errors import InvalidArgumentError
from kdist.tracing import Totals

_FILE = re.compile(r"worker-(\d+)\.jsonl")


@dataclass(frozen=True)
class Record:
    """What one worker has done since its last record.

    Args:
        epoch: From 1.
        step: The last one of the record, within the epoch, from 1.
        totals: How long what took.
        logs: The loss and the metrics after that step; at the end of an epoch those of the validation, too.
        ends_epoch: Whether the epoch ends with it.
    """

    epoch: int
    step: int
    totals: Totals
    logs: dict[str, Any]
    ends_epoch: bool

    @property
    def place(self) -> tuple[int, int, bool]:
        """Where in the training it is."""
        return self.epoch, self.step, self.ends_epoch


@dataclass
class WorkerLog:
    """The records of one worker.

    Args:
        worker: Its index.
        starts: What it has said of itself each time it was started.
        records: In the order of training; what was trained twice has its last ones.
    """

    worker: int
    starts: list[dict[str, Any]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def totals(self) -> Totals:
        """All of them together, without what was compiled."""
        total = Totals()
        for one in (record.totals for record in self.records if not record.totals.compiles):
            total.elapsed += one.elapsed
            total.steps += one.steps
            total.rows += one.rows
            for category, seconds in one.seconds.items():
                total.seconds[category] = total.seconds.get(category, 0.0) + seconds
        return total


@dataclass(frozen=True)
class Run:
    """The run of all workers."""

    folder: str
    workers: list[WorkerLog]

    @property
    def about(self) -> dict[str, Any]:
        """What the first worker has said of itself at its last start."""
        return self.workers[0].starts[-1]

    @property
    def exchanges_in_programs(self) -> bool:
        """Whether what a step takes contains the exchange."""
        return bool(self.about["exchanges_in_programs"])

    @property
    def is_fused(self) -> bool:
        """Whether it contains one: a single replica has nothing to exchange."""
        return self.exchanges_in_programs and self.about["num_workers"] * len(self.about["devices"]) > 1

    def positions(self) -> dict[int, int]:
        """Returns how many steps there were before each epoch."""
        lengths: dict[int, int] = {}
        for record in (record for log in self.workers for record in log.records):
            lengths[record.epoch] = max(lengths.get(record.epoch, 0), record.step)
        before, total = {}, 0
        for epoch in sorted(lengths):
            before[epoch] = total
            total += lengths[epoch]
        return before


def has_records(folder: str) -> bool:
    """Says whether there is something to read."""
    return os.path.isdir(folder) and any(map(_FILE.fullmatch, os.listdir(folder)))


def read_run(folder: str) -> Run:
    """Reads the records of all workers whose files are in a folder.

    Raises:
        InvalidArgumentError: There are none.
    """
    names = sorted(
        filter(None, map(_FILE.fullmatch, os.listdir(folder) if os.path.isdir(folder) else ())), key=_index
    )
    logs = [_read(os.path.join(folder, name.string), _index(name)) for name in names]
    logs = [log for log in logs if log.starts and log.records]
    if not logs:
        raise InvalidArgumentError(
            f"No run found in {folder!r}: the directory has no records of kdist.callbacks.RunLog.",
            hint='Record a run: model.fit(…, callbacks=[kdist.callbacks.RunLog("runs/first")])',
        )
    return Run(folder, logs)


def _index(name: re.Match[str]) -> int:
    return int(name[1])


def _read(path: str, worker: int) -> WorkerLog:
    log = WorkerLog(worker)
    is_new = False
    for line in _lines(path):
        if line.get("start"):
            log.starts.append(line)
            is_new = True
            continue
        totals = Totals(**{name: line[name] for name in ("elapsed", "steps", "rows", "seconds", "compiles")})
        record = Record(line["epoch"], line["step"], totals, line["logs"], line["epoch_end"])
        if is_new:  # it goes on from a backup, or from the beginning
            log.records = [known for known in log.records if known.place < record.place]
            is_new = False
        log.records.append(record)
    return log


def _lines(path: str) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield dict(json.loads(line))
            except (ValueError, TypeError, RecursionError):  # half a line, of a worker that was killed
                continue
