"""`CheckpointManager` on two workers, and `kdist checkpoint` on the command line."""

from __future__ import annotations

import glob
import os
import shutil
import sys

import numpy as np
import pytest

from kdist import command_line
from tests.checkpoint import jobs
from tests.helpers.environment import ROOT
from tests.helpers.processes import each_backend, rank, run, strategy
from tests.helpers.scripts import Script, run_python


def names(paths):
    return [os.path.basename(path) for path in paths]


def in_worker_manage(folder):
    """Checks the checkpoints that a manager keeps, its save interval, and a restore by a new manager."""
    import keras

    import kdist

    with strategy().scope():
        weights = keras.Variable(np.zeros(3))
    checkpoint = kdist.Checkpoint(weights=weights, step=0)
    made = []
    manager = kdist.CheckpointManager(
        checkpoint,
        folder,
        max_to_keep=2,
        step_counter="step",
        checkpoint_interval=3,
        init_fn=lambda: made.append(1),
    )
    assert manager.restore_or_initialize() is None and made == [1]
    saved = []
    for step in range(1, 9):
        checkpoint.step = step
        weights.assign(np.full(3, step))
        saved.append(manager.save() is not None)
    assert saved == [True, False, False, True, False, False, True, False]
    assert manager.save(check_interval=False) is not None
    manager.wait()
    kdist.barrier()
    assert names(manager.checkpoints) == ["ckpt-3", "ckpt-4"] == names(sorted(os.scandir(folder), key=str))

    again = kdist.Checkpoint(weights=weights, step=0)
    manager = kdist.CheckpointManager(
        again, folder, 2, step_counter=lambda: again.step, checkpoint_interval=3
    )
    weights.assign(np.zeros(3))
    assert os.path.basename(manager.restore_or_initialize()) == "ckpt-4"
    assert again.step == 8 and again.save_counter == 4 and float(np.asarray(weights.numpy())[0]) == 8.0
    again.step += 2
    assert manager.save() is None  # the interval counts from the restored step
    assert os.path.basename(manager.save(100, check_interval=False, asynchronous=False)) == "ckpt-100"
    kdist.barrier()
    assert names(manager.checkpoints) == ["ckpt-4", "ckpt-100"]
    again.step = 3  # as after a restore of an earlier checkpoint
    assert os.path.basename(manager.save(asynchronous=False)) == "ckpt-101"

    manager = kdist.CheckpointManager(again, folder + "-hours", 1, keep_checkpoint_every_n_hours=1e-9)
    for number in (1, 2, 3):
        manager.save(number, asynchronous=False)
    kdist.barrier()
    assert len(manager.checkpoints) == 1 and len(os.listdir(manager.directory)) == 4
    kdist.barrier()
    if rank() == 0:  # as with `rm -r FOLDER/*`, which leaves the hidden file
        for name in glob.glob(f"{manager.directory}/ckpt-*"):
            shutil.rmtree(name)
    manager = kdist.CheckpointManager(again, folder + "-hours", 1, keep_checkpoint_every_n_hours=1e9)
    for number in range(1, 8):
        manager.save(number, asynchronous=False)
    kdist.barrier()
    assert names(manager.checkpoints) == ["ckpt-7"] == names(glob.glob(f"{manager.directory}/ckpt-*"))
    for _ in range(3):  # as in a job that restarts after every save
        manager = kdist.CheckpointManager(again, folder + "-restarts", 1, keep_checkpoint_every_n_hours=1e-9)
        manager.save(asynchronous=False)
    kdist.barrier()
    assert len(manager.checkpoints) == 1 and len(os.listdir(manager.directory)) == 4

    again.step = 9
    manager = kdist.CheckpointManager(again, folder, 2)
    path = manager.save(asynchronous=False)
    kdist.barrier()
    restore = kdist.Checkpoint.restore

    def restore_late(self, path):
        kdist.Checkpoint.restore = restore
        if rank() == 0:  # another job deletes it, for example because of its `max_to_keep`
            shutil.rmtree(path)
        kdist.barrier()
        return restore(self, path)

    kdist.Checkpoint.restore = restore_late
    assert os.path.basename(manager.restore_or_initialize()) == "ckpt-101" and again.step == 3, path
    for wrong in ({"max_to_keep": 0}, {"max_to_keep": 1, "checkpoint_interval": 5}):
        with pytest.raises(kdist.errors.InvalidArgumentError):
            kdist.CheckpointManager(again, folder, **wrong)


@pytest.mark.kills(
    "checkpoint_shards_overwritten",
    "checkpoint_too_many_deleted",
    "manager_forgets_the_hours_at_a_restart",
    "manager_restores_a_deleted_checkpoint",
    "manager_skips_saves_after_a_rollback",
    "manager_keeps_the_number_of_a_deleted_checkpoint",
)
def test_the_manager(tmp_path):
    run("torch", 2, in_worker_manage, str(tmp_path / "managed"))


