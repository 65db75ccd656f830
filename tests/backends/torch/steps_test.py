import gc
import threading
import weakref

import numpy as np
import pytest

import kdist
from tests.backends.where import in_worker

if in_worker:
    import keras
    import torch

    from kdist.backends.torch.replicas import TorchReplica
    from kdist.data.agreement import split_batch
    from tests.backends.torch.models import (
        ATOL,
        RTOL,
        TorchInside,
        Twice,
        assert_same_numbers,
        data,
        mirrored,
        train,
    )

REPLICAS = pytest.mark.parametrize("replicas", [1, 2, 3])


@REPLICAS
def test_a_step_with_two_optimizers(replicas):
    def make(_):
        model = Twice()
        model.compile()
        return model

    x, y = data()
    _, expected = train(None, make, x, y, shuffle=False)
    _, actual = train(mirrored(replicas), make, x, y, shuffle=False)
    assert_same_numbers(actual, expected)


@REPLICAS
def test_torch_modules_inside_a_model(replicas):
    def make(_):
        model = TorchInside()
        model.compile(keras.optimizers.Adam(0.05), "mse")
        return model

    x, y = data()
    _, expected = train(None, make, x, y)
    model, actual = train(mirrored(replicas), make, x, y)
    assert_same_numbers(actual, expected)
    assert set(model.modes) == {(True,) * 3, (False,) * 3}  # the mode that torch modules see
    assert isinstance(model.a.module, torch.nn.Linear)
    assert "zero_grad" not in vars(model)


