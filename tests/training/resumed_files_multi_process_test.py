"""A `fit` that resumes saves the model after the same steps as an uninterrupted `fit`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.processes import each_backend_in_twelve_turns, run
from tests.training.resuming_multi_process_test import Interrupted, fit, stop_at


def in_worker_saves(folder: str) -> list[list[str]]:
    """Saves the model after every fourth step; returns the names of the files, without and with a resume."""
    import keras

    import kdist

    def start(name: str, seed: int, *callbacks: object) -> None:
        path = f"{folder}/{name}/{{epoch}}-{{batch}}.weights.h5"
        saves = keras.callbacks.ModelCheckpoint(path, save_freq=4, save_weights_only=True)
        fit("arrays", seed, saves, *callbacks)

    start("uninterrupted", 1)
    with pytest.raises(Interrupted):
        start("resumed", 1, kdist.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=1), stop_at(0, 4))
    start("resumed", 2, kdist.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=1))
    return [sorted(os.listdir(f"{folder}/{name}")) for name in ("uninterrupted", "resumed")]


@pytest.mark.kills("resume_steps_since_the_last_file_lost")
@each_backend_in_twelve_turns
def test_a_resumed_run_saves_after_the_same_steps(backend: str, tmp_path: Path) -> None:
    ((uninterrupted, resumed),) = run(backend, 1, in_worker_saves, str(tmp_path))
    assert uninterrupted == resumed
    assert len(resumed) == 4  # of 18 steps
