"""Provokes problems inside workers that have joined. Each function raises an error or warns."""

from __future__ import annotations

import contextlib
import io
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kdist
from kdist.doctor import machines, probes
from tests.helpers.data import make_data
from tests.helpers.models import network
from tests.helpers.processes import strategy


def provoke(name: str, folder: str) -> str:
    """Runs a function of this module in a worker; returns its output, warnings and error."""
    before = os.getcwd()
    os.chdir(folder)
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
            warnings.simplefilter("always")
            try:
                CASES[name]()
            except Exception as error:
                printed.write(f"\n{_qualified(error)}: {error}\n")
        warned = [str(one.message) for one in caught if one.category is UserWarning]
        return "\n".join([printed.getvalue(), *warned])
    finally:
        os.chdir(before)


def _qualified(error: Exception) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")


def me() -> int:
    return int(os.environ["RANK"])


def data(rows: int = 12) -> tuple[Any, Any]:
    return make_data(rows)


def batches(number: int) -> Iterator[tuple[Any, Any]]:
    for _ in range(number):
        yield data(4)


def new_model(units: int = 4, *layers: Any, loss: Any = "mse") -> Any:
    return network(units, *layers, 1, loss=loss, scope=strategy().scope())


def fit(model: Any = None, **arguments: Any) -> None:
    x, y = data()
    (model or new_model()).fit(**{"x": x, "y": y, "batch_size": 4, "verbose": 0, **arguments})


# Workers that disagree ---------------------------------------------------------------------------------------


def other_number_of_rows() -> None:
    x, y = data(12 + 4 * me())
    fit(x=x, y=y)


def saves_alone() -> None:
    model = new_model()
    if me() == 0:
        kdist.Checkpoint(model=model).save("checkpoints")
    fit(model)


def other_length() -> None:
    fit(x=batches(2 + me()), y=None, batch_size=None)


def other_model() -> None:
    fit(new_model(4 + me()))


def other_weights() -> None:
    model = new_model()
    strategy().extended.update(model.layers[0].bias, lambda bias: bias.assign_add(np.full(4, float(me()))))
    kdist.experimental.check_in_sync(model)


def other_collective() -> None:
    os.environ["KDIST_DEBUG"] = "1"
    try:
        value = np.ones((1, 1), "float32")
        strategy().gather(value, axis=0) if me() else strategy().reduce("MEAN", value, axis=None)
    finally:
        del os.environ["KDIST_DEBUG"]


# Failures on one worker --------------------------------------------------------------------------------------


def callback_fails() -> None:
    import keras

    def look(epoch: int, logs: Any = None) -> None:
        if me() == 1:
            raise FileNotFoundError("labels.txt")

    fit(callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=look)])


def reading_fails() -> None:
    def rows() -> Iterator[tuple[Any, Any]]:
        yield from batches(1)
        if me() == 1:
            raise FileNotFoundError("part-1.npy")
        yield from batches(1)

    fit(x=rows(), y=None, batch_size=None)


def out_of_memory() -> None:
    import keras

    keras.ops.sum(keras.ops.ones((2**24, 2**20)))  # 64 TiB


def barrier_alone() -> None:
    given_up = Path("given-up")
    if me() == 0:
        try:
            kdist.barrier("data is there", timeout=0.5)
        finally:
            given_up.touch()
    else:
        while not given_up.exists():
            time.sleep(0.01)
        kdist.barrier("data is there")


# Devices and scopes ------------------------------------------------------------------------------------------


def too_late_for_devices() -> None:
    kdist.MirroredStrategy([f"cpu:{index}" for index in range(9)])


def no_gpu() -> None:
    kdist.MirroredStrategy(["gpu:0", "gpu:1"])


def no_tpu() -> None:
    told = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}  # no query of the metadata server
    os.environ.update(told)
    try:
        kdist.TPUStrategy()
    finally:
        for name in told:
            del os.environ[name]