def in_worker_count(folder, is_wrapped):
    """Trains with a step after every 3 of 9 batches; returns the steps of the model and of its copies."""
    import keras

    import kdist
    from kdist.checkpoint.restoring import restore_weights
    from kdist.coordinator import loading, watching

    def make():
        with strategy().scope():
            optimizer = keras.optimizers.Adam(gradient_accumulation_steps=3)
            if is_wrapped:
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(optimizer, "mse")
        return model

    model, restored, loaded = make(), make(), make()
    checkpoint = kdist.Checkpoint(model=model)
    with pytest.raises(kdist.errors.InvalidArgumentError, match="step_counter=lambda: optimizer.iterations"):
        kdist.CheckpointManager(checkpoint, folder, 2, step_counter=model.optimizer.iterations)
    manager = kdist.CheckpointManager(
        checkpoint, folder, None, step_counter=lambda: model.optimizer.iterations, checkpoint_interval=2
    )
    paths = []
    for _ in range(3):
        model.fit(*jobs.data(), batch_size=6, verbose=0)  # 3 batches
        paths.append(manager.save(asynchronous=False))
    assert [path is not None for path in paths] == [True, False, True]
    restore_weights(paths[-1], restored)
    file = f"{folder}/model.weights.h5"
    model.save_weights(file)
    loading.load(watching.Watched(file, 0.0, None, True, watching._stamp(file)), loaded)
    return [int(other.optimizer.iterations) for other in (model, restored, loaded)]


@pytest.mark.kills(checkpoint_steps_of_the_wrapper="[torch-True]")
@pytest.mark.parametrize("is_wrapped", [False, True])
@each_backend
def test_steps_of_an_optimizer_that_accumulates_gradients(backend, is_wrapped, tmp_path):
    assert run(backend, 1, in_worker_count, str(tmp_path), is_wrapped) == [[3, 3, 3]]


def in_worker_save(folder):
    """Saves a trained model; returns the path and its prediction."""
    import kdist

    model = jobs.make_model()
    model.fit(*jobs.data(), batch_size=6, verbose=0)
    path = kdist.Checkpoint(model=model, epoch=3).save(folder, asynchronous=False)
    # The metrics of a new model have no variables yet.
    kdist.Checkpoint(model=jobs.make_model()).restore(path).assert_consumed()
    return path, model.predict(jobs.data()[0], verbose=0)


LOOK = """
import sys
from kdist.command_line import main
codes = [main(["checkpoint", action, sys.argv[1]]) for action in ("show", "verify")]
loaded = {"keras", "tensorflow", "jax", "torch"} & set(sys.modules)
assert codes == [0, 0] and not loaded, (codes, loaded)
"""
OPEN = """
import sys
import keras
import numpy as np
model = keras.saving.load_model(sys.argv[1] + "/m.keras")
x = np.random.RandomState(0).rand(18, 3).astype("float32")
first = model.predict(x, verbose=0)
assert int(model.optimizer.iterations) == 3
for weight in model.weights:
    weight.assign(weight * 0)
model.load_weights(sys.argv[1] + "/m.weights.h5")
assert "kdist" not in sys.modules
np.testing.assert_array_equal(model.predict(x, verbose=0), first)
np.save(sys.argv[1] + "/prediction.npy", first)
"""


def python(code, folder, backend="torch"):
    return run_python("-c", code, str(folder), cwd=ROOT, KERAS_BACKEND=backend).stdout


@pytest.mark.kills("checkpoint_header_not_verified", "newest_checkpoint_of_an_empty_directory")
@pytest.mark.in_turn(4)
def test_the_command_line(tmp_path, capsys):
    path, prediction = run("torch", 1, in_worker_save, str(tmp_path))[0]
    out = python(LOOK, tmp_path)
    assert "model.optimizer/2/momentum" in out and "epoch" in out and "complete and undamaged" in out
    code = "import sys; from kdist.command_line import main; "
    for name in ("m.keras", "m.weights.h5"):
        code += f"assert main(['checkpoint', 'convert', sys.argv[1], sys.argv[1] + '/{name}']) == 0; "
    code += "sys.stderr = sys.stdout; assert main(['checkpoint', 'convert', sys.argv[1], 'model.bin']) == 2"
    assert ".weights.h5 or .keras" in python(code, tmp_path)
    python(OPEN, tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "prediction.npy"), prediction, rtol=1e-6)
    with open(os.path.join(path, "shard-00000-of-00001.safetensors"), "r+b") as file:
        file.truncate(100)
    assert command_line.main(["checkpoint", "verify", path]) == 1
    assert command_line.main(["checkpoint", "show", str(tmp_path / "nothing")]) == 1
    err = capsys.readouterr().err
    assert "bytes=100" in err and "does not exist" in err
    (tmp_path / "empty").mkdir()
    assert command_line.main(["checkpoint", "show", str(tmp_path / "empty")]) == 1
    assert "Check the path." in capsys.readouterr().err, "the directory has no newest checkpoint"


def test_shards_are_safetensors_files(tmp_path):
    from safetensors.numpy import load_file

    path, _ = run("torch", 1, in_worker_save, str(tmp_path))[0]
    tensors = load_file(os.path.join(path, "shard-00000-of-00001.safetensors"))
    assert tensors["model/0/dense/kernel"].shape == (3, 5)
    assert tensors["model.optimizer/0/iteration"] == 3


SAVES = """
import sys, keras, kdist
with kdist.OneDeviceStrategy("cpu:0").scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
kdist.Checkpoint(model=model).save("checkpoints", asynchronous=False)
model.save("model.keras")
assert "tensorflow" not in sys.modules
from keras.src.utils import module_utils
assert module_utils.tensorflow.available, "it is hidden for the time of a save only"
"""


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.in_turn(4)
def test_saving_does_not_import_tensorflow(backend, tmp_path):
    # Keras imports TensorFlow to check the types of objects, which takes four seconds on each worker.
    # Forked processes have already imported TensorFlow, so this test starts a new process.
    Script(tmp_path, "saves", SAVES, {"KERAS_BACKEND": backend}, [sys.executable]).finish()
