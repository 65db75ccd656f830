"""Sharded variables save memory, match one device, and save files for any strategy. Mistakes raise errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist.testing import WorkerPool
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.models import state_of
from tests.helpers.processes import run, run_plain, start_pool
from tests.sharding import jobs

# Backend, number of workers, and devices per worker.
TWO_WORKERS = ("jax", 2, 1)
FOUR_DEVICES = ("jax", 1, 4)
TORCH_WORKERS = ("torch", 2, 1)
# On JAX, dropout draws one mask for the global batch, so the results match one device even with dropout.
RATES = {"jax": 0.1}
# The largest share of weights and optimizer state per device, by strategy and replicas. The layouts of
# "attention" split somewhat more than half of them in two.
SHARES = {("fully", 2): 0.6, ("fully", 4): 0.35, ("attention", 4): 0.8}


class Pools:
    """Workers with the strategies of `jobs.prepare`, kept for the next test."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int, int], WorkerPool] = {}
        self._plain: dict[str, Any] = {}

    def run(self, place: tuple[str, int, int], function: Any, *args: Any) -> list[Any]:
        backend, workers, devices = place
        if place not in self._pools:
            self._pools[place] = start_pool(workers, backend)
            self._pools[place].run(jobs.prepare, devices)
        try:
            return self._pools[place].run(function, *args)
        except BaseException:
            self._pools.pop(place).close()
            raise

    def plain(self, backend: str) -> Any:
        """Returns the results of one device."""
        if backend not in self._plain:
            self._plain[backend] = run_plain(backend, jobs.train, None, RATES.get(backend, 0.0))
        return self._plain[backend]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    found = Pools()
    yield found
    found.close()


# A transformer compiles slowly, so only pairs run; for `ModelParallelStrategy`, the mesh has two axes.
@pytest.mark.kills(
    jax_divided_variables_whole="[four-devices-fully]",
    jax_rows_padded_along_one_axis="[four-devices-model]",
    jax_slots_not_divided="[four-devices-model]",
)
@pytest.mark.parametrize(
    ("place", "name"),
    [(TWO_WORKERS, "fully"), (FOUR_DEVICES, "fully"), (FOUR_DEVICES, "attention")],
    ids=["two-workers-fully", "four-devices-fully", "four-devices-model"],
)
@pytest.mark.in_turn(3)
def test_a_transformer_has_the_numbers_of_one_device(name: str, place: Any, pools: Pools) -> None:
    rate = RATES.get(place[0], 0.0)
    expected = pools.plain(place[0])
    for actual in pools.run(place, jobs.train, name, rate):
        for key in ("losses", "evaluated", "predicted"):
            assert_close(actual[key], expected[key], atol=5e-6, where=key)
        floats = [i for i, value in enumerate(expected["values"]) if value.dtype.kind == "f"]
        assert_close(
            [actual["values"][i] for i in floats], [expected["values"][i] for i in floats], atol=5e-6
        )
        assert actual["bytes"] <= SHARES[name, place[1] * place[2]] * expected["bytes"]


@pytest.mark.kills("jax_sharded_variables_gathered_at_the_start")
def test_a_step_on_jax_holds_few_whole_variables_at_once(pools: Pools) -> None:
    (mirrored,), (fully,) = (
        pools.run(FOUR_DEVICES, jobs.step_memory, name) for name in ("mirrored", "fully")
    )
    # Mirrored: all weights and all gradients. `FullyShardedStrategy` has a quarter of the weights, and
    # gathers some.
    assert mirrored >= 24 + 24
    assert 6 <= fully <= mirrored / 2


@pytest.mark.kills("divided_files_of_the_chief_alone", "sharded_variable_read_in_stored_order")
@pytest.mark.in_turn(4)
def test_files_of_divided_variables_are_read_by_all(pools: Pools, tmp_path: Path) -> None:
    places = [
        (TWO_WORKERS, "fully"),
        (FOUR_DEVICES, "model"),
        (TWO_WORKERS, "mirrored"),
    ]
    for i, (place, name) in enumerate(places):
        folder = tmp_path / str(i)
        folder.mkdir()
        saved = pools.run(place, jobs.save, name, str(folder))
        path, file, values = saved[0]
        for other_path, _, others in saved:
            assert other_path == path
            assert_equal(others, values)
        for other, theirs in places[i + 1 :] + places[:i]:
            for restored, loaded in pools.run(other, jobs.restore, theirs, path, file):
                assert_equal(restored, values)
                assert_equal(loaded, values)


@pytest.mark.in_turn(4)
def test_checkpoints_of_divided_variables_are_read_by_another_backend(pools: Pools, tmp_path: Path) -> None:
    places = [TWO_WORKERS, TORCH_WORKERS]
    for place, other in (places, places[::-1]):
        folder = tmp_path / place[0]
        folder.mkdir()
        path, _, values = pools.run(place, jobs.save, "fully", str(folder))[0]
        for restored in pools.run(other, jobs.restore_checkpoint, "fully", path):
            assert_equal(restored, values)