def another_cluster() -> None:
    spec = kdist.cluster_resolver.ClusterSpec({"worker": ["localhost:2222", "localhost:2223"]})
    resolver = kdist.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=me())
    kdist.MultiWorkerMirroredStrategy(resolver)


def model_from_outside() -> None:
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with strategy().scope():
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


def mixed_strategies() -> None:
    with strategy().scope(), kdist.OneDeviceStrategy("cpu:0").scope():
        raise AssertionError("not reached")


def function_of_tensorflow() -> None:
    import tensorflow as tf

    dataset = strategy().experimental_distribute_dataset([np.zeros((2, 1), "float32")])
    tf.function(lambda iterator: next(iterator))(iter(dataset))


# Numbers -----------------------------------------------------------------------------------------------------


def not_a_number() -> None:
    import keras

    x, y = data()
    fit(x=x * np.nan, callbacks=[keras.callbacks.TerminateOnNaN()])


def coupled_rows() -> None:
    import keras

    def contrast(y: Any, predicted: Any) -> Any:
        return keras.ops.max(predicted) - keras.ops.mean(y)

    fit(new_model(loss=contrast))


def ended_dataset() -> None:
    iterator = iter(strategy().experimental_distribute_dataset([np.zeros((2, 1), "float32")]))
    iterator.get_next()
    iterator.get_next()


def one_is_slow() -> None:
    import keras

    wait = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs=None: time.sleep(0.1 * me())
    )
    fit(callbacks=[kdist.callbacks.Throughput(), wait], epochs=2, verbose=2)


def other_clock() -> None:
    offsets = probes.clock_offsets(
        lambda value: kdist.all_gather_object(value, strategy()), lambda: time.time() + 90 * me()
    )
    print(machines.judge_clocks(offsets).text())


# Checkpoints -------------------------------------------------------------------------------------------------


def saved(folder: str = "checkpoints", **objects: Any) -> str:
    return kdist.Checkpoint(**(objects or {"model": new_model()})).save(folder, asynchronous=False)


def no_checkpoint() -> None:
    kdist.Checkpoint(model=new_model()).restore("checkpoints/ckpt-7")


def parent_of_checkpoints() -> None:
    kdist.Checkpoint(model=new_model()).restore(str(Path(saved()).parent))


def damaged_checkpoint() -> None:
    path = Path(saved())
    if me() == 0:
        shard = next(path.glob("*.safetensors"))
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    kdist.barrier("damaged")
    kdist.Checkpoint(model=new_model()).restore(str(path))


def missing_shard() -> None:
    path = Path(saved())
    if me() == 0:
        next(path.glob("*.safetensors")).unlink()
    kdist.barrier("damaged")
    kdist.Checkpoint(model=new_model()).restore(str(path))


def checkpoint_of_another_model() -> None:
    path = saved()
    kdist.Checkpoint(model=new_model(5)).restore(path)


def checkpoint_with_less() -> None:
    path = saved()
    kdist.Checkpoint(model=new_model(), generator=new_model()).restore(path).assert_existing_objects_matched()


def newer_checkpoint() -> None:
    from kdist.checkpoint import index
    from kdist.checkpoint.checked_reading import read_index

    path = Path(saved())
    if me() == 0:
        (path / "index.json").write_bytes(index.dump(read_index(str(path)), index.VERSION + 1))
    kdist.barrier("newer")
    kdist.Checkpoint(model=new_model()).restore(str(path))


def folder_is_not_shared() -> None:
    path = saved()
    kdist.Checkpoint(model=new_model()).restore(
        path if me() == 0 else None
    )  # the other workers search their own disk


def folder_cannot_be_written() -> None:
    Path("checkpoints").write_text("a file\n", encoding="utf-8")
    saved()


_HELPERS = ("provoke", "me", "data", "batches", "new_model", "fit", "saved", "strategy")
CASES: dict[str, Callable[[], None]] = {
    name: value
    for name, value in list(globals().items())
    if getattr(value, "__module__", "") == __name__ and name[0].islower() and name not in _HELPERS
}
