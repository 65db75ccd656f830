"""`fit`, `evaluate` and `predict` on two workers have the results of one device, and raise errors on both."""

from __future__ import annotations

import functools
import itertools
import threading

import numpy as np
import pytest

from tests.helpers.compare import assert_close
from tests.helpers.data import in_batches, loader, make_data, py_dataset
from tests.helpers.models import network, state_of
from tests.helpers.processes import each_backend, run, run_plain, scope, strategy

NUM_WORKERS = 2
# Errors arrive within 10 s; a machine that runs several such tests at once may take twice as long.
LIMIT = 20.0
EPOCHS = 2


def new_model(under_strategy=True):
    return network(4, 1, optimizer="adam", metrics=["mae"], seed=0, scope=scope(under_strategy))


# One model per process, for the tests that compare results: all of them share its compiled functions.
_models = {}


def same_model(under_strategy=True):
    """Returns a model as `new_model` makes it, with the same weights each time and a fresh optimizer."""
    if under_strategy not in _models:
        model = new_model(under_strategy)
        with scope(under_strategy):
            model.optimizer.build(model.trainable_variables)
        _models[under_strategy] = (model, state_of(model))
    model, start = _models[under_strategy]
    for variable, value in zip((*model.variables, *model.optimizer.variables), start, strict=True):
        variable.assign(value)
    return model


def on_one_device(batches, epochs=EPOCHS):
    """Returns the results of plain Keras on global batches, with one `train_on_batch` per batch."""
    model = same_model(False)
    history = model.fit(
        (batch for _ in range(epochs) for batch in batches),
        steps_per_epoch=len(batches),
        epochs=epochs,
        verbose=0,
    ).history
    evaluated = model.evaluate((batch for batch in batches), steps=len(batches), verbose=0)
    predicted = np.concatenate([model.predict_on_batch(batch[0]) for batch in batches])
    return {**history, "evaluate": evaluated, "predict": predicted, "weights": flat(model)}


def flat(model):
    return np.concatenate([w.ravel() for w in model.get_weights()])


def under_strategy(dataset, **fit):
    model = same_model()
    history = model.fit(dataset, epochs=EPOCHS, verbose=0, **fit).history
    steps = {"steps": fit["steps_per_epoch"]} if "steps_per_epoch" in fit else {}
    evaluated = model.evaluate(dataset, verbose=0, **steps)
    predicted = model.predict(dataset, verbose=0, **steps)
    return {**history, "evaluate": evaluated, "predict": predicted, "weights": flat(model)}


# Equal results ------------------------------------------------------------------------------------------------

# Batches that two workers can or cannot split evenly, also with a single row.
ODD_SIZES = (5, 8, 5, 1, 1)


def global_datasets(x, y, sizes, plain):
    batches = in_batches(x, y, sizes)

    def generator():
        yield from batches

    def tf_data():
        import tensorflow as tf

        kinds = (tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None, 1), tf.float32))
        return tf.data.Dataset.from_generator(generator, output_signature=kinds)

    ends = itertools.pairwise(np.cumsum([0, *sizes]))

    def grain():
        import grain

        return grain.MapDataset.source(range(len(batches))).map(lambda i: batches[i])

    return {
        "list": lambda: batches,
        "generator function": lambda: generator,
        # With several workers, Keras's own queue yields the first batch last, if Keras has looked at it.
        "PyDataset": lambda: py_dataset(batches, 1 if plain else 2),
        "tf.data": tf_data,
        "DataLoader": lambda: loader(x, y, batch_sampler=[list(range(a, b)) for a, b in ends]),
        "Grain": grain,
    }


def in_worker_fit_global_batches(kind, sizes, plain):
    dataset = global_datasets(*make_data(sum(sizes)), sizes, plain)[kind]()
    if plain:
        return under_strategy(dataset, shuffle=False)
    return under_strategy(strategy().experimental_distribute_dataset(dataset))


def in_worker_expected(sizes):
    return on_one_device(in_batches(*make_data(sum(sizes)), sizes))


@functools.cache
def expected_of(backend, function, *args):
    return run_plain(backend, function, *args)


@each_backend
@pytest.mark.parametrize(
    "kind", ["list", "generator function", "PyDataset", "tf.data", "DataLoader", "Grain"]
)
def test_global_batches(backend, kind):
    expected = expected_of(backend, in_worker_expected, ODD_SIZES)
    assert_close(
        run(backend, NUM_WORKERS, in_worker_fit_global_batches, kind, ODD_SIZES, False),
        [expected] * NUM_WORKERS,
    )