@pytest.mark.kills(jax_array_of_somebody_else_taken="[fully]")
@pytest.mark.parametrize(
    ("place", "name"),
    [(TWO_WORKERS, "fully"), (FOUR_DEVICES, "model"), (TORCH_WORKERS, "fully")],
    ids=["fully", "model", "torch"],
)
@pytest.mark.in_turn(3)
def test_a_loop_of_the_user_s_has_the_numbers_of_one_device(name: str, place: Any, pools: Pools) -> None:
    expected = run_plain(place[0], jobs.plain_loop)
    for actual in pools.run(place, jobs.loop, name):
        assert_close({key: actual[key] for key in expected}, expected, atol=5e-6)


@pytest.mark.kills(torch_update_before_assigned_weights="[torch]")
@pytest.mark.parametrize("place", [TWO_WORKERS, TORCH_WORKERS], ids=["jax", "torch"])
@pytest.mark.in_turn(2)
def test_an_update_starts_from_weights_that_layers_assigned(place: Any, pools: Pools) -> None:
    _check_job(jobs.assigned_weights, place, pools)


@pytest.mark.kills(
    torch_gradient_of_assigned_weights_lost="[torch]", torch_assigned_shards_not_aggregated="[torch]"
)
@pytest.mark.parametrize("place", [TWO_WORKERS, TORCH_WORKERS], ids=["jax", "torch"])
@pytest.mark.in_turn(2)
def test_weights_that_a_layer_uses_and_then_assigns_have_their_gradient(place: Any, pools: Pools) -> None:
    _check_job(jobs.used_and_assigned_weights, place, pools)


@pytest.mark.kills("torch_assigned_weights_of_first_replica")
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_the_replicas_of_a_process_aggregate_weights_that_a_layer_assigns(backend: str) -> None:
    (actual,) = run(backend, 1, jobs.used_and_assigned_weights, "local")
    _compare(actual, run_plain(backend, jobs.used_and_assigned_weights, None))


@pytest.mark.kills(jax_copies_of_sharded_variables_not_gathered="[jax]")
@pytest.mark.parametrize("place", [TWO_WORKERS, TORCH_WORKERS], ids=["jax", "torch"])
@pytest.mark.in_turn(2)
def test_an_optimizer_starts_from_copies_of_the_weights(place: Any, pools: Pools) -> None:
    _check_job(jobs.copied_weights, place, pools)


# Plain Keras cannot train such a model twice on JAX.
@pytest.mark.kills(jax_array_of_two_sharded_variables="[four-devices]")
@pytest.mark.parametrize("place", [TWO_WORKERS, FOUR_DEVICES], ids=["two-workers", "four-devices"])
@pytest.mark.in_turn(2)
def test_weights_and_their_averages_do_not_share_memory(place: Any, pools: Pools) -> None:
    _check_job(jobs.averaged_weights, place, pools, "torch")


def _check_job(job: Any, place: tuple[str, int, int], pools: Pools, plain: str | None = None) -> None:
    expected = run_plain(plain or place[0], job, None)
    for actual in pools.run(place, job, "fully"):
        _compare(actual, expected)


def _compare(actual: Any, expected: Any) -> None:
    assert_close(actual["losses"], expected["losses"], atol=5e-6)
    for found, value in zip(actual["values"], expected["values"], strict=True):
        if value.dtype.kind == "f":
            assert_close(found, value, atol=5e-6)


def save_alone(folder: str) -> str:
    import os

    import kdist

    with jobs.strategy("fully").scope():
        model = jobs.small()
    x, y = jobs.rows(8)
    try:
        if os.environ["RANK"] == "0":
            model.save(f"{folder}/alone.keras")
        model.fit(x, y, verbose=0)
    except kdist.errors.WorkerMismatchError as error:
        return f"mismatch: {error}"
    except kdist.errors.KdistError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.kills(torch_divided_read_without_meeting="[torch]")
@pytest.mark.parametrize("place", [TWO_WORKERS, TORCH_WORKERS], ids=["jax", "torch"])
@pytest.mark.in_turn(4)
def test_a_worker_that_saves_alone_is_an_error_and_no_hang(tmp_path: Path, place: Any, pools: Pools) -> None:
    chief, other = pools.run(place, save_alone, str(tmp_path))
    assert chief == other
    assert "mismatch: Worker 0 and worker 1 called different methods." in chief
    assert "worker_0='reading sharded variables, at" in chief and "sharded_multi_process_test.py" in chief
    assert "`save`, `restore`" in chief and "on every worker" in chief


def export(name: str, folder: str) -> tuple[Any, Any]:
    """Returns the predictions of an exported model and of the model itself."""
    import os

    import tensorflow as tf

    with jobs.strategy(name).scope():
        model = jobs.small()
    x, y = jobs.rows(8)
    model.fit(x, y, verbose=0)
    path = os.path.join(folder, "exported")
    model.export(path, format="tf_saved_model", verbose=False)
    exported = tf.saved_model.load(path)
    return exported.serve(x).numpy(), model.predict(x, verbose=0)


