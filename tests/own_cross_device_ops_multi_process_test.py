"""A custom `CrossDeviceOps` reduces gradients and values on every backend."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from tests.helpers.processes import BACKENDS, each_backend, run

X, Y = np.random.default_rng(4).normal(size=(2, 7, 3)).astype("float32")  # 7 rows: replicas have 4 and 3
RATE = 0.25


class Reversed(kdist.CrossDeviceOps):
    """Adds values from the last to the first, and records its calls."""

    def __init__(self):
        self.calls = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        values = per_replica_value.values
        self.calls.append((reduce_op.name, len(values), getattr(destinations, "name", destinations)))
        total = sum(reversed(values[:-1]), values[-1])
        return total / len(values) if reduce_op is kdist.ReduceOp.MEAN else total


class Doubled(kdist.ReductionToOneDevice):
    """Returns twice the correct result, so that the test can detect the call."""

    def reduce_implementation(self, *args):
        return 2 * super().reduce_implementation(*args)

    def broadcast_implementation(self, tensor, destinations):
        return 2 * tensor


def strategy_of(ops, devices=2):
    return kdist.MirroredStrategy([f"cpu:{i}" for i in range(devices)], cross_device_ops=ops)


def by_hand(factor, rows=(7, 7)):
    """Returns the weights of `y = x @ w` after one step of gradient descent per number of rows."""
    weights = np.ones((3, 3), "float32")
    for n in rows:
        weights = weights - RATE * factor * X[:n].T @ (2 * (X[:n] @ weights - Y[:n])) / Y.size
    return weights


def model_in(strategy):
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, use_bias=False, name="dense")])
        model.compile(keras.optimizers.SGD(RATE), "mse", metrics=["mae"])
        model.set_weights([np.ones((3, 3))])
    return model


def train():
    """Returns the weights after `fit` with each class, the logs, and the calls."""
    import keras

    found = {}
    for name, ops in {"reversed": Reversed(), "doubled": Doubled(), "none": None}.items():
        strategy = strategy_of(ops)
        model = model_in(strategy)
        try:
            logs = model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0).history
        except kdist.errors.InvalidArgumentError as error:
            if ops is None:
                raise
            model.evaluate(X, Y, batch_size=6, verbose=0)
            found[name] = str(error)
        else:
            assert model.evaluate(X, Y, batch_size=7, verbose=0)[0] < logs["loss"][-1]
            weight = keras.ops.convert_to_numpy(model.trainable_variables[0].value)
            found[name] = (weight, logs, getattr(ops, "calls", None))
    return found


@pytest.mark.in_turn(4)
@pytest.mark.kills(own_cross_device_ops_ignored="[torch]")
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "jax"], scope="module")
def test_fit_sums_gradients_by_it(backend):
    found = run(backend, 1, train)[0]
    for name, factor in {"reversed": 1, "doubled": 2, "none": 1}.items():
        np.testing.assert_allclose(found[name][0], by_hand(factor), rtol=1e-5, err_msg=name)
    assert found["reversed"][2] and set(found["reversed"][2]) == {("SUM", 2, "kernel")}
    # kdist itself reduces metrics. They use the weights before the step.
    error = np.abs(X.sum(1, keepdims=True) - Y).mean()
    for _, logs, _ in found.values():
        np.testing.assert_allclose(logs["mae"][0], error, rtol=1e-5)


def test_fit_on_jax_refuses_it():
    found = run("jax", 1, train)[0]
    for name in ("reversed", "doubled"):
        assert "strategy.run" in found[name] and name.capitalize() in found[name]
    np.testing.assert_allclose(found["none"][0], by_hand(1), rtol=1e-5)


def loop():
    """Returns the weights after two steps of a custom loop with each class: with an uneven and an even batch."""
    import keras

    found = {}
    for name, ops in {"reversed": Reversed(), "doubled": Doubled()}.items():
        strategy = strategy_of(ops)
        model = model_in(strategy)

        def step(x, y, model=model):
            def loss_of(x, y):
                return keras.ops.sum(keras.ops.square(model(x) - y)) / Y.size

            loss, gradients = kdist.value_and_grad(loss_of, model.trainable_variables)(x, y)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        function = kdist.function(lambda batch, step=step, strategy=strategy: strategy.run(step, args=batch))
        uneven, even = strategy.experimental_distribute_dataset([(X, Y), (X[:6], Y[:6])])
        total = strategy.reduce("SUM", strategy.run(step, args=uneven), axis=None)
        function(even)
        weight = keras.ops.convert_to_numpy(model.trainable_variables[0].value)
        found[name] = (weight, float(total), getattr(ops, "calls", None))
    return found


@each_backend
def test_loops_sum_gradients_by_it(backend):
    found = run(backend, 1, loop)[0]
    loss = np.square(X.sum(1, keepdims=True) - Y).mean()
    for name, factor in {"reversed": 1, "doubled": 2}.items():
        weight, total, _ = found[name]
        np.testing.assert_allclose(weight, by_hand(factor, (7, 6)), rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(total, factor * loss, rtol=1e-5, err_msg=name)
    assert {("SUM", 2, "kernel"), ("SUM", 2, "cpu:0")} == set(found["reversed"][2])


def reductions():
    """Returns the result of each reduction over replicas, and the calls of the class."""
    import keras

    ops, named = Doubled(), Reversed()
    strategy, other = strategy_of(ops), strategy_of(named)

    def values(*parts, of=strategy):
        return of.experimental_distribute_values_from_function(
            lambda context: keras.ops.convert_to_tensor(parts[context.replica_id_in_sync_group])
        )

    small = values(np.float32([1, 2]), np.float32([3, 5]))
    found = {
        "sum": strategy.reduce("SUM", small, axis=None),
        "mean": strategy.reduce("MEAN", small, axis=None),
        "mean of integers": strategy.reduce("mean", values(1, 2), axis=None),
        "sum of rows": strategy.reduce("SUM", small, axis=0),
        "mean of rows": strategy.reduce("MEAN", values(np.float32([1, 2, 6]), np.float32([7])), axis=0),
        "not distributed": strategy.reduce("MEAN", keras.ops.ones(2), axis=None),
        "structure": strategy.reduce("SUM", {"a": small, "b": None}, axis=None)["a"],
        "reduce_to": strategy.extended.reduce_to("SUM", small, destinations="cpu:1"),
        "batch_reduce_to": strategy.extended.batch_reduce_to("SUM", [(small, "cpu:0"), (small, "cpu:1")])[1],
        "broadcast_to": strategy.extended.broadcast_to(3.0, "cpu:0"),
    }
    pairs = [(values(1.0, 2.0, of=other), where) for where in ("first", "second")]
    other.extended.batch_reduce_to("MEAN", pairs)
    other.extended.reduce_to("SUM", pairs[0][0], "third")
    alone = strategy_of(Doubled(), devices=1)
    found["one device"] = alone.reduce("SUM", keras.ops.ones(()), axis=None)
    return {name: keras.ops.convert_to_numpy(value).tolist() for name, value in found.items()}, named.calls


@each_backend
def test_values_are_reduced_by_it(backend):
    found, calls = run(backend, 1, reductions)[0]
    assert found == {
        "sum": [8, 14],
        "mean": [4, 7],
        "mean of integers": 3,
        "sum of rows": 22,
        "mean of rows": 8,
        "not distributed": [1, 1],
        "structure": [8, 14],
        "reduce_to": [8, 14],
        "batch_reduce_to": [8, 14],
        "broadcast_to": 6,
        "one device": 1,
    }
    assert calls == [("MEAN", 2, "first"), ("MEAN", 2, "second"), ("SUM", 2, "third")]


def mistakes():
    """Returns the errors for classes that return wrong results."""
    import keras

    class Bare(kdist.CrossDeviceOps):
        pass

    class Nothing(kdist.CrossDeviceOps):
        def reduce(self, *args):
            return None

    class Long(kdist.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return keras.ops.concatenate(per_replica_value.values)

    class Few(Reversed):
        def batch_reduce_implementation(self, *args):
            return super().batch_reduce_implementation(*args)[1:]

    found = {}
    for kind in (Bare, Nothing, Long, Few):
        strategy = strategy_of(kind())
        value = strategy.experimental_distribute_values_from_function(lambda context: keras.ops.ones(2))
        try:
            strategy.extended.batch_reduce_to("SUM", [(value, None)])
        except (ValueError, NotImplementedError) as error:
            found[kind.__name__] = str(error)
    return found


@each_backend
def test_mistakes_of_it_are_told(backend):
    found = run(backend, 1, mistakes)[0]
    assert "does not define `reduce_implementation`" in found["Bare"]
    assert "Nothing" in found["Nothing"] and "result=None, shape=(2,)" in found["Nothing"]
    assert "Long" in found["Long"] and "result=(4,), shape=(2,)" in found["Long"]
    assert "Few.batch_reduce" in found["Few"] and "values=1, result=[]" in found["Few"]
