"""Warnings of backups about other batches in the middle of an epoch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import each_backend_in_twelve_turns, run
from tests.training.resuming_multi_process_test import BATCH, Interrupted, fit, stop_at


def in_worker_other_batches(folder: str) -> list[list[str]]:
    """Interrupts `fit` in the middle of an epoch, and at its end, and resumes with other batches."""
    import kdist

    found: list[list[str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: found[-1].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kdist").addHandler(handler)
    try:
        for number, (batch, size) in enumerate([(1, BATCH), (1, BATCH // 2), (None, BATCH // 2)]):
            found.append([])
            backup: dict[str, Any] = {
                "backup_dir": f"{folder}/{number}",
                "save_freq": 1 if batch else "epoch",
            }
            with pytest.raises(Interrupted):
                fit("arrays", 1, kdist.callbacks.BackupAndRestore(**backup), stop_at(1, batch))
            fit("arrays", 1, kdist.callbacks.BackupAndRestore(**backup), batch_size=size)
    finally:
        logging.getLogger("kdist").removeHandler(handler)
    return [[text for text in texts if "have changed since the backup" in text] for texts in found]


@pytest.mark.kills("resume_other_batches_unnoticed")
@each_backend_in_twelve_turns
def test_a_resume_with_other_batches_warns(backend: str, tmp_path: Path) -> None:
    chief, other = run(backend, 2, in_worker_other_batches, str(tmp_path))
    assert [len(texts) for texts in chief] == [0, 1, 0] and not any(other)
    assert "batch size 8, number of batches 6; now: batch size 4, number of batches 11." in chief[1][0]
