"""`fit` on two workers: it stops at the same step, only the chief prints, and histories and random numbers agree."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.helpers.compare import assert_all_equal, assert_close
from tests.helpers.data import make_data
from tests.helpers.models import network, weights_of
from tests.helpers.processes import each_backend, rank, run, run_plain, scope, strategy

# Functions named in_worker_… run in the workers of a pool, and return values that the tests compare.


make_model = functools.partial(network, 4, 1, rate=0.1)


# Stopping ----------------------------------------------------------------------------------------------------


def in_worker_stop(where, who):
    import keras

    seen = []

    class Stopper(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)
            if where == "batch" and rank() == who and len(seen) == 8:
                self.model.stop_training = True

        def on_epoch_end(self, epoch, logs=None):
            if where == "epoch" and rank() == who and epoch == 1:
                self.model.stop_training = True

    class OnlyEpochs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank() == who and epoch == 1:
                self.model.stop_training = True

    class EpochBegins(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if rank() == who and epoch == 1:
                self.model.stop_training = True

    def schedule(epoch, rate):  # Keras's callback needs no vote, as a thread or a signal handler has none
        if rank() == who and epoch == 1:
            model.stop_training = True
        return rate

    def by_lambda(batch, logs=None):
        if rank() == who and batch == 1:
            model.stop_training = True

    on_the_object = keras.callbacks.Callback()
    on_the_object.on_train_batch_end = by_lambda
    callbacks = {
        "batch": [Stopper()],
        "epoch": [Stopper()],
        "only epochs": [OnlyEpochs()],
        "epoch begin": [EpochBegins()],
        "no vote": [keras.callbacks.LearningRateScheduler(schedule), keras.callbacks.TerminateOnNaN()],
        "lambda": [keras.callbacks.LambdaCallback(on_train_batch_end=by_lambda)],
        "on the object": [on_the_object],
        "NaN": [keras.callbacks.TerminateOnNaN()] if rank() == who else [],
    }[where]
    model = make_model(scope=strategy().scope())
    x, y = make_data()
    if where == "NaN":
        y[8:] = np.nan
    history = model.fit(x, y, batch_size=4, epochs=5, shuffle=False, verbose=0, callbacks=callbacks)
    return (
        len(history.epoch),
        int(keras.ops.convert_to_numpy(model.optimizer.iterations)),
        seen,
        model.stop_training,
    )


@pytest.mark.kills(
    stop_by_a_function_on_the_object="[other-torch]",
    stop_on_one_worker="[other-torch]",
    stop_without_a_vote="[other-torch]",
    stop_at_nan_on_one_worker="[other-torch]",
    stop_before_the_first_batch="[chief-torch]",
)
@each_backend
@pytest.mark.parametrize("who", [0, 1], ids=["chief", "other"])
def test_stop_training_on_one_worker_stops_all_at_the_same_step(backend, who):
    # 24 rows in batches of 4 make six steps per epoch.
    expected = {
        "batch": (2, 8),
        "epoch": (2, 12),
        "only epochs": (2, 12),
        "epoch begin": (2, 7),
        "no vote": (2, 12),
        "lambda": (1, 2),
        "on the object": (1, 2),
        "NaN": (1, 3),
    }
    for where, (epochs, steps) in expected.items():
        results = run(backend, 2, in_worker_stop, where, who)
        assert [r[:2] for r in results] == [(epochs, steps)] * 2, where
        assert results[0][2] == results[1][2]
        assert [r[3] for r in results] == [True, True]


def in_worker_stop_evaluating(begins, who):
    """Returns the loss of `evaluate` and the number of predictions if one worker stops them."""
    import keras

    class Stopper(keras.callbacks.Callback):
        def stop(self, batch=1, logs=None):
            if rank() == who and batch == 1:
                self.model.stop_evaluating = self.model.stop_predicting = True

    if begins:
        Stopper.on_test_begin = Stopper.on_predict_begin = lambda self, logs=None: self.stop()
    else:
        Stopper.on_test_batch_end = Stopper.on_predict_batch_end = Stopper.stop
    x = np.zeros((24, 3), "float32")
    model = make_model(scope=strategy().scope())
    y = np.arange(24, dtype="float32")[:, None] // 4
    options = {"batch_size": 4, "verbose": 0, "callbacks": [Stopper()]}
    loss = model.evaluate(x, y, **options)
    validation = model.fit(x, y, validation_data=(x, y), **options).history["val_loss"]
    return loss, len(model.predict(x, **options)), len(validation)


@pytest.mark.kills(stop_evaluating_on_one_worker="[1-False-torch]")
@each_backend
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("who", [0, 1])
def test_stop_evaluating_on_one_worker_stops_all_at_the_same_step(backend, begins, who):
    first, second = run(backend, 2, in_worker_stop_evaluating, begins, who)
    assert first == second
    assert first == ((0.0, 4, 1) if begins else (0.5, 8, 1))


# Printing and histories --------------------------------------------------------------------------------------


def in_worker_print():
    import contextlib
    import io

    printed = io.StringIO()
    x, y = make_data()
    model = make_model(scope=strategy().scope(), metrics=["mae"])
    with contextlib.redirect_stdout(printed):
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=2, validation_data=(x, y))
        model.fit(x, y, batch_size=8, verbose=1)
        model.evaluate(x, y, verbose=2)
        model.predict(x, verbose=1)
    return printed.getvalue(), {name: np.asarray(values) for name, values in history.history.items()}


@pytest.mark.kills(all_workers_print="[torch]")
@each_backend
def test_only_the_chief_prints_and_all_have_its_history(backend):
    (chief, history), (other, same) = run(backend, 2, in_worker_print)
    assert "Epoch 1/2" in chief and "val_loss" in chief and other == ""
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
    assert_all_equal([history, same])


# Random numbers ----------------------------------------------------------------------------------------------


def in_worker_unseeded():
    """Trains with different seeds on each worker: kdist must share the chief's weights and order of rows."""
    import random

    import keras

    random.seed(100 + rank())
    np.random.seed(100 + rank())
    keras.utils.set_random_seed(100 + rank())
    model = make_model(scope=strategy().scope())
    before = weights_of(model)
    x = np.arange(24, dtype="float32").reshape(8, 3) / 24
    seen = []

    class Rows(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(logs["loss"]))

    # The loss of the first batch depends on its rows.
    history = model.fit(x, x[:, :1] * 3, batch_size=2, epochs=3, verbose=0, callbacks=[Rows()])
    return before, weights_of(model), history.history, seen


