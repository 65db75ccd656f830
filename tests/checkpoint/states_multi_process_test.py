"""Objects with a state in a checkpoint: each worker gets back its own state, or the state that all share."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from tests.helpers.processes import each_backend, run, strategy


class Notes:
    """A user's object, whose state contains text, an array and a tensor."""

    def __init__(self, text):
        self.text = text

    def get_state(self):
        import keras

        tensor = keras.ops.arange(3, dtype="uint8")
        return {
            "text": self.text,
            "most significant byte first": np.arange(3, dtype=">i4"),
            "tensors": [tensor],
        }

    def set_state(self, state):
        import keras

        (tensor,) = state["tensors"]
        assert keras.ops.is_tensor(tensor) and keras.backend.standardize_dtype(tensor.dtype) == "uint8"
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(tensor), np.arange(3))
        self.text = state["text"]
        np.testing.assert_array_equal(state["most significant byte first"], np.arange(3))


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
    """Restores all objects, and then only the shared objects; returns the values after each restore."""
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


def in_worker_two_directories(folder):
    """Saves in one directory on workers 0 and 1, and in another on worker 2; returns state and error."""
    import kdist

    rank = int(os.environ["RANK"])
    checkpoint, *_ = make("all", f"worker {rank}", 5)
    own = checkpoint.save(os.path.join(folder, str(rank // 2)), asynchronous=False)
    kdist.barrier()
    restored, notes, *_ = make("nobody's", "nobody's", 0)
    restored.restore(own).assert_consumed()
    with pytest.raises(kdist.errors.CheckpointError) as raised:
        restored.restore(own.replace(f"{os.sep}1{os.sep}", f"{os.sep}0{os.sep}"))
    return notes.text, str(raised.value)


def test_workers_with_several_directories_get_their_own_states(tmp_path):
    found = run("jax", 3, in_worker_two_directories, str(tmp_path))
    assert [text for text, _ in found] == ["worker 0", "worker 1", "worker 2"]
    for _, error in found:
        assert "does not contain the state of worker 2" in error and "workers=[0, 1], worker=2" in error


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
        # The restore fails as a whole. Without the object that has one state per worker, it succeeds.
        assert found == [(0, "nobody's", "nobody's"), (5, "nobody's", "all")]
        assert "one saved state per worker" in error
        assert f"saved_by=2, num_workers={num_workers}" in error
        assert "Start 2 workers, or remove 'notes' from kdist.Checkpoint." in error


def in_worker_containers(folder):
    """Restores values next to variables; returns them, and the status."""
    import keras

    import kdist

    def new(number):
        with strategy().scope():
            return keras.Variable(float(number))

    saved = kdist.Checkpoint(
        pair=(new(1), (new(1), 5)), row=[new(1), 1, 2], table={"v": new(1), "epoch": 7}, more={}
    )
    restored = kdist.Checkpoint(
        pair=(new(0), (new(0), 0)), row=[new(0), 0], table={"v": new(0)}, more={"v": new(0)}
    )
    status = restored.restore(saved.save(folder, asynchronous=False))
    first, (second, five) = restored.pair
    numbers = [float(v) for v in (first, second, five, *restored.row, *restored.table.values())]
    return numbers, float(restored.more["v"]), status.unused, status.unmatched


def test_values_in_containers_are_restored_or_reported(tmp_path):
    ((numbers, untouched, unused, unmatched),) = run("torch", 1, in_worker_containers, str(tmp_path))
    assert numbers == [1, 1, 5, 1, 1, 1]
    assert untouched == 0
    assert unused == ["row.2", "table.epoch", "more"] and unmatched == ["more.v"]


def in_worker_written_after_the_next_step(folder):
    """Saves, changes a variable before it is written, and lets another object restore; returns old and new values."""
    import keras

    import kdist
    from kdist.checkpoint import writing

    stepped = threading.Event()
    write_shard, join = writing.write_shard, writing.Save.join

    def late(*args):
        assert stepped.wait(60)
        write_shard(*args)

    def step_and_join(save):
        stepped.set()
        return join(save)

    weights = keras.Variable(np.random.rand(5))
    saved = keras.ops.convert_to_numpy(weights).copy()
    checkpoint = kdist.Checkpoint(weights=weights)
    writing.write_shard, writing.Save.join = late, step_and_join
    try:
        path = checkpoint.save(folder)
        other = kdist.Checkpoint(other=1)
        assert os.path.basename(other.save(folder)) == "ckpt-2"  # the first number is taken already
        weights.assign(weights * 2)
        kdist.Checkpoint(weights=weights).restore(path)  # which only the other objects save
        checkpoint.wait()
        other.wait()
    finally:
        stepped.set()
        writing.write_shard, writing.Save.join = write_shard, join
    return saved, keras.ops.convert_to_numpy(weights)


@pytest.mark.kills(
    checkpoint_values_of_a_later_step="[torch]", checkpoint_save_of_another_object_not_waited_for="[torch]"
)
@each_backend
def test_a_save_in_the_background_writes_the_values_of_its_step(backend, tmp_path):
    ((saved, restored),) = run(backend, 1, in_worker_written_after_the_next_step, str(tmp_path))
    np.testing.assert_array_equal(restored, saved)


def in_worker_adapted(folder):
    """Saves adapted layers; returns their outputs, and new layers' outputs after two kinds of restore."""
    import keras

    import kdist
    from kdist.checkpoint.restoring import restore_weights

    x = np.random.RandomState(0).normal(5, 3, (20, 1)).astype("float32")

    def make(is_adapted=False):
        with strategy().scope():
            layers = keras.layers.Normalization(), keras.layers.Discretization(num_bins=4)
            for layer in layers if is_adapted else ():
                layer.adapt(x)
            inputs = keras.Input((1,))
            return keras.Model(inputs, [layer(inputs) for layer in layers])

    def computed(model):
        return [keras.ops.convert_to_numpy(output) for output in model(x)]

    saved, restored, evaluated = make(is_adapted=True), make(), make()
    path = kdist.Checkpoint(model=saved).save(folder, asynchronous=False)
    kdist.Checkpoint(model=restored).restore(path).assert_consumed()
    restore_weights(path, evaluated)
    return x, computed(saved), computed(restored), computed(evaluated)


@pytest.mark.kills(checkpoint_constants_not_derived="[jax]")
@each_backend
def test_layers_compute_with_what_they_were_adapted_to(backend, tmp_path):
    ((x, saved, restored, evaluated),) = run(backend, 1, in_worker_adapted, str(tmp_path))
    np.testing.assert_allclose(saved[0], (x - x.mean()) / x.std(), rtol=1e-4, atol=1e-5)
    assert set(saved[1].ravel()) == {0, 1, 2, 3}
    for found in (restored, evaluated):
        for values, expected in zip(found, saved, strict=True):
            np.testing.assert_array_equal(values, expected)


def in_worker_random_generator(folder):
    import torch

    import kdist

    generator = torch.Generator()
    checkpoint = kdist.Checkpoint(generator=generator)
    path = checkpoint.save(folder, asynchronous=False)
    following = torch.rand(3, generator=generator).tolist()
    checkpoint.restore(path).assert_consumed()
    return following, torch.rand(3, generator=generator).tolist()


@pytest.mark.kills("checkpoint_state_as_numpy")
def test_a_generator_of_pytorch_continues_after_a_restore(tmp_path):
    ((following, again),) = run("torch", 1, in_worker_random_generator, str(tmp_path))
    assert again == following


def in_worker_wrapped(folder):
    """Saves a PyTorch module that has moving statistics; returns its state before and after a restore."""
    import keras
    import torch

    import kdist

    def make():
        with strategy().scope():
            model = keras.Sequential([keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(3))])
            model.build((None, 3))
            return model

    def kept(model):
        state = model.layers[0].module.state_dict().items()
        return {name: keras.ops.convert_to_numpy(tensor).copy() for name, tensor in state}

    saved, restored = make(), make()
    for scale in (1, 5):
        saved(torch.randn(8, 3) * scale + 2, training=True)
    path = kdist.Checkpoint(model=saved).save(folder, asynchronous=False)
    kdist.Checkpoint(model=restored).restore(path).assert_consumed()
    return kept(saved), kept(restored)


def test_buffers_of_a_pytorch_module_are_restored(tmp_path):
    ((saved, restored),) = run("torch", 1, in_worker_wrapped, str(tmp_path))
    assert saved["num_batches_tracked"] == 2 and saved.keys() == restored.keys()
    for name, values in saved.items():
        np.testing.assert_array_equal(restored[name], values, err_msg=name)
