"""The probe of custom losses, layers and metrics adds up sums, and warns if they couple rows."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import numpy as np
import pytest

import kdist
from kdist.cluster import environment
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.models import add_loss_to
from tests.helpers.processes import BACKENDS, full_unless, run, run_plain, scope

ROWS = 13  # batches of 4: the last batch has fewer rows than replicas
SAYS = "different results with 2 replicas"

# Two replicas of one worker, and two workers. On JAX, which sees all rows, there is no probe.
_each_cell = pytest.mark.parametrize(
    ("backend", "num_workers"),
    [
        pytest.param(backend, number, marks=full_unless((backend, number) != ("jax", 2)))
        for backend in BACKENDS
        for number in (1, 2)
    ],
)


def each_cell(test: Any) -> Any:
    return pytest.mark.in_turn(3)(_each_cell(test))


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.RandomState(3)
    x = random.randn(ROWS, 3).astype("float32")
    return x, x[:, :1] * 2 - 1, random.rand(ROWS).astype("float32") + 0.5


@contextlib.contextmanager
def said() -> Any:
    """Collects the warnings of the probe."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(one.message) for one in caught if SAYS in str(one.message)]


def numbers(model: Any, *histories: Any) -> dict[str, Any]:
    logs = {f"{i} {name}": values for i, log in enumerate(histories) for name, values in log.items()}
    return logs | {weight.path: np.array(weight) for weight in model.weights}


def sums(under_strategy: bool) -> Any:
    """Trains with every kind of sum, each next to a mean; returns the results and the warnings."""
    import keras
    from keras import ops

    class Penalty(keras.layers.Layer):
        """A custom layer as in Keras's guide, and a mean."""

        def call(self, inputs: Any, training: bool = False) -> Any:
            self.add_loss([ops.mean(ops.square(inputs)), ops.sum(inputs) * 0.1])
            if training:
                self.add_loss(ops.square(inputs) * 0.01)  # Keras adds up its elements
                self.add_loss(ops.sum(ops.abs(self.weight)) + 0 * ops.sum(inputs))
            return inputs * self.weight

        def build(self, shape: Any) -> None:
            self.weight = self.add_weight((3,), "ones")

    class Summed(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            add_loss_to(self, ops.sum(ops.square(inputs)) * 0.01)
            return inputs

    class Folds(keras.layers.Layer):  # calls a layer with two rows per row of the batch
        def build(self, shape: Any) -> None:
            self.inner = Summed()

        def call(self, inputs: Any) -> Any:
            return ops.reshape(self.inner(ops.reshape(inputs, (-1, 2))), (-1, 4))

    class Weighted(keras.losses.Loss):
        def __call__(self, y: Any, predicted: Any, sample_weight: Any = None) -> Any:
            return ops.sum(ops.square(y - predicted)[:, 0] * sample_weight) * 0.05

    def summed(y: Any, predicted: Any) -> Any:
        return ops.sum(ops.abs(y - predicted)) * 0.1

    def mean(y: Any, predicted: Any) -> Any:
        return ops.mean(ops.square(y - predicted))

    def rows(y: Any, predicted: Any) -> Any:
        return ops.square(y - predicted)[:, 0]

    with scope(under_strategy):
        keras.utils.set_random_seed(7)
        x = keras.Input((3,))
        hidden = Penalty()(x)
        hidden = keras.layers.Dense(4, "tanh", activity_regularizer=lambda h: ops.sum(ops.square(h)))(hidden)
        hidden = Folds()(keras.layers.Dropout(0.0)(hidden))
        heads = {name: keras.layers.Dense(1, name=name)(hidden) for name in "abcde"}
        model = keras.Model(x, heads)
        model.compile(
            keras.optimizers.SGD(0.02),
            {
                "a": summed,
                "b": mean,
                "c": Weighted(),
                "d": rows,
                "e": keras.losses.MeanSquaredError(reduction="sum"),
            },
            loss_weights={"a": 0.7, "b": 1.0, "c": 1.0, "d": 1.0, "e": 0.1},
            metrics={"a": [summed, mean, rows, "mae"]},
        )
    values, y, weights = data()
    arrays = {"x": values, "y": dict.fromkeys("abcde", y), "sample_weight": dict.fromkeys("abcde", weights)}
    options = {**arrays, "batch_size": 4, "verbose": 0}
    with said() as warned:
        history = model.fit(**options, validation_data=tuple(arrays.values()), epochs=2).history
        logs = model.evaluate(**options, return_dict=True)
    return numbers(model, history, logs), warned


@functools.cache
def one_device(backend: str) -> Any:
    return run_plain(backend, sums, False)[0]


@pytest.mark.kills(
    add_loss_in_a_helper_not_found="[torch-1]",
    sum_of_few_rows_counted_by_all="[torch-1]",
    sums_of_folded_rows_are_means="[torch-1]",
    sums_of_layers_are_means="[torch-1]",
    sums_of_layers_in_another_order="[torch-1]",
    sums_of_losses_are_means="[torch-1]",
    sums_of_metrics_are_means="[torch-1]",
    sums_of_validation_count_in_training="[torch-1]",
)
@each_cell
def test_sums_over_the_rows_are_added_up_and_means_stay_means(backend, num_workers):
    expected = one_device(backend)
    for found, warned in run(backend, num_workers, sums, True):
        assert not warned
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def seen_by_one_worker(under_strategy: bool) -> Any:
    """Trains with a sum that is 0 for the second worker's part of the first batch; returns the weights."""
    import keras
    from keras import ops

    def summed(y: Any, predicted: Any) -> Any:
        return ops.sum(ops.square((y - predicted) * ops.cast(y != 0, "float32"))) * 0.1

    with scope(under_strategy):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), summed)
    x, y, _ = data()
    y[2:4] = 0
    history = model.fit(((x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)), verbose=0).history
    return [*history["loss"], *map(np.array, model.weights)]