def one_device_losses(initial):
    """Returns the loss of the first batch for each possible pair of rows, with given weights."""
    model = make_model()
    model.set_weights(initial)
    x = np.arange(24, dtype="float32").reshape(8, 3) / 24
    pairs = [(i, j) for i in range(8) for j in range(i)]
    return [float(model.test_on_batch(x[list(p)], x[list(p)][:, :1] * 3)) for p in pairs]


@pytest.mark.kills(weights_of_the_chief_not_shared="[torch]")
@each_backend
def test_without_a_seed_the_chiefs_weights_and_order_count(backend):
    results = run(backend, 2, in_worker_unseeded)
    assert_all_equal([r[1] for r in results])
    assert_all_equal([r[2] for r in results])
    assert results[0][3] == results[1][3]
    possible = run_plain(backend, one_device_losses, results[0][0])
    assert min(abs(np.array(possible) / results[0][3][0] - 1)) < 1e-4, "training did not start from the chief"


def in_worker_permutation(batch_size, differ=False):
    """Returns the sum of the rows in each global batch. The model's loss is the mean of the targets."""
    import keras

    if differ:
        keras.utils.set_random_seed(100 + rank())
    with strategy().scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.0), lambda y, p: keras.ops.mean(y, axis=-1) + 0 * p[..., 0])
    sums = []

    class Sums(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.total = 0.0

        def on_train_batch_end(self, batch, logs=None):
            total = float(logs["loss"]) * (batch + 1)  # the log contains the mean over the epoch so far
            sums.append(round((total - self.total) * batch_size))
            self.total = total

    y = 2.0 ** np.arange(12)[:, None]
    model.fit(
        np.ones((12, 1), "float32"),
        y.astype("float32"),
        batch_size=batch_size,
        epochs=2,
        verbose=0,
        callbacks=[Sums()],
    )
    return sums


@each_backend
def test_shuffle_is_a_permutation_the_same_one_on_all_workers(backend):
    one, two = run(backend, 2, in_worker_permutation, 1)
    assert one == two
    orders = [one[:12], one[12:]]
    for order in orders:
        assert sorted(order) == [2**i for i in range(12)]
        assert order != sorted(order)
    # With a seed, Keras on TensorFlow repeats its order in each epoch, and the workers share a seed.
    assert (orders[0] != orders[1]) == (backend != "tensorflow")


@pytest.mark.kills(order_of_the_chief_not_shared="[torch]")
@each_backend
def test_workers_that_draw_other_numbers_have_one_order(backend):
    # Each worker trains one of two rows. If their orders differed, some rows would repeat and others be missing.
    one, two = run(backend, 2, in_worker_permutation, 2, True)
    assert one == two
    for order in (one[:6], one[6:]):
        assert sum(order) == 2**12 - 1 and all(total.bit_count() == 2 for total in order)


def in_worker_masks(seed):
    """Returns the dropout mask of each row in a global batch, and weights and losses of a model with dropout."""
    import keras

    keras.utils.set_random_seed(seed)

    class Masks(keras.Model):
        def __init__(self):
            super().__init__()
            self.drop = keras.layers.Dropout(0.5)

        def call(self, x, training=None):
            return self.drop(x, training=True)

    with strategy().scope():
        model = Masks()
        trained = network(8, keras.layers.Dropout(0.5), 1, optimizer="adam")
    masks = model.predict(np.ones((8, 64), "float32"), batch_size=8, verbose=0)
    history = trained.fit(*make_data(), batch_size=6, epochs=2, verbose=0)
    return masks > 0, weights_of(trained), history.history["loss"]


@pytest.mark.kills(seed_shared="[1-torch]")
@each_backend
@pytest.mark.parametrize("num_workers", [1, 2])
def test_replicas_draw_different_masks_and_the_same_seed_draws_them_again(backend, num_workers):
    first = run(backend, num_workers, in_worker_masks, 11)
    masks = first[0][0]
    assert len({mask.tobytes() for mask in masks}) == 8  # the first replica's four rows, and the second's
    assert not (masks[:4] == masks[4:]).all(axis=1).any()
    assert 0.3 < masks.mean() < 0.7
    for other in first[1:]:
        np.testing.assert_array_equal(other[0], masks)
        assert_all_equal([first[0][1], other[1]])
    again = run(backend, num_workers, in_worker_masks, 11)[0]
    np.testing.assert_array_equal(again[0], masks)
    assert_close(again[1], first[0][1], rtol=1e-6)
    assert first[0][2] == pytest.approx(again[2], rel=1e-6)
    assert (run(backend, num_workers, in_worker_masks, 12)[0][0] != masks).any()


# Continued training ------------------------------------------------------------------------------------------


def in_worker_continue(under_strategy):
    """Fits twice, then evaluates. The second fit has different data, a different batch size and validation data."""
    import keras

    model = make_model(seed=5, scope=scope(under_strategy), metrics=["mae"])
    x, y = make_data()
    first = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    x, y = make_data(17)
    second = model.fit(
        x, y, batch_size=6, epochs=4, initial_epoch=2, shuffle=False, verbose=0, validation_split=0.25
    )
    assert second.epoch == [2, 3]
    evaluated = np.asarray(model.evaluate(x, y, batch_size=7, verbose=0))
    return (
        {f"first {k}": v for k, v in first.history.items()}
        | {f"second {k}": v for k, v in second.history.items()}
        | {"evaluate": evaluated, "steps": int(keras.ops.convert_to_numpy(model.optimizer.iterations))}
    )


@each_backend
def test_a_second_fit_continues_with_data_of_another_length(backend):
    expected = run_plain(backend, in_worker_continue, False)
    assert_close(run(backend, 2, in_worker_continue, True), [expected] * 2)


def in_worker_lengths(under_strategy):
    """Trains with sequences of different lengths: the step is traced for each length."""
    import keras

    keras.utils.set_random_seed(5)
    with scope(under_strategy):
        model = keras.Sequential(
            [keras.layers.Input((None, 3)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    losses = []
    for length in (4, 6, 4):
        x = np.random.RandomState(length).randn(10, length, 3).astype("float32")
        losses += model.fit(x, x.sum(axis=(1, 2)), batch_size=4, shuffle=False, verbose=0).history["loss"]
    return {"losses": losses}


@each_backend
def test_fits_with_data_of_different_shapes(backend):
    expected = run_plain(backend, in_worker_lengths, False)
    assert_close(run(backend, 2, in_worker_lengths, True), [expected] * 2)


def in_worker_normalize_masked(under_strategy):
    import keras

    keras.utils.set_random_seed(0)
    words = np.random.RandomState(1).randint(1, 9, (22, 5))
    words[np.arange(5) > np.arange(22)[:, None] % 5] = 0  # the replicas have different numbers of words
    with scope(under_strategy):
        layers = [
            keras.layers.Embedding(9, 4, mask_zero=True),
            keras.layers.BatchNormalization(momentum=0.7, synchronized=under_strategy),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile("sgd", "mse")
    history = model.fit(words, words[:, :1] / 9, batch_size=8, verbose=0).history
    return {**history, "weights": weights_of(model)}


@pytest.mark.kills(masked_statistics_not_synchronized="[torch]")
@each_backend
def test_synchronized_statistics_cover_the_unmasked_values_of_all_replicas(backend):
    expected = run_plain(backend, in_worker_normalize_masked, False)
    assert_close(run(backend, 2, in_worker_normalize_masked, True), [expected] * 2)