@REPLICAS
@pytest.mark.parametrize("rows", [35, 33, 1])
def test_synchronized_batch_normalization_is_that_of_one_device(replicas, rows):
    def make(strategy):
        model = keras.Sequential(
            [
                keras.layers.Dense(6),
                keras.layers.BatchNormalization(momentum=0.7, synchronized=strategy),
                keras.layers.Activation("tanh"),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse", metrics=["mae"])
        return model

    # The last batch has 3 rows, or 1 row, which is fewer than two or three replicas.
    x, y = data(rows)
    _, expected = train(None, make, x, y)
    _, actual = train(mirrored(replicas), make, x, y)
    assert_same_numbers(actual, expected, atol=1e-5)  # plain Keras loses digits in few rows


@pytest.mark.kills("torch_moments_of_many_replicas_travel_apart")
def test_synchronized_batch_normalization_of_many_replicas_sends_no_more_for_each(monkeypatch):
    sizes = []
    original = TorchReplica.all_reduce_sum

    def all_reduce_sum(self, tensors):
        sizes.extend(tensor.numel() for tensor in tensors)
        return original(self, tensors)

    monkeypatch.setattr(TorchReplica, "all_reduce_sum", all_reduce_sum)

    def make(strategy):
        model = keras.Sequential(
            [
                keras.layers.Dense(6),
                keras.layers.BatchNormalization(momentum=0.7, synchronized=strategy),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    x, y = data(95)  # 17 replicas divide neither 40 nor 15 rows
    _, expected = train(None, make, x, y, batch_size=40)
    _, actual = train(mirrored(17), make, x, y, batch_size=40)
    assert_same_numbers(actual, expected, atol=1e-5)
    assert sizes
    assert max(sizes) == 6


@REPLICAS
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_the_user_s_data_are_not_written_to(replicas, kind):
    convert = {"array": np.array, "tensor": torch.tensor}[kind]
    # Keras multiplies sample weights with the mask in place.
    model_input = keras.Input((4,), dtype="int32")
    hidden = keras.layers.Embedding(5, 3, mask_zero=True)(model_input)
    with mirrored(replicas).scope():
        model = keras.Model(model_input, keras.layers.Dense(1)(hidden))
        model.compile("sgd", "mse")
    x, y, weights = convert([[1, 2, 0, 0]] * 4), convert([[[1.0]] * 4] * 4), convert([[2.0] * 4] * 4)
    model.train_on_batch(x, y, sample_weight=weights)
    assert (weights == 2).all()


def test_an_error_names_the_replica_and_leaves_the_model_usable():
    class Fails(keras.layers.Layer):
        def call(self, x):
            if self.fail and kdist.get_replica_context().replica_id_in_sync_group == 1:
                raise ZeroDivisionError("mine")
            return x

    with mirrored(3).scope():
        layer = Fails()
        layer.fail = False
        model = keras.Sequential([layer, keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    x, y = data()
    model.fit(x, y, verbose=0)
    layer.fail = True
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        model.fit(x, y, verbose=0)
    assert "Raised in replica 1 (cpu:1)." in caught.value.__notes__
    layer.fail = False
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"]).all()
    assert not kdist.has_strategy()


def test_a_step_that_branches_on_the_replica_is_an_error():
    class Branches(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)
            self.extra = keras.metrics.Mean()

        def call(self, x):
            return self.dense(x)

        def test_step(self, data):
            if kdist.get_replica_context().replica_id_in_sync_group == 0:
                self.extra.update_state([1.0, 2.0])
                self.extra.result()
            return {"loss": keras.ops.mean(self(data[0]))}

    with mirrored(2).scope():
        model = Branches()
        model.compile(loss="mse")
    with pytest.raises(kdist.errors.WorkerMismatchError, match="different collectives"):
        model.evaluate(*data(), verbose=0)


@REPLICAS
def test_values_that_are_set_between_steps_reach_every_replica(replicas):
    with mirrored(replicas).scope():
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    x, y = data()
    model.fit(x, y, verbose=0)
    kernel, bias = np.array(model.get_weights()[0]) * 3, np.array([1.0, -1.0], "float32")
    model.set_weights([kernel, bias])
    expected = ((x @ kernel + bias - y) ** 2).mean()
    assert model.evaluate(x, y, verbose=0) == pytest.approx(expected, rel=RTOL)
    np.testing.assert_allclose(model.predict(x, verbose=0), x @ kernel + bias, rtol=RTOL, atol=ATOL)


@pytest.mark.in_turn(4)
def test_a_model_and_its_threads_can_be_freed():
    before = threading.active_count()
    strategy = mirrored(3)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization()])
        model.compile("adam", "mse")
    x, y = data()
    model.fit(x, y, verbose=0, validation_data=(x, y))
    model.predict(x, verbose=0)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    del strategy
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("kdist replica"):
            thread.join(5.0)
    assert threading.active_count() <= before


@REPLICAS
def test_several_steps_an_execution_return_the_last_logs(replicas):
    def make(strategy):
        model = keras.Sequential([keras.layers.Dense(2)])
        # Plain Keras refuses steps_per_execution on PyTorch.
        model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=3 if strategy else 1)
        return model

    x, y = data(80)
    _, expected = train(None, make, x, y)
    _, actual = train(mirrored(replicas), make, x, y)
    assert_same_numbers(actual, expected)


@pytest.mark.kills("probe_calls_every_layer")
def test_replicas_draw_different_numbers_and_the_same_again():
    def draw():
        keras.utils.set_random_seed(1)
        with mirrored(2).scope():
            model = keras.Sequential([keras.layers.Dropout(0.5, seed=3)])
            model.compile("sgd", "mse")
        seen = []

        class Records(keras.layers.Layer):
            def call(self, x):
                seen.append(np.array(x))
                return x

        with mirrored(2).scope():
            model = keras.Sequential([keras.layers.Dropout(0.5, seed=3), Records(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((64, 20), "float32"), np.ones((64, 1)), batch_size=32, verbose=0)
        return [record for record in seen if record.shape[0] == 16]

    first, again = draw(), draw()
    assert len(first) == 4
    for i, record in enumerate(first):
        assert np.array_equal(record, again[i])
        assert not any(np.array_equal(record, other) for other in first[:i])


def test_seedless_draws_do_not_leave_variables_without_value():
    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x))

    with mirrored(2).scope():
        model = keras.Sequential([Noise(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    assert np.isfinite(model.fit(*data(), verbose=0).history["loss"]).all()


def test_leaves_that_are_not_tensors():
    class Takes(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)
            self.seen = []

        def call(self, x):
            return self.dense(x)

        def test_step(self, data):
            x, y = data
            self.seen.append((x["name"].tolist(), x["none"], tuple(x["x"].shape), x["x"].dtype))
            return {"loss": keras.ops.mean((self(x["x"]) - y) ** 2)}

    with mirrored(2).scope():
        model = Takes()
        model.compile(loss="mse")
        model.build((None, 5))
    x, y = data(3)
    from kdist import keras_hooks

    runtime = keras_hooks.strategy_of(model).runtime
    batch = ({"x": x.astype("float64"), "name": np.array(["a", "b", "c"]), "none": None}, y)
    runtime.step_function(model, "test")([split_batch(runtime, batch)])
    assert model.seen == [(["a", "b"], None, (2, 5), torch.float64), (["c"], None, (1, 5), torch.float64)]


@REPLICAS
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_predict_keeps_the_order_of_rows_whatever_their_number(replicas, rows):
    inputs = keras.Input((5,))
    with mirrored(replicas).scope():
        outputs = {"a": keras.layers.Dense(3)(inputs), "b": keras.ops.argmax(inputs, axis=-1)}
        model = keras.Model(inputs, outputs)
    x, _ = data(rows)
    found = model.predict_on_batch(x)
    np.testing.assert_allclose(found["a"], model(x).get("a").detach(), rtol=RTOL, atol=ATOL)
    assert np.array_equal(found["b"], x.argmax(-1))
