"""A `fit` that resumes saves the model after the same steps as an uninterrupted `fit`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import each_backend_in_twelve_turns, run
from tests.orbax_multi_process_test import stand_in
from tests.training.resuming_multi_process_test import Interrupted, fit, stop_at


def in_worker_saves(folder: str, kind: str) -> list[list[str]]:
    """Saves the model after every fourth step; returns the names of the files, without and with a resume."""
    import keras

    import kdist

    if kind == "OrbaxCheckpoint":
        stand_in()

    def start(name: str, seed: int, *callbacks: object) -> None:
        saves: Any
        if kind == "OrbaxCheckpoint":
            saves = keras.callbacks.OrbaxCheckpoint(f"{folder}/{name}", save_on_background=False, save_freq=4)
        else:
            path = f"{folder}/{name}/{{epoch}}-{{batch}}.weights.h5"
            saves = keras.callbacks.ModelCheckpoint(path, save_freq=4, save_weights_only=True)
        fit("arrays", seed, saves, *callbacks)

    start("uninterrupted", 1)
    with pytest.raises(Interrupted):
        start("resumed", 1, kdist.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=1), stop_at(0, 4))
    start("resumed", 2, kdist.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=1))
    return [sorted(os.listdir(f"{folder}/{name}")) for name in ("uninterrupted", "resumed")]


@pytest.mark.kills(
    resume_steps_since_the_last_file_lost="[torch-ModelCheckpoint]",
    resume_steps_of_orbax_lost="[torch-OrbaxCheckpoint]",
)
@pytest.mark.parametrize("kind", ["ModelCheckpoint", "OrbaxCheckpoint"])
@each_backend_in_twelve_turns
def test_a_resumed_run_saves_after_the_same_steps(backend: str, kind: str, tmp_path: Path) -> None:
    ((uninterrupted, resumed),) = run(backend, 1, in_worker_saves, str(tmp_path), kind)
    assert uninterrupted == resumed
    assert len(resumed) == 4  # of 18 steps
