"""`kdist.value_and_grad` and `kdist.function` inside and outside of `run`, and the compilations of JAX."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from tests.helpers.processes import each_backend, run, strategy
from tests.loops.clusters import each_cluster, each_cluster_of, number_of, numpy_of, on_workers, per_replica

# value_and_grad ---------------------------------------------------------------------------------------------


def in_worker_value_and_grad():
    import keras

    ops = keras.ops
    v = keras.Variable(np.array([1, 2], "float32"))
    w = keras.Variable(np.float32(3))
    unused = keras.Variable(np.ones(3, "float32"))
    frozen = keras.Variable(np.float32(1), trainable=False)
    counter = keras.Variable(0, dtype="int32", trainable=False)
    layer = keras.layers.BatchNormalization(momentum=0.5, epsilon=0.0)
    layer.build((None, 2))
    dropout = keras.layers.Dropout(0.5, seed=1)

    def loss_fn(x, *, factor):
        counter.assign_add(1)
        return ops.sum(ops.square(v * x)) * w * factor * frozen

    def with_aux(x):
        y = layer(x, training=True)
        mask = dropout(ops.ones((1, 64)), training=True)
        return ops.sum(y * v), {"y": y, "text": "aux", "none": None, "mask": mask}

    def train():
        loss, (of_v, of_w, of_unused, of_frozen) = kdist.value_and_grad(loss_fn, [v, w, unused, frozen])(
            np.array([3, 4], "float32"), factor=2.0
        )
        (aux_loss, aux), (of_gamma, aux_of_v) = kdist.value_and_grad(
            with_aux, [layer.gamma, v], has_aux=True
        )(np.array([[1, 2], [3, 8]], "float32"))
        return [loss, of_v, of_w, of_unused, aux_loss, aux, of_gamma, aux_of_v, of_frozen]

    found = numpy_of(train())
    masks = [found[5]["mask"]]
    compiled = numpy_of(kdist.function(lambda: train()[:5])())
    masks.append(numpy_of(with_aux(np.array([[1, 2], [3, 8]], "float32"))[1]["mask"]))
    state = numpy_of([counter.value, layer.moving_mean.value, layer.moving_variance.value])
    return found, compiled, state, masks


@each_backend
def test_value_and_grad_outside_of_run(backend):
    found, compiled, (counter, mean, variance), masks = run(backend, 1, in_worker_value_and_grad)[0]
    loss, of_v, of_w, of_unused, aux_loss, aux, of_gamma, aux_of_v, of_frozen = found
    # 6 ((3 v_0)² + (4 v_1)²) at v = (1, 2)
    assert loss == 6 * (9 + 64)
    np.testing.assert_allclose(of_v, [6 * 2 * 9, 6 * 2 * 16 * 2])
    assert of_w == 2 * (9 + 64)
    assert of_frozen == loss
    if backend == "jax":
        np.testing.assert_array_equal(of_unused, np.zeros(3))
    else:
        assert of_unused is None
    # Columns (1, 3) and (2, 8) normalize to (-1, 1).
    assert aux_loss == 0 and aux["text"] == "aux" and aux["none"] is None
    np.testing.assert_allclose(aux["y"], [[-1, -1], [1, 1]], rtol=1e-6)
    np.testing.assert_allclose(of_gamma, [0, 0], atol=1e-6)
    np.testing.assert_allclose(aux_of_v, [0, 0], atol=1e-6)
    np.testing.assert_allclose(compiled[0], loss)
    np.testing.assert_allclose(compiled[1], of_v)
    # All writes are kept: the layer ran three times, and the counting function ran twice.
    assert counter == 2
    np.testing.assert_allclose(mean, np.array([2, 5]) * (1 - 0.5**3), rtol=1e-6)
    np.testing.assert_allclose(variance, 0.5**3 + np.array([1, 9]) * (1 - 0.5**3), rtol=1e-6)
    assert not np.array_equal(*masks), "seeds go on"


def in_worker_gradients_of_gradients(num_replicas):
    import keras

    ops = keras.ops
    s = strategy(num_replicas)
    with s.scope():
        v = keras.Variable(np.float32(3))
        w = keras.Variable(np.array([1, 2], "float32"))

    def step(x):
        def penalized():
            def loss_fn():
                return x * v**3 + ops.sum(w) * v, 2 * v

            (loss, aux), (of_v,) = kdist.value_and_grad(loss_fn, [v], has_aux=True)()
            return loss + of_v**2 + aux

        loss, gradients = kdist.value_and_grad(penalized, [v, w])()
        return [loss, *gradients]

    found = s.run(step, args=(per_replica(s, lambda i: np.float32(i + 1)),))
    return [[numpy_of(part) for part in s.experimental_local_results(value)] for value in found]


@pytest.mark.kills(torch_inner_gradients_are_constants="[torch]")
@each_backend
def test_gradients_of_gradients(backend):
    loss, of_v, of_w = run(backend, 1, in_worker_gradients_of_gradients, 2)[0]
    x = np.array([1, 2])
    inner = 3 * x * 9 + 3  # the gradient of x v³ + (w_0 + w_1) v at v = 3 and w = (1, 2)
    np.testing.assert_allclose(loss, x * 27 + 9 + inner**2 + 6)
    np.testing.assert_allclose(of_v, inner + 2 * inner * 6 * x * 3 + 2)
    np.testing.assert_allclose(of_w, np.stack([3 + 2 * inner] * 2, axis=1))


def in_worker_wrong_losses(num_replicas):
    import keras

    ops = keras.ops
    s = strategy(num_replicas)
    with s.scope():
        v = keras.Variable(np.ones(2, "float32"))
    wrong = kdist.errors.InvalidArgumentError

    def check(loss_fn, match, **options):
        for call in (lambda f: f(), s.run):
            with pytest.raises(wrong, match=match):
                call(lambda: kdist.value_and_grad(loss_fn, [v], **options)())

    check(lambda: v * 2, "floating-point scalar")
    check(lambda: ops.cast(ops.sum(v), "int32"), "floating-point scalar")
    check(lambda: 1.0, "floating-point scalar")
    check(lambda: None, "floating-point scalar")
    check(lambda: (ops.sum(v), 1), "floating-point scalar")
    check(lambda: ops.sum(v), "pair", has_aux=True)
    check(lambda: (ops.sum(v), 1, 2), "pair", has_aux=True)
    for variables in ([np.ones(2)], [None], "v"):
        with pytest.raises(wrong, match="Keras variables"):
            kdist.value_and_grad(lambda: ops.sum(v), variables)
    return True


@each_backend
def test_a_loss_is_one_number(backend):
    assert run(backend, 1, in_worker_wrong_losses, 2)[0]


def in_worker_exceptions_in_losses(num_replicas):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        v = keras.Variable(np.ones(2, "float32"))

    def loss_fn():
        raise LookupError("no loss")

    def step():
        return kdist.value_and_grad(loss_fn, [v])()

    for call in (step, kdist.function(step), lambda: s.run(step), kdist.function(lambda: s.run(step))):
        with pytest.raises(LookupError, match="no loss"):
            call()
    return float(kdist.value_and_grad(lambda: keras.ops.sum(v), [v])()[0])


@each_backend
def test_exceptions_in_losses_come_out(backend):
    assert run(backend, 1, in_worker_exceptions_in_losses, 2) == [2.0]


# function ---------------------------------------------------------------------------------------------------

JIT = {
    "tensorflow": {"jit_compile": True},
    "jax": {"jit_compile": True},
    "torch": {"jit_compile": True, "backend": "eager"},  # Inductor needs a C++ compiler, and half a minute
}


def in_worker_function(options):
    import keras

    v = keras.Variable(np.float32(1), trainable=False)
    calls = []

    def fn(x, number, *, more):
        calls.append(number)
        v.assign_add(keras.ops.sum(x))
        return {"x": x * v * number, "more": [more["a"] + 1, None], "text": "text"}

    @kdist.function(**options)
    def decorated(x):
        return x * 3

    class Scaler:
        def __init__(self, factor):
            self.factor = factor

        @kdist.function
        def scale(self, x):
            return x * self.factor

    compiled = kdist.function(fn)
    x = np.array([1, 2], "float32")
    first = numpy_of(compiled(x, 2, more={"a": np.int32(5)}))
    second = numpy_of(compiled(x, 2, more={"a": np.int32(6)}))
    before = len(calls)
    again = numpy_of(compiled(x, 2, more={"a": np.int32(6)}))
    traced = [before, len(calls) - before]
    third = numpy_of(compiled(x, 10, more={"a": np.int32(6)}))
    v.assign(0.0)
    fourth = numpy_of(compiled(x, 2, more={"a": np.int32(6)}))
    assert kdist.function(fn).__name__ == "fn" or keras.backend.backend() == "tensorflow"
    with pytest.raises(kdist.errors.InvalidArgumentError, match="`fn` is not a function"):
        kdist.function(3)
    scaled = [numpy_of(Scaler(factor).scale(x)) for factor in (2.0, 5.0)]
    return [first, second, again, third, fourth], float(v.value), traced, numpy_of(decorated(x)), scaled


@each_backend
def test_a_function_is_compiled_with_its_variables(backend):
    results, v, traced, jitted, scaled = run(backend, 1, in_worker_function, JIT[backend])[0]
    # The function adds 3 to v before it uses v: v is 4, 7, 10, 13, and 3 after a reset to 0.
    factors = (4 * 2, 7 * 2, 10 * 2, 13 * 10, 3 * 2)
    for result, factor, more in zip(results, factors, (6, 7, 7, 7, 7), strict=True):
        np.testing.assert_allclose(result["x"], [factor, 2 * factor])
        assert result["more"][0] == more and result["more"][1] is None
    assert v == 3
    # JAX compiles in the second call, and traces twice in it; PyTorch runs the function as it is.
    assert traced == {"tensorflow": [1, 0], "jax": [3, 0], "torch": [2, 1]}[backend]
    np.testing.assert_allclose(jitted, [3, 6])
    np.testing.assert_allclose(scaled, [[2, 4], [5, 10]])


def kdist_function(fn):
    return kdist.function(fn)


def tf_function(fn):
    import tensorflow as tf

    return tf.function(fn)


def in_worker_function_in_run(num_replicas, function):
    import keras

    s = strategy(num_replicas)
    calls = []
    with s.scope():
        v = keras.Variable(np.float32(1), trainable=False, aggregation="sum")

    @function
    def inner(x):
        calls.append(x)
        v.assign_add(x)
        return kdist.get_replica_context().all_reduce("SUM", x * 2)

    x = per_replica(s, lambda i: np.float32(i + 1))
    totals = [s.reduce("SUM", s.run(inner, args=(x,)), axis=None) for _ in range(4)]
    if keras.backend.backend() == "tensorflow":  # TensorFlow traces a function twice
        assert len(calls) <= 2 * len(s.runtime.devices)

    @function
    def outer(x):
        return s.reduce("MEAN", s.run(inner, args=(x,)), axis=None)

    return [float(t) for t in (*totals, outer(x), outer(x))], number_of(v)


@each_cluster
def test_a_function_may_be_called_in_a_replica(backend, num_workers, num_replicas):
    check_function_in_run(backend, num_workers, num_replicas, kdist_function)


@each_cluster_of("tensorflow")
def test_a_tf_function_may_be_called_in_a_replica(backend, num_workers, num_replicas):
    check_function_in_run(backend, num_workers, num_replicas, tf_function)


def check_function_in_run(backend, num_workers, num_replicas, function):
    total = sum(range(1, num_replicas + 1))
    for totals, v in on_workers(backend, num_workers, num_replicas, in_worker_function_in_run, function):
        assert totals == [2 * total * num_replicas] * 4 + [2 * total] * 2
        assert v == 1 + 6 * total


# How often JAX compiles -------------------------------------------------------------------------------------


def in_worker_traces(num_replicas):
    import functools

    s = strategy(num_replicas)
    traces = []

    class Trainer:
        def __init__(self):
            self.factor = np.float32(2)

        def step(self, x, scale):
            traces.append("method")
            return x * self.factor * scale

    trainer = Trainer()

    def call(x):
        def step(x):  # a new function in every call
            traces.append("local")
            return x * 2

        def with_number(number, x):
            traces.append("partial")
            return x * number

        results = [
            s.run(step, args=(x,)),
            s.run(lambda x: helper(step, x), args=(x,)),
            s.run(functools.partial(with_number, 2), args=(x,)),
            s.run(trainer.step, args=(x,), kwargs={"scale": 1.0}),
        ]
        return [float(s.reduce("SUM", result, axis=0)) for result in results]

    def helper(step, x):
        return step(x)

    found = []
    counts = []
    for i in range(4):
        found.append(call(per_replica(s, lambda r, i=i: np.full(2, r + i, "float32"))))
        counts.append(len(traces))
    call(per_replica(s, lambda r: np.ones(3, "float32")))
    counts.append(len(traces))
    call(per_replica(s, lambda r: np.ones(2, "float32")))
    counts.append(len(traces))
    return found, counts


@each_cluster_of("jax")
def test_a_step_that_is_defined_anew_is_not_compiled_anew(backend, num_workers, num_replicas):
    for found, counts in on_workers(backend, num_workers, num_replicas, in_worker_traces):
        for i, totals in enumerate(found):
            assert totals == [2 * 2 * (sum(range(num_replicas)) + i * num_replicas)] * 4
        assert counts[0] == counts[1] == counts[2] == counts[3]
        assert counts[4] == 2 * counts[0], "another shape is another program"
        assert counts[5] == counts[4], "and the first one is still there"


def in_worker_closures(num_replicas):
    """Changes the closure of a function between calls; a program for an old value must not run."""
    import keras

    s = strategy(num_replicas)
    with s.scope():
        variables = [keras.Variable(np.float32(i), trainable=False) for i in range(3)]
    x = per_replica(s, lambda i: np.float32(1))

    def call(number, text, variable, nested):
        def inner():
            return nested + number

        def step(x, default=number):
            return x * inner() + default * 100 + len(text) * 1000 + variable.value

        return float(s.reduce("MEAN", s.run(step, args=(x,)), axis=None))

    return [
        call(1, "a", variables[0], 0),
        call(2, "a", variables[0], 0),
        call(1, "ab", variables[0], 0),
        call(1, "a", variables[2], 0),
        call(1, "a", variables[0], 7),
        call(1.5, "a", variables[0], 0),
        call(1, "a", variables[0], 0),
    ]


@each_cluster
def test_a_function_sees_what_it_closes_over(backend, num_workers, num_replicas):
    for found in on_workers(backend, num_workers, num_replicas, in_worker_closures):
        np.testing.assert_allclose(found, [1101, 1202, 2101, 1103, 1108, 1151.5, 1101], rtol=1e-6)
