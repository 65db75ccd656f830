"""The position of a resumed `fit` in the log and in `kdist checkpoint show`, counted as Keras counts epochs."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from kdist.checkpoint.command import main as command
from tests.helpers.data import make_data
from tests.helpers.models import network
from tests.helpers.processes import each_backend, run, strategy


def train(
    folder: str, stop: tuple[int, int] | None, save_freq: Any, epochs: int = 3
) -> tuple[list[str], str]:
    """Trains epochs of 4 steps, and returns kdist's log and Keras's output."""
    import keras

    import kdist

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (self.epoch, batch) == stop:
                raise InterruptedError

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    model = network(2, 1, scope=strategy().scope())
    backup = kdist.callbacks.BackupAndRestore(folder, save_freq, None, False, max_to_keep=9)
    logging.getLogger("kdist").addHandler(handler)
    with contextlib.suppress(InterruptedError), contextlib.redirect_stdout(io.StringIO()) as printed:
        model.fit(*make_data(16), batch_size=4, epochs=epochs, verbose=2, callbacks=[Stop(), backup])
    logging.getLogger("kdist").removeHandler(handler)
    return logged, printed.getvalue()


def resumed(folder: str) -> tuple[list[Any], str]:
    """Trains in five starts, and returns their outputs and the descriptions of the backups."""
    starts = (((1, 2), 1, 3), ((2, 0), "epoch", 3), *((None, "epoch", epochs) for epochs in (3, 3, 2)))
    results = [train(folder, *start) for start in starts]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        for number in (6, 7, 8):
            command(argparse.Namespace(action="show", path=f"{folder}/ckpt-{number}"))
    return results, shown.getvalue()


@pytest.mark.kills(
    fewer_epochs_logged_as_a_resume="[torch]",
    resumed_position_counts_from_zero="[torch]",
    resumed_position_not_logged="[torch]",
    shown_position_counts_from_zero="[torch]",
)
@each_backend
def test_a_resumed_fit_logs_its_position(backend: str, tmp_path: Path) -> None:
    (chief, shown), (other, _) = run(backend, 2, resumed, str(tmp_path))
    # Step 3 of epoch 2 is interrupted before its backup, then step 1 of epoch 3.
    logs, printed = zip(*chief, strict=True)
    assert logs[0] == [] and "Epoch 1/3" in printed[0]
    assert logs[1] == [f"resuming at epoch 2, after step 2, from {tmp_path}/ckpt-6"]
    assert printed[1].startswith("Epoch 2/3")
    assert logs[2] == [f"resuming at epoch 3, from {tmp_path}/ckpt-7"] and printed[2].startswith("Epoch 3/3")
    assert logs[3] == [
        f"the backup {tmp_path}/ckpt-8 is from the end of the training, epoch 3, so `fit` trains nothing. "
        "To train again, delete the directory."
    ]
    assert logs[4] == logs[3], "fewer epochs"
    assert printed[3] == printed[4] == ""
    assert re.findall("resumes at (.*)", shown) == ["epoch 2, after step 2", "epoch 3", "epoch 4"]
    assert [logged for logged, _ in other] == [[]] * 5
