"""Steps over a mesh give the results of plain Keras on one device."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import kdist
from tests.backends.where import in_worker
from tests.helpers import by_hand

if in_worker:
    import jax
    import keras

    from kdist.backends.jax.steps import JaxSteps
    from kdist.backends.workers import Workers
    from kdist.data.agreement import split_batch

# Each device is a replica.
REPLICAS = pytest.mark.parametrize("replicas", [1, 2, 3])

ROWS = 46
BATCH = 10  # 3 replicas do not divide it, and it does not divide the rows: the last batch has 6 rows


def _data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.RandomState(0)
    x = draw.randn(ROWS, 6).astype("float32")
    return x, draw.randint(0, 3, ROWS), draw.rand(ROWS).astype("float32")


def _model(**compile_arguments: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(12, activation="relu", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.4),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(
        "adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"], **compile_arguments
    )
    return model


def _numbers(model: keras.Model) -> dict[str, Any]:
    x, y, weights = _data()
    keras.utils.set_random_seed(4)
    history = model.fit(
        x, y, batch_size=BATCH, epochs=3, sample_weight=weights, validation_split=0.2, verbose=0
    )
    return {
        "history": history.history,
        "weights": model.get_weights(),
        "optimizer": [np.asarray(v) for v in model.optimizer.variables],
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
        "evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0),
    }


@functools.cache
def _expected() -> dict[str, Any]:
    """Returns the results of one device without a strategy."""
    return _numbers(_model())


def _assert_equal(one: Any, other: Any) -> None:
    keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), one, other)


def _mirrored(replicas: int) -> kdist.Strategy:
    return kdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def _under(replicas: int, make: Callable[..., keras.Model] = _model, **arguments: Any) -> keras.Model:
    with _mirrored(replicas).scope():
        return make(**arguments)


@REPLICAS
def test_numbers_are_those_of_one_device(replicas: int) -> None:
    _assert_equal(_expected(), _numbers(_under(replicas)))


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    "arguments", [{"run_eagerly": True}, {"jit_compile": False}, {"steps_per_execution": 2}]
)
@REPLICAS
def test_ways_to_run_give_the_same_numbers(replicas: int, arguments: dict[str, Any]) -> None:
    _assert_equal(_expected(), _numbers(_under(replicas, **arguments)))


@REPLICAS
def test_fewer_rows_than_replicas(replicas: int) -> None:
    plain, mirrored = _model(), _under(replicas)
    x, y, _ = _data()
    _assert_equal(plain.train_on_batch(x[:1], y[:1]), mirrored.train_on_batch(x[:1], y[:1]))
    _assert_equal(plain.predict_on_batch(x[:1]), mirrored.predict_on_batch(x[:1]))


@REPLICAS
def test_dropout_is_that_of_one_device(replicas: int) -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5)])
        model.compile("sgd", lambda y, y_pred: keras.ops.sum(y_pred * y, axis=-1), run_eagerly=False)
        return model

    # Every element has a different weight, so that the loss shows the dropped elements.
    weights = np.arange(40, dtype="float32").reshape(10, 4)
    x = np.ones((10, 4), "float32")
    losses = [model.train_on_batch(x, weights) for model in (make(), _under(replicas, make))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.kills("jax_buffer_not_copied")
@pytest.mark.parametrize("size", [16, 1 << 19])
def test_a_placed_batch_shares_no_memory_with_its_arrays(size: int) -> None:
    runtime = _mirrored(2).runtime
    memory = np.zeros(4 * size + 64, "uint8")
    start = -memory.ctypes.data % 64  # JAX shares only aligned memory
    array = memory[start : start + 4 * size].view("float32")
    placed = runtime.place([{"x": array, "text": np.array(["a"]), "none": None}, None])
    array[:] = 1
    assert float(placed[0]["x"].sum()) == 0 and placed[0]["x"].devices() == {runtime.local_devices[0]}
    assert placed[0]["text"] == ["a"] and placed[0]["none"] is None and placed[1] is None


@pytest.mark.kills("jax_devices_of_a_worker_share_its_memory")
def test_only_workers_with_one_device_sum_in_shared_memory() -> None:
    with mock.patch.object(Workers, "memory", "of another strategy", create=True):
        assert [_mirrored(number).runtime.memory for number in (1, 2)] == ["of another strategy", None]


def test_each_batch_is_divided_over_the_devices() -> None:
    """Each device does about a third of all multiplications."""
    strategy = _mirrored(3)
    runtime = strategy.runtime
    weights = runtime.place_state([jax.numpy.ones((64, 64))])[0]

    def flops(rows: int) -> float:
        batch = runtime.join_parts(split_batch(runtime, (np.ones((rows, 64), "float32"),)))
        step = jax.jit(lambda w, data: (runtime.divide(data)[0] @ w).sum(), out_shardings=runtime.replicated)
        return step.lower(weights, batch).compile().cost_analysis()["flops"]

    even, odd = flops(300), flops(301)
    assert even == pytest.approx(100 * 64 * 64 * 2, rel=0.2)
    assert odd == pytest.approx(101 * 64 * 64 * 2, rel=0.2)


@REPLICAS
def test_one_compilation_a_batch_shape(replicas: int) -> None:
    model = _under(replicas)
    x, y, _ = _data()
    traced = []
    original = model.train_step
    model.train_step = lambda state, data: traced.append(data[0].shape) or original(state, data)
    model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
    assert sorted(traced) == [(ROWS % BATCH, 6), (BATCH, 6)]


@pytest.mark.kills("jax_execution_of_batches_that_differ", "jax_execution_step_by_step")
@REPLICAS
def test_the_steps_of_an_execution_are_one_program(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _under(replicas, steps_per_execution=2)
    x, y, _ = _data()
    runs = []
    original = JaxSteps._run
    monkeypatch.setattr(
        JaxSteps, "_run", lambda self, *batches: runs.append(len(batches)) or original(self, *batches)
    )
    model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0)
    assert runs == [2, 2, 1]  # four full batches, and a shorter batch
    mixed = [(x[:BATCH], y[:BATCH]), (x[:BATCH], y[:BATCH].astype("float32"))]
    runs.clear()
    model.fit((batch for batch in mixed), verbose=0)
    assert runs == [1, 1]  # one program cannot run batches of different dtypes


@pytest.mark.kills("jax_convolutions_in_a_loop")
def test_convolutions_on_cpus_are_separate_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    with kdist.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential(
            [keras.Input((6, 1)), keras.layers.Conv1D(2, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", steps_per_execution=2)
    runs = []
    original = JaxSteps._run
    monkeypatch.setattr(
        JaxSteps, "_run", lambda self, *batches: runs.append(len(batches)) or original(self, *batches)
    )
    model.fit(np.ones((8, 6, 1), "float32"), np.ones((8, 1), "float32"), batch_size=2, verbose=0)
    assert runs == [1] * 4


@pytest.mark.kills("jax_logs_of_the_first_step_of_an_execution")
@REPLICAS
def test_the_logs_of_an_execution_are_the_logs_of_its_last_step(replicas: int) -> None:
    def logs_of(model: keras.Model) -> list[float]:
        losses: list[float] = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
        )
        x, y, _ = _data()
        model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, shuffle=False, callbacks=[note])
        return losses

    alone, together = logs_of(_under(replicas)), logs_of(_under(replicas, steps_per_execution=2))
    assert together == pytest.approx([alone[1], alone[3], alone[4]], rel=1e-5)


@REPLICAS
def test_callbacks_see_and_set_the_state(replicas: int) -> None:
    class Meddle(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen = self.model.get_weights()[0].copy()
            self.model.layers[0].kernel.assign(self.seen * 0.5)
            self.model.optimizer.learning_rate = 0.05 / (batch + 1)

    def run(model: keras.Model) -> Any:
        meddle = Meddle()
        x, y, _ = _data()
        keras.utils.set_random_seed(4)
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[meddle])
        return meddle.seen, model.get_weights()

    _assert_equal(run(_model()), run(_under(replicas)))


@REPLICAS
def test_a_callback_may_evaluate(replicas: int) -> None:
    x, y, _ = _data()
    results = []

    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            results.append(model.evaluate(x, y, batch_size=BATCH, verbose=0)[0])

    model = _under(replicas)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Evaluate()])
    assert len(set(results)) == len(results)
    assert results[-1] == pytest.approx(model.evaluate(x, y, batch_size=BATCH, verbose=0)[0])


@REPLICAS
def test_an_error_in_a_step_leaves_the_last_state(replicas: int) -> None:
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                raise OSError("disk full")

    x, y, _ = _data()
    model = _under(replicas)
    before = model.get_weights()
    with pytest.raises(OSError, match="disk full"):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Fails()])
    after = model.get_weights()
    assert not np.allclose(before[0], after[0])
    with pytest.raises(ValueError):
        model.train_on_batch(x[:, :5], y)
    _assert_equal(after, model.get_weights())
    model.fit(x, y, batch_size=BATCH, verbose=0)


@REPLICAS
def test_a_failed_execution_restores_the_values_of_the_last_sync(replicas: int) -> None:
    x, y, _ = _data()
    strategy = _mirrored(replicas)
    with strategy.scope():
        model = _model()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    before = model.get_weights()
    function = strategy.runtime.step_function(model, "train")
    with pytest.raises(RuntimeError, match="out of memory"), function:
        function([split_batch(strategy.runtime, (x, y))])
        good = function._compiled(False, False)

        def step(state: Any, data: Any) -> Any:
            good(state, data)  # consumes the buffers of the state
            raise RuntimeError("out of memory")

        function._compiled = lambda is_fused, is_loop: step
        function([split_batch(strategy.runtime, (x, y))])
    _assert_equal(before, model.get_weights())


@REPLICAS
def test_data_of_other_frameworks_and_structures(replicas: int) -> None:
    import torch

    x, y, _ = _data()
    expected = _under(replicas).train_on_batch(x, y)
    assert _under(replicas).train_on_batch(jax.numpy.asarray(x), jax.numpy.asarray(y)) == expected
    assert _under(replicas).train_on_batch(torch.tensor(x), torch.tensor(y)) == expected


@REPLICAS
def test_the_model_is_not_kept_alive(replicas: int) -> None:
    model = _under(replicas)
    _numbers(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@REPLICAS
def test_outputs_are_ordinary_arrays(replicas: int) -> None:
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(float(logs["loss"]) > 0)

    x, y, _ = _data()
    model = _under(replicas)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Look()])
    assert all(seen)
    assert all(len(v.value.sharding.device_set) == 1 for v in model.variables)


class _Taken(set[int]):
    """Simulates a layer's loss addresses from an earlier trace, when losses of other layers reuse them."""

    is_stale = True

    def __contains__(self, address: object) -> bool:
        return self.is_stale or super().__contains__(address)

    def clear(self) -> None:
        self.is_stale = False
        super().clear()