@pytest.mark.kills(probe_tells_nobody="[torch]")
@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.full), "torch"])
def test_all_workers_come_to_the_same_verdict(backend):
    expected = run_plain(backend, seen_by_one_worker, False)
    assert_close(run(backend, 2, seen_by_one_worker, True), [expected] * 2, atol=0)


def of_one_row(under_strategy: bool) -> Any:
    """Trains with sums and a replaced `call`, on batches with one row, and with one row per replica."""
    import keras
    from keras import ops

    class Metric(keras.metrics.Mean):
        def __eq__(self, other: object) -> bool:  # makes it unhashable
            return self is other

    class Penalty(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(ops.sum(inputs) * 0.1)
            return inputs

    made: dict[str, Any] = {"ops": ops}
    exec("def summed(y, predicted): return ops.sum(ops.square(y - predicted)) * 0.1", made)
    called = []
    with scope(under_strategy):
        keras.utils.set_random_seed(5)
        penalty = Penalty()
        own = penalty.call
        penalty.call = lambda inputs: called.append(1) or own(inputs)
        model = keras.Sequential([keras.Input((3,)), penalty, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), made["summed"])
        metric = Metric()
        metric.update_state(2.0)
    x, y, _ = data()
    losses = [model.train_on_batch(x[:1], y[:1])]
    losses += model.fit(x[:12], y[:12], batch_size=2, verbose=0).history["loss"]
    number = len(called)
    model.compile(keras.optimizers.SGD(0.05), made["summed"])
    model.train_on_batch(x[:2], y[:2])
    assert len(called) > number
    return [*losses, float(metric.result()), *map(np.array, model.weights)]


@pytest.mark.in_turn(3)
@pytest.mark.kills(probe_takes_a_method_away="[torch-1]", sums_of_one_row_are_means="[torch-1]")
@pytest.mark.parametrize(("backend", "num_workers"), [("tensorflow", 1), ("torch", 1), ("torch", 2)])
def test_sums_are_found_out_where_a_replica_has_one_row(backend, num_workers):
    expected = run_plain(backend, of_one_row, False)
    for found in run(backend, num_workers, of_one_row, True):
        assert_close(found, expected, atol=0)


def coupled(probe: str | None, times: int = 2) -> Any:
    """Compiles and trains several times with functions that couple the rows; returns the warnings."""
    import keras
    from keras import ops

    class Balance(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(ops.max(inputs))
            return inputs

    class Repeats(keras.layers.Layer):  # calls a layer with one row more than the batch has
        def build(self, shape: Any) -> None:
            self.inner = Balance(name="uneven")

        def call(self, inputs: Any) -> Any:
            self.inner(ops.concatenate([inputs, inputs[:1]]))
            return inputs

    class Largest(keras.metrics.Metric):
        def __init__(self, name: str = "largest") -> None:
            super().__init__(name=name)
            self.most = self.add_variable((), "zeros")

        def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
            self.most.assign(ops.maximum(self.most, ops.max(ops.abs(predicted))))

        def result(self) -> Any:
            return self.most + 0.0

    class Model(keras.Sequential):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.attribute = Largest("attribute")

        def compute_loss(self, x: Any, y: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
            self.attribute.update_state(y, y_pred)
            return super().compute_loss(x, y, y_pred, *args, **kwargs) + ops.sum(y_pred)

    def contrast(y: Any, predicted: Any) -> Any:
        return ops.mean(ops.abs(predicted - ops.transpose(predicted)))

    def product(y: Any, predicted: Any) -> Any:
        return ops.prod(1 + predicted)

    with scope(True):
        model = Model(
            [keras.Input((3,)), Balance(name="balance"), Repeats(), keras.layers.Dense(1)], name="own"
        )
        model.compile("sgd", contrast, metrics=[Largest(), product, "mae"])
    x, y, _ = data()
    with environment.patched(KDIST_PROBE=probe), said() as warned:
        for _ in range(times):
            model.fit(x, y, batch_size=8, verbose=0)
        model.evaluate(x, y, batch_size=8, verbose=0)
    return warned


@pytest.mark.kills(
    coupled_rows_not_told="[torch-1]",
    coupled_rows_told_again="[torch-1]",
    coupled_rows_told_by_all="[torch-2]",
    metrics_of_attributes_not_probed="[torch-1]",
    probe_failure_not_reported="[torch-1]",
)
@each_cell
def test_what_couples_the_rows_is_warned_of_once_by_name(backend, num_workers):
    first, *others = run(backend, num_workers, coupled, None)
    assert others == [[]] * (num_workers - 1)  # only the chief warns
    begin = [warning.partition(f" gives {SAYS}")[0].partition(f" give {SAYS}")[0] for warning in first]
    named = [
        "The loss `contrast`",
        "The metric `attribute`",
        "The metric `largest`",
        "The metric `product`",
        "`add_loss` of layer `balance`",
        "`add_loss` of layer `uneven` may",
        "`compute_loss` of model `own`",
    ]
    assert sorted(begin) == ([] if backend == "jax" else named)  # JAX sees all rows
    assert all("KDIST_PROBE=0" in warning and "KERAS_BACKEND=jax" in warning for warning in first)


def unwritten(probe: str | None) -> Any:
    """Trains with statistics, random numbers and counters; returns the results and a layer's calls."""
    import keras
    from keras import ops

    class Noisy(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(4)
            self.steps = self.add_weight((), "zeros", trainable=False, name="steps")

        def call(self, inputs: Any) -> Any:
            self.steps.assign_add(1)
            noise = keras.random.normal(ops.shape(inputs), seed=self.seeds)
            self.add_loss(ops.sum(ops.square(noise)))  # random, so the probe cannot decide
            return inputs + 0.1 * noise

    def own(y: Any, predicted: Any) -> Any:
        return ops.mean(ops.square(y - predicted)) + 0.1 * ops.mean(ops.abs(predicted))

    with scope(True):
        keras.utils.set_random_seed(11)
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                Noisy(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05), own, metrics=[own, "mae"])
    x, y, _ = data()
    with environment.patched(KDIST_PROBE=probe), said() as warned:
        keras.utils.set_random_seed(12)
        history = model.fit(x, y, batch_size=6, epochs=2, verbose=0).history
    drawn = [np.random.rand(), np.array(keras.random.normal((2,)))]
    variables = [
        np.array(v) for v in [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    ]
    return history, [*drawn, *variables], warned


@pytest.mark.in_turn(4)
@pytest.mark.kills("probe_draws_random_numbers", "probe_writes_variables")
@pytest.mark.parametrize(("backend", "num_workers"), [("tensorflow", 1), ("torch", 2)])
def test_nothing_is_written_and_no_random_number_drawn(backend, num_workers):
    for (history, state, warned), (without, expected, _) in zip(
        run(backend, num_workers, unwritten, None), run(backend, num_workers, unwritten, "0"), strict=True
    ):
        assert not warned
        assert history == without
        assert_equal(state, expected)


@pytest.mark.kills(probe_not_left_out="[torch]")
@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.full), "torch"])
def test_the_environment_leaves_it_out(backend):
    assert run(backend, 1, coupled, "0", 1) == [[]]


def seeded_after_a_probe(folder: str) -> Any:
    """Counts the visits of `fit` to each row of seeded datasets, made before and after a probe and a checkpoint."""
    import keras
    import tensorflow as tf
    from tensorflow.python.eager import context

    context.context()._seed = None  # as in a process without a seed

    class Sum(keras.losses.Loss):
        def call(self, y: Any, predicted: Any) -> Any:
            return -predicted

    counts = []
    for _ in range(2):
        dataset = tf.data.Dataset.range(ROWS).shuffle(ROWS, seed=5).batch(4).map(lambda rows: (rows, rows))
        with scope(True):
            layers = [keras.Input((1,)), keras.layers.Embedding(ROWS, 1, "zeros"), keras.layers.Flatten()]
            model = keras.Sequential(layers)
            # A step adds 1 to the weight of each of its rows.
            model.compile(keras.optimizers.SGD(1.0), Sum(reduction="sum"))
        model.fit(dataset, epochs=2, verbose=0)
        counts.append(model.get_weights()[0].ravel().tolist())
        kdist.Checkpoint(model=model).save(folder + "/saved")  # reads the random states
    return counts


@pytest.mark.kills("shuffles_seeded_by_a_checkpoint")
def test_a_probe_and_a_checkpoint_leave_the_workers_shuffles_alike(tmp_path):
    for counts in run("tensorflow", 2, seeded_after_a_probe, str(tmp_path)):
        np.testing.assert_allclose(counts, np.full((2, ROWS), 2.0), rtol=1e-6)
