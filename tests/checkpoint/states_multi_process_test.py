"""Objects with a state in a checkpoint: each worker gets back its own, or all of them the one they share."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.processes import run, strategy


class Notes:
    """What a user's object may hold: JSON."""

    def __init__(self, text):
        self.text = text

    def get_state(self):
        return {"text": self.text}

    def set_state(self, state):
        self.text = state["text"]


def make(text, own, number):
    import keras

    import kdist

    with strategy().scope():
        variable = keras.Variable(np.full(3, number, "float32"))
    notes, shared = Notes(own), Notes(text)
    return kdist.Checkpoint(variable=variable, notes=notes, shared=shared), notes, shared, variable


def in_worker_save(folder):
    checkpoint, *_ = make("all", f"worker {os.environ['RANK']}", 5)
    return checkpoint.save(folder, asynchronous=False)


def in_worker_restore(path):
    """Restores everything, and then all but what each worker has of its own; returns what there is after each."""
    import keras

    import kdist

    checkpoint, notes, shared, variable = make("nobody's", "nobody's", 0)
    found = []
    error = ""
    for objects in (checkpoint, kdist.Checkpoint(variable=variable, shared=shared)):
        try:
            objects.restore(path)
        except kdist.errors.CheckpointMismatchError as raised:
            error = str(raised)
        number = float(keras.ops.convert_to_numpy(variable)[0])
        found.append((number, notes.text, shared.text))
    return found, error


def other_workers(backend, num_workers):
    mark = pytest.mark.xdist_group(f"pool-{backend}")
    return pytest.param(backend, num_workers, marks=mark, id=f"{num_workers}-of-{backend}")


@pytest.mark.parametrize(("backend", "num_workers"), [other_workers("torch", 1), other_workers("jax", 3)])
def test_another_number_of_workers_cannot_share_out_states(backend, num_workers, tmp_path):
    path = run(backend, 2, in_worker_save, str(tmp_path))[0]
    for rank, (found, error) in enumerate(run(backend, 2, in_worker_restore, path)):
        assert found == [(5, f"worker {rank}", "all")] * 2
        assert error == ""
    for found, error in run(backend, num_workers, in_worker_restore, path):
        # All or nothing; without the object of which each worker had its own, all is well.
        assert found == [(0, "nobody's", "nobody's"), (5, "nobody's", "all")]
        assert "own: as many must restore it" in error
        assert f"saved_by=2, num_workers={num_workers}" in error
        assert "Start 2 workers, or leave 'notes' out of kdist.Checkpoint." in error