@pytest.mark.kills("jax_export_reads_sharded_arrays")
@pytest.mark.parametrize("name", ["fully", "model"])
@pytest.mark.in_turn(4)
def test_an_export_contains_the_whole_variables(tmp_path: Path, name: str, pools: Pools) -> None:
    for served, predicted in pools.run(TWO_WORKERS, export, name, str(tmp_path)):
        assert_close(served, predicted, atol=1e-5)


def back_up(folder: str) -> tuple[list[Any], list[Any], list[str]]:
    """Runs Keras's callbacks that write and read files, in a `fit` that fails and in the next `fit`."""
    import os

    import keras

    class Failing(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise ValueError("on purpose")

    x, y = jobs.rows()
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 4}
    with jobs.strategy("fully").scope():
        whole, failed, resumed = (jobs.small() for _ in range(3))
    whole.fit(x, y, **arguments, callbacks=[keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras")])
    try:
        failed.fit(x, y, **arguments, callbacks=[keras.callbacks.BackupAndRestore(f"{folder}/b"), Failing()])
    except ValueError:
        pass
    history = resumed.fit(x, y, **arguments, callbacks=[keras.callbacks.BackupAndRestore(f"{folder}/b")])
    assert history.epoch == [2, 3], history.epoch
    with jobs.strategy("fully").scope():
        best = keras.saving.load_model(f"{folder}/4.keras")
    assert_equal(state_of(best), state_of(whole))
    return state_of(whole), state_of(resumed), sorted(os.listdir(folder))


@pytest.mark.parametrize("place", [TWO_WORKERS, TORCH_WORKERS], ids=["jax", "torch"])
@pytest.mark.in_turn(4)
def test_keras_s_callbacks_write_and_resume(tmp_path: Path, place: Any, pools: Pools) -> None:
    for whole, resumed, files in pools.run(place, back_up, str(tmp_path)):
        assert_close(resumed, whole, atol=5e-6)
        assert [f"{epoch}.keras" for epoch in range(1, 5)] == [name for name in files if "keras" in name]


def mistakes() -> dict[str, str]:
    """Returns the error of each mistake; all are raised before training starts."""
    import kdist

    mesh = {"batch": 2, "model": 2}
    names = [f"cpu:{i}" for i in range(4)]
    x, y = jobs.rows(8)

    def made(layouts: Any, **arguments: Any) -> Any:
        return kdist.ModelParallelStrategy(layouts, **{"mesh": mesh, "devices": names} | arguments)

    def build(layouts: Any) -> Any:
        with made(layouts).scope():
            return jobs.small()

    tried = {
        "does not divide": lambda: build(
            {".*/up/kernel": ("model", "batch"), ".*/gamma": ("model", "batch")}
        ),
        "two axes": lambda: build(lambda path, shape: ("model",) * len(shape)),
        "two layouts": lambda: build({".*up/kernel": (None, "model"), ".*/kernel": (None, "model")}),
        "no such axis": lambda: made({".*kernel": (None, "modle")}),
        "no such batch axis": lambda: made({".*kernel": (None, "model")}, batch_dim_name="rows"),
        "for no variable": lambda: build({".*/up/kernel": (None, "model"), ".*/sideways": ("model",)}).fit(
            x, y
        ),
        "too few devices": lambda: made({".*kernel": (None, "model")}, devices=names[:2]),
        "no such device": lambda: kdist.FullyShardedStrategy(["cpu:0", "gpu:7"]),
        "no layouts": lambda: kdist.ModelParallelStrategy(),
        "no mesh": lambda: kdist.ModelParallelStrategy({".*kernel": (None, "model")}),
    }
    said = {}
    for what, function in tried.items():
        try:
            function()
            said[what] = "nothing"
        except kdist.errors.KdistError as error:
            said[what] = f"{type(error).__name__}: {error}"
    build({".*/up/kernel": (None, "model"), ".*/up/output": ("batch", "model")}).fit(x, y, verbose=0)
    return said


@pytest.mark.kills("layout_for_nothing_passed_over")
def test_mistakes_are_named_before_anything_is_trained(pools: Pools) -> None:
    (said,) = pools.run(FOUR_DEVICES, mistakes)
    wanted = {
        "does not divide": "/gamma'.\nReceived: shape=(8,), layout=('model', 'batch'), mesh={'batch': 2, 'model': 2}",
        "two axes": "Use no mesh axis twice.",
        "two layouts": "Several layouts match the path",
        "no such axis": "The mesh has no axis 'modle'",
        "no such batch axis": "The mesh has no axis 'rows'",
        "for no variable": "layouts=['.*/sideways']",
        "too few devices": "mesh={'batch': 2, 'model': 2}, devices=2",
        "no such device": "device='gpu:7'",
        "no layouts": "`layout_map` is not",
        "no mesh": "mesh=None",
    }
    for what, words in wanted.items():
        kind = "DeviceError" if what == "no such device" else "InvalidArgumentError"
        assert said[what].startswith(kind), said[what]
        assert words in said[what]
