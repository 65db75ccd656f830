"""Objects with a state in a checkpoint: each worker gets back its own, or all of them the one they share."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from tests.helpers.processes import each_backend, run, strategy


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
        assert "one saved state per worker" in error
        assert f"saved_by=2, num_workers={num_workers}" in error
        assert "Start 2 workers, or remove 'notes' from kdist.Checkpoint." in error


def in_worker_written_after_the_next_step(folder):
    """Saves, changes a variable before anything is written, restores; returns what was and what is."""
    import keras

    import kdist
    from kdist.checkpoint import writing

    stepped = threading.Event()
    write_shard = writing.write_shard

    def late(*args):
        assert stepped.wait(60)
        write_shard(*args)

    weights = keras.Variable(np.random.rand(5))
    saved = keras.ops.convert_to_numpy(weights).copy()
    checkpoint = kdist.Checkpoint(weights=weights)
    writing.write_shard = late
    try:
        path = checkpoint.save(folder)
        weights.assign(weights * 2)
        stepped.set()
        checkpoint.wait()
    finally:
        writing.write_shard = write_shard
    checkpoint.restore(path)
    return saved, keras.ops.convert_to_numpy(weights)


@pytest.mark.kills(checkpoint_values_of_a_later_step="[torch]")
@each_backend
def test_a_save_in_the_background_writes_the_values_of_its_step(backend, tmp_path):
    ((saved, restored),) = run(backend, 1, in_worker_written_after_the_next_step, str(tmp_path))
    np.testing.assert_array_equal(restored, saved)