@each_backend
@pytest.mark.parametrize("kind", ["PyDataset", "tf.data", "DataLoader", "Grain"])
def test_plain_datasets_need_no_distributing(backend, kind):
    expected = expected_of(backend, in_worker_expected, ODD_SIZES)
    assert_close(
        run(backend, NUM_WORKERS, in_worker_fit_global_batches, kind, ODD_SIZES, True),
        [expected] * NUM_WORKERS,
    )


# Unequal lengths: worker 0 has batches of 3, 3 and 1 rows, worker 1 of 3 and 2, and five more steps of 2.
OWN_SIZES = ((3, 3, 1), (3, 2, 2, 2, 2, 2, 2))


def own_batches(worker):
    x, y = make_data(sum(map(sum, OWN_SIZES)))
    start = sum(OWN_SIZES[0]) * worker
    stop = start + sum(OWN_SIZES[worker])
    return in_batches(x[start:stop], y[start:stop], OWN_SIZES[worker])


def in_worker_expected_of_own():
    steps = []
    for t in range(max(map(len, OWN_SIZES))):
        parts = [own_batches(w)[t] for w in range(NUM_WORKERS) if t < len(OWN_SIZES[w])]
        steps.append(tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    return on_one_device(steps)


def in_worker_fit_own(as_loader):
    def dataset_fn(context):
        batches = own_batches(context.input_pipeline_id)
        if not as_loader:
            return batches
        import torch

        x, y = (torch.from_numpy(np.concatenate(part)) for part in zip(*batches, strict=True))
        starts = np.cumsum([0, *OWN_SIZES[context.input_pipeline_id]])
        indices = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
        rows = torch.utils.data.TensorDataset(x, y)
        return torch.utils.data.DataLoader(
            rows, batch_sampler=indices, num_workers=int(as_loader == "workers")
        )

    dataset = strategy().distribute_datasets_from_function(dataset_fn)
    assert len(dataset) == max(map(len, OWN_SIZES))
    return under_strategy(dataset)


@each_backend
@pytest.mark.parametrize("as_loader", ["", "loader"])
def test_pipelines_of_unequal_lengths_lose_no_row(backend, as_loader):
    expected = expected_of(backend, in_worker_expected_of_own)
    assert_close(run(backend, NUM_WORKERS, in_worker_fit_own, as_loader), [expected] * NUM_WORKERS)


def in_worker_fit_infinite():
    x, y = make_data(8)

    def dataset_fn(context):
        dataset = strategy().make_experimental_numpy_dataset((x, y)).repeat()
        part = dataset.batch(context.get_per_replica_batch_size(4))
        return part.skip(context.input_pipeline_id)  # rows 0 1, 2 3, … and 2 3, 4 5, …

    dataset = strategy().distribute_datasets_from_function(dataset_fn)
    with pytest.raises(ValueError, match="The dataset is infinite"):
        new_model().fit(dataset, verbose=0)
    import tensorflow as tf

    plain = tf.data.Dataset.from_tensors((x[:4], y[:4])).repeat()
    with pytest.raises(ValueError, match="The dataset is infinite"):
        new_model().fit(plain, verbose=0)
    with pytest.raises(ValueError, match="The dataset is infinite"):
        new_model().evaluate(plain, verbose=0)
    model = new_model()
    history = model.fit(dataset, epochs=EPOCHS, steps_per_epoch=3, verbose=0).history
    return {**history, "weights": flat(model)}


def in_worker_expected_of_infinite():
    x, y = make_data(8)
    rows = [[(2 * t + i) % 8 for i in range(4)] for t in range(3 * EPOCHS)]
    model = new_model(False)
    history = model.fit(((x[r], y[r]) for r in rows), steps_per_epoch=3, epochs=EPOCHS, verbose=0).history
    return {**history, "weights": flat(model)}


@each_backend
def test_a_dataset_without_end_goes_on_from_epoch_to_epoch(backend):
    expected = run_plain(backend, in_worker_expected_of_infinite)
    assert_close(run(backend, NUM_WORKERS, in_worker_fit_infinite), [expected] * NUM_WORKERS)


def generated():
    draw = np.random.RandomState(7)
    return [(draw.randn(4, 3).astype("float32"), draw.randn(4, 1).astype("float32")) for _ in range(100)]


def in_worker_fit_generator():
    taken = []

    def batches():
        for number, batch in enumerate(generated()):
            taken.append(number)
            yield batch

    generator = batches()
    model = new_model()
    model.fit(generator, steps_per_epoch=3, initial_epoch=2, epochs=4, verbose=0)
    read = len(taken)
    return flat(model), read, len(list(generator))


def in_worker_expected_of_generator():
    model = new_model(False)
    for batch in generated()[:6]:
        model.train_on_batch(*batch)
    return flat(model)


@pytest.mark.kills(
    data_first_batch_lost="[tensorflow]",
    data_too_much_read="[torch]",
    generator_read_for_past_epochs="[torch]",
)
@each_backend
def test_no_more_of_a_generator_is_read_than_the_epochs_need(backend):
    expected = run_plain(backend, in_worker_expected_of_generator)
    for weights, read, left in run(backend, NUM_WORKERS, in_worker_fit_generator):
        np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=2e-6)
        assert left == 100 - read, "the generator is open, and goes on where it was"
        # On TensorFlow, Keras reads a generator through tf.data, which prefetches some batches.
        assert read in (range(6, 25) if backend == "tensorflow" else [6])


