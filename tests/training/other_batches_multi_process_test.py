"""Warnings of backups: other batches in the middle of an epoch, and objects that are not restored."""

from __future__ import annotations

import contextlib
import itertools
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


def in_worker_other_steps(folder: str) -> tuple[list[tuple[int, int]], list[str]]:
    """Interrupts `fit` after step 3 of epoch 2 of 4 steps, and resumes it with 2 steps per epoch."""
    import keras
    import numpy as np

    import kdist
    from tests.helpers.processes import strategy

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kdist").addHandler(handler)
    trained: list[tuple[int, int]] = []

    class Note(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch + 1

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if steps == 4 and (self.epoch, batch) == (2, 3):
                raise Interrupted
            trained.append((self.epoch, batch))

    for steps, interrupted in ((4, pytest.raises(Interrupted)), (2, contextlib.nullcontext())):
        trained.clear()
        with strategy().scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        data = ((np.ones((4, 2)), np.ones((4, 1))) for _ in itertools.count())
        callbacks = [Note(), kdist.callbacks.BackupAndRestore(folder, save_freq=1)]
        with interrupted:  # type: ignore[attr-defined]
            model.fit(data, steps_per_epoch=steps, epochs=3, verbose=0, callbacks=callbacks)
    logging.getLogger("kdist").removeHandler(handler)
    return trained, [text for text in said if "steps_per_epoch" in text]


@pytest.mark.kills(resume_other_steps_end_training="[torch]", resume_other_steps_skip_one="[torch]")
@each_backend_in_twelve_turns
def test_a_resume_with_other_steps_per_epoch_trains_all_later_epochs(backend: str, tmp_path: Path) -> None:
    (trained, warnings), (_, of_other) = run(backend, 2, in_worker_other_steps, str(tmp_path))
    assert trained == [(3, 0), (3, 1)]
    (warning,) = warnings
    assert "was 4 in the backup, and is now 2. `fit` resumes after step 3" in warning and not of_other


def in_worker_other_weights(folder: str) -> list[str]:
    """Returns the warnings of a resumed `fit`. The model has an optimizer of a weight outside the model."""
    import keras
    import numpy as np

    import kdist
    from tests.helpers.processes import strategy

    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kdist").addHandler(handler)
    try:
        for epochs in (1, 2):
            with strategy().scope():
                model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
                model.compile("adam", "mse")
                model.other = keras.optimizers.SGD()
                if epochs == 1:
                    model.other.build([keras.Variable([1.0, 2.0])])
            backup = kdist.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
            model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=epochs, verbose=0, callbacks=[backup])
    finally:
        logging.getLogger("kdist").removeHandler(handler)
    return found


@pytest.mark.kills("backup_not_restored_unnoticed")
@each_backend_in_twelve_turns
def test_a_resume_warns_of_objects_that_it_does_not_restore(backend: str, tmp_path: Path) -> None:
    for messages in run(backend, 2, in_worker_other_weights, str(tmp_path)):
        (warning,) = [message for message in messages if not message.startswith("resuming at")]
        assert "contains model.other, which kdist cannot restore" in warning
