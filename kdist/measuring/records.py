"""Reads the records of `kdist.callbacks.RunLog` of all workers."""

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
    """The activities of one worker since its last record."""

    epoch: int  # from 1
    step: int  # the last step within the epoch, from 1
    totals: Totals
    # The loss and the metrics after that step; at the end of an epoch, also validation metrics.
    logs: dict[str, Any]
    ends_epoch: bool  # whether this is the last record of the epoch

    @property
    def place(self) -> tuple[int, int, bool]:
        """The position in training, for comparisons."""
        return self.epoch, self.step, self.ends_epoch


@dataclass
class WorkerLog:
    """The records of one worker."""

    worker: int  # its index
    # The description that the worker wrote at each start.
    starts: list[dict[str, Any]] = field(default_factory=list)
    # In the order of training. For repeated steps, only the last records.
    records: list[Record] = field(default_factory=list)

    @property
    def totals(self) -> Totals:
        """The sum of all records, without steps that compile."""
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
    """The records of all workers in a run."""

    folder: str
    workers: list[WorkerLog]

    @property
    def about(self) -> dict[str, Any]:
        """The description that the first worker wrote at its last start."""
        return self.workers[0].starts[-1]

    @property
    def exchanges_in_programs(self) -> bool:
        """Whether compiled steps include the exchange."""
        return bool(self.about["exchanges_in_programs"])

    @property
    def is_fused(self) -> bool:
        """Whether compiled steps include an exchange. A single replica exchanges nothing."""
        return self.exchanges_in_programs and self.about["num_workers"] * len(self.about["devices"]) > 1

    def positions(self) -> dict[int, int]:
        lengths: dict[int, int] = {}
        for record in (record for log in self.workers for record in log.records):
            lengths[record.epoch] = max(lengths.get(record.epoch, 0), record.step)
        before, total = {}, 0
        for epoch in sorted(lengths):
            before[epoch] = total
            total += lengths[epoch]
        return before


def has_records(folder: str) -> bool:
    return os.path.isdir(folder) and any(map(_FILE.fullmatch, os.listdir(folder)))


def read_run(folder: str) -> Run:
    """Reads the records of all workers in a directory.

    Raises:
        InvalidArgumentError: If there are no records.
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
        if is_new:  # the job resumed from a backup, or restarted from the beginning
            log.records = [known for known in log.records if known.place < record.place]
            is_new = False
        log.records.append(record)
    return log


def _lines(path: str) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield dict(json.loads(line))
            except (ValueError, TypeError, RecursionError):  # a partial line from a killed worker
                continue