# Errors -------------------------------------------------------------------------------------------------------


def in_worker_error(what):
    import time

    import kdist

    index = strategy().runtime.worker_index
    x, y = make_data(8)
    good = in_batches(x, y, (4, 4))

    def failing():
        yield good[0]
        if index == 1:
            raise OSError("disk gone")
        yield good[1]

    def distribute(mine):
        return strategy().distribute_datasets_from_function(lambda _: mine)

    datasets = {
        "raises in the middle": lambda: distribute(failing),
        "raises in the middle, global": lambda: strategy().experimental_distribute_dataset(failing),
        "not batched": lambda: distribute([np.float32(1), np.float32(2)]),
        "one not batched": lambda: distribute([np.float32(1)] if index else [np.ones(4, "float32")]),
        "parts differ": lambda: distribute([(x[:3], y[:2])] if index else good),
        "returns a number": lambda: distribute(3 if index else good),
        "returns an array": lambda: distribute(x if index else good),
        "no batch": lambda: distribute([]),
        "too few files": lambda: strategy().experimental_distribute_dataset(
            type("Files", (), {"files": ["one"], "__iter__": lambda self: iter(good)})(),
            kdist.InputOptions(auto_shard_policy=kdist.AutoShardPolicy.FILE),
        ),
        "differ in length": lambda: strategy().experimental_distribute_dataset(good[: 2 - index]),
    }
    model = new_model()
    began = time.monotonic()
    with pytest.raises((kdist.errors.KdistError, OSError)) as caught:
        model.fit(datasets[what](), verbose=0)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - began


ERRORS = {
    "raises in the middle": ["worker 1 failed in step 2", "OSError: disk gone"],
    "raises in the middle, global": ["worker 1 failed in step 2", "OSError: disk gone"],
    "not batched": ["is not batched", "dataset.batch(64)"],
    "one not batched": [
        "In step 1, the batches of worker 0 and worker 1 have different",
        "one element of 'float32'",
    ],
    "parts differ": ["worker 1 failed in step 1", "different numbers of rows"],
    "returns a number": ["type 'int' as a dataset", "a generator function or an iterable"],
    "returns an array": ["type 'ndarray' as a dataset", "make_experimental_numpy_dataset"],
    "no batch": ["contains no batches"],
    "too few files": ["has fewer files than workers", "AutoShardPolicy.DATA"],
    "differ in length": ["have different datasets", "step 2"],
}


@each_backend
@pytest.mark.parametrize("what", ERRORS)
def test_errors_reach_all_workers(backend, what):
    for _, message, seconds in run(backend, NUM_WORKERS, in_worker_error, what):
        for words in ERRORS[what]:
            assert words in message
        assert seconds < LIMIT


def in_worker_fit_outside():
    import keras

    import kdist

    dataset = strategy().experimental_distribute_dataset(in_batches(*make_data(8), (4, 4)))
    with pytest.raises(kdist.errors.StrategyScopeError, match="created outside the scope of a strategy"):
        new_model(False).fit(dataset, verbose=0)
    with pytest.raises(ValueError, match="`y` cannot be combined with a distributed dataset"):
        new_model().fit(dataset, np.ones(3), verbose=0)
    for layer in (keras.layers.Normalization(), keras.layers.IntegerLookup()):
        with pytest.raises(
            kdist.errors.DatasetError, match="each worker would adapt the layer to its own rows"
        ):
            layer.adapt(dataset)
    return [thread.name for thread in threading.enumerate() if thread.name == "kdist prefetch"]


@pytest.mark.kills(layers_adapt_to_the_rows_of_a_worker="[torch]")
@each_backend
def test_a_model_from_outside_and_no_thread_left(backend):
    assert run(backend, NUM_WORKERS, in_worker_fit_outside) == [[], []]