@pytest.mark.kills("jax_losses_known_by_old_addresses")
@pytest.mark.parametrize("eagerly", [False, True])
def test_a_layer_drops_no_losses_of_others(eagerly: bool) -> None:
    def make() -> keras.Model:
        layers, regularizer = keras.layers, keras.regularizers.L2(0.1)
        keras.utils.set_random_seed(3)
        dense = [layers.Dense(units, activity_regularizer=regularizer) for units in (5, 4, 1)]
        model = keras.Sequential([keras.Input((6,)), *dense])
        model.compile("sgd", "mse", run_eagerly=eagerly)
        return model

    x, y, _ = _data()
    expected = make().evaluate(x, y, batch_size=ROWS, verbose=0)
    model = _under(2, make)
    model.evaluate(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
    for layer in model.layers:
        vars(layer)["_loss_ids"] = _Taken()
    assert model.evaluate(x, y, batch_size=ROWS, verbose=0) == pytest.approx(expected, rel=1e-5)


@pytest.mark.kills("jax_drifts_over_many_steps", "jax_logs_off_by_a_ten_thousandth")
def test_many_steps_neither_hang_nor_drift() -> None:
    model = _under(3, by_hand.model)
    by_hand.fit(model, 100)
    found = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    np.testing.assert_allclose(found, by_hand.weights(100), rtol=1e-5)
    np.testing.assert_allclose(model.history.history["loss"], by_hand.losses(100), rtol=1e-5)


def test_one_device_strategy_uses_its_device() -> None:
    with kdist.OneDeviceStrategy("cpu:1").scope():
        model = _model()
    x, y, _ = _data()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert {device for v in model.variables for device in v.value.devices()} == {jax.devices("cpu")[1]}
