"""Dictionaries, strings, sparse and ragged tensors, and preprocessing layers in pipelines."""

from __future__ import annotations

import numpy as np
import pytest

from tests.data.fit_multi_process_test import NUM_WORKERS, flat
from tests.helpers.compare import assert_close
from tests.helpers.data import make_data
from tests.helpers.processes import each_backend, run, run_plain, scope, strategy


def in_worker_fit_dictionaries(under_strategy):
    import keras

    keras.utils.set_random_seed(0)
    x, y = make_data(11)
    weights = np.linspace(0, 1, 11, dtype="float32")
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")

    batches = [
        ({"a": x[i : i + 4], "b": x[i : i + 4] * 2}, {"out": y[i : i + 4]}, weights[i : i + 4])
        for i in (0, 4, 8)
    ]
    with scope(under_strategy):
        model = keras.Model({"a": a, "b": b}, {"out": keras.layers.Dense(1, name="out")(a + b)})
    generator = (batch for batch in batches)  # Keras does not accept a list of batches
    data = strategy().experimental_distribute_dataset(batches) if under_strategy else generator
    model.compile("sgd", "mse", weighted_metrics=["mae"])
    return {**model.fit(data, verbose=0).history, "weights": flat(model)}


@each_backend
def test_dictionaries_and_sample_weights(backend):
    expected = run_plain(backend, in_worker_fit_dictionaries, False)
    assert_close(run(backend, NUM_WORKERS, in_worker_fit_dictionaries, True), [expected] * NUM_WORKERS)


def in_worker_fit_words(under_strategy):
    """Trains on words through a StringLookup in the pipeline, and sparse and ragged tensors if possible."""
    import keras
    import tensorflow as tf

    words = np.array([["a", "b"], ["c", "a"], ["b", "b"], ["zebra", "a"], ["c", "c"]])
    y = np.arange(5, dtype="float32")[:, None]
    lookup = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
    keras.utils.set_random_seed(0)
    with scope(under_strategy):
        model = keras.Sequential([keras.Input((2,), dtype="int64"), keras.layers.Embedding(4, 2)])
        model.add(keras.layers.Flatten())
        model.add(keras.layers.Dense(1))
        model.compile("sgd", "mse")
    dataset = tf.data.Dataset.from_tensor_slices((words, y)).batch(2).map(lambda w, t: (lookup(w), t))
    if under_strategy:
        dataset = strategy().experimental_distribute_dataset(dataset)
    return {**model.fit(dataset, verbose=0).history, "weights": flat(model)}


@each_backend
def test_preprocessing_layers_in_a_pipeline(backend):
    expected = run_plain(backend, in_worker_fit_words, False)
    assert_close(run(backend, NUM_WORKERS, in_worker_fit_words, True), [expected] * NUM_WORKERS)


def for_sparse_rows(under_strategy, other=None):
    """Returns a model, and its inputs and targets; most inputs are zero. Several rows have the first feature."""
    import keras

    dense = np.eye(6, 5, dtype="float32") * np.arange(1, 7, dtype="float32")[:, None]
    dense[:5, 0] += 1
    keras.utils.set_random_seed(0)
    with scope(under_strategy) if other is None else other.scope():
        inputs = keras.Input((5,), sparse=keras.backend.backend() != "torch")
        model = keras.Sequential([inputs, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    return model, dense, np.arange(6, dtype="float32")[:, None]


def in_worker_fit_sparse(under_strategy, plain):
    import keras
    import tensorflow as tf

    model, dense, y = for_sparse_rows(under_strategy)
    # On PyTorch, Keras itself does not support sparse tensors, so the data are dense there.
    alone_on_torch = not under_strategy and keras.backend.backend() == "torch"
    x = dense if alone_on_torch else tf.sparse.from_dense(dense)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    if under_strategy and not plain:
        dataset = strategy().experimental_distribute_dataset(dataset)
    return {**model.fit(dataset, verbose=0).history, "weights": flat(model)}


@pytest.mark.kills(tensorflow_sparse_gradients_not_added="[True-tensorflow]")
@each_backend
@pytest.mark.parametrize("plain", [True, False])
def test_sparse_tensors(backend, plain):
    if backend == "torch" and plain:
        pytest.skip("Keras itself reads no sparse tensors on PyTorch; a distributed dataset makes them dense")
    expected = run_plain(backend, in_worker_fit_sparse, False, plain)
    assert_close(run(backend, NUM_WORKERS, in_worker_fit_sparse, True, plain), [expected] * NUM_WORKERS)


def in_worker_fit_scipy(under_strategy, distribute):
    import scipy.sparse

    model, dense, y = for_sparse_rows(under_strategy)
    x = scipy.sparse.coo_matrix(dense).tocsr()
    if distribute:
        batches = [(x[i : i + 4].tocoo(), y[i : i + 4]) for i in (0, 4)]
        history = model.fit(strategy().experimental_distribute_dataset(batches), verbose=0).history
    else:
        history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    predicted = model.predict(x, batch_size=4, verbose=0)
    return {**history, "predict": predicted, "weights": flat(model)}


@each_backend
def test_sparse_matrices_of_scipy(backend):
    expected = run_plain(backend, in_worker_fit_scipy, False, False)
    for distribute in (False, True):
        assert_close(
            run(backend, NUM_WORKERS, in_worker_fit_scipy, True, distribute), [expected] * NUM_WORKERS
        )


def in_worker_sparse_on_the_second_device():
    import scipy.sparse

    import kdist

    found = []
    for s in (kdist.FullyShardedStrategy(["cpu:1"], min_size=1), kdist.OneDeviceStrategy("cpu:1")):
        model, dense, y = for_sparse_rows(True, s)
        x = scipy.sparse.coo_matrix(dense).tocsr()
        history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
        found.append({**history, "weights": flat(model)})
    return found


@pytest.mark.kills("jax_sparse_batch_not_moved")
def test_sparse_matrices_on_the_second_device():
    expected = run_plain("jax", in_worker_fit_scipy, False, False)
    del expected["predict"]
    assert_close(run("jax", 1, in_worker_sparse_on_the_second_device)[0], [expected] * 2)


def in_worker_read_native_kinds():
    import keras
    import tensorflow as tf

    strings = tf.data.Dataset.from_tensor_slices([b"a", b"bc", b"d", b"e"]).batch(4)
    (text,) = list(strategy().experimental_distribute_dataset(strings))
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3], [4, 5, 6], []])).batch(4)
    try:
        (numbers,) = list(strategy().experimental_distribute_dataset(ragged))
        numbers = numbers.to_list()
    except ValueError as error:
        numbers = str(error)
    text = text.numpy() if keras.backend.backend() == "tensorflow" else text
    return text.tolist(), numbers


@each_backend
def test_strings_and_ragged_tensors(backend):
    workers = run(backend, NUM_WORKERS, in_worker_read_native_kinds)
    assert [text for text, _ in workers] == [[b"a", b"bc"], [b"d", b"e"]]
    if backend == "tensorflow":
        assert [numbers for _, numbers in workers] == [[[1], [2, 3]], [[4, 5, 6], []]]
    else:
        assert all("Cannot use a ragged tensor" in n for _, n in workers)
