"""Dictionaries, strings, sparse and ragged tensors, and preprocessing layers in pipelines."""

from __future__ import annotations

import numpy as np
import pytest

from tests.data.fit_multi_process_test import NUM_WORKERS, flat
from tests.helpers.compare import assert_close
from tests.helpers.data import make_data
from tests.helpers.processes import each_backend, run, run_plain, strategy


def in_worker_fit_dictionaries(scope):
    import keras

    keras.utils.set_random_seed(0)
    x, y = make_data(11)
    weights = np.linspace(0, 1, 11, dtype="float32")
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")

    def build():
        return keras.Model({"a": a, "b": b}, {"out": keras.layers.Dense(1, name="out")(a + b)})

    batches = [
        ({"a": x[i : i + 4], "b": x[i : i + 4] * 2}, {"out": y[i : i + 4]}, weights[i : i + 4])
        for i in (0, 4, 8)
    ]
    if scope:
        with strategy().scope():
            model = build()
        data = strategy().experimental_distribute_dataset(batches)
    else:
        model, data = build(), (batch for batch in batches)
    model.compile("sgd", "mse", weighted_metrics=["mae"])
    return {**model.fit(data, verbose=0).history, "weights": flat(model)}


@each_backend
def test_dictionaries_and_sample_weights(backend):
    expected = run_plain(backend, in_worker_fit_dictionaries, False)
    for found in run(backend, NUM_WORKERS, in_worker_fit_dictionaries, True):
        assert_close(found, expected)


def in_worker_fit_words(scope):
    """Words through a StringLookup in the pipeline, sparse and ragged tensors where the backend has them."""
    import contextlib

    import keras
    import tensorflow as tf

    words = np.array([["a", "b"], ["c", "a"], ["b", "b"], ["zebra", "a"], ["c", "c"]])
    y = np.arange(5, dtype="float32")[:, None]
    lookup = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
    keras.utils.set_random_seed(0)
    with strategy().scope() if scope else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((2,), dtype="int64"), keras.layers.Embedding(4, 2)])
        model.add(keras.layers.Flatten())
        model.add(keras.layers.Dense(1))
        model.compile("sgd", "mse")
    dataset = tf.data.Dataset.from_tensor_slices((words, y)).batch(2).map(lambda w, t: (lookup(w), t))
    if scope:
        dataset = strategy().experimental_distribute_dataset(dataset)
    return {**model.fit(dataset, verbose=0).history, "weights": flat(model)}


@each_backend
def test_preprocessing_layers_in_a_pipeline(backend):
    expected = run_plain(backend, in_worker_fit_words, False)
    for found in run(backend, NUM_WORKERS, in_worker_fit_words, True):
        assert_close(found, expected)


def in_worker_fit_sparse(scope, plain):
    import contextlib

    import keras
    import tensorflow as tf

    dense = np.eye(6, 5, dtype="float32") * np.arange(1, 7, dtype="float32")[:, None]
    y = np.arange(6, dtype="float32")[:, None]
    keras.utils.set_random_seed(0)
    with strategy().scope() if scope else contextlib.nullcontext():
        model = keras.Sequential(
            [keras.Input((5,), sparse=keras.backend.backend() != "torch"), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    # Keras itself has no sparse tensors on PyTorch: there they become dense.
    alone_on_torch = not scope and keras.backend.backend() == "torch"
    x = dense if alone_on_torch else tf.sparse.from_dense(dense)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    if scope and not plain:
        dataset = strategy().experimental_distribute_dataset(dataset)
    return {**model.fit(dataset, verbose=0).history, "weights": flat(model)}


@each_backend
@pytest.mark.parametrize("plain", [True, False])
def test_sparse_tensors(backend, plain):
    if backend == "torch" and plain:
        pytest.skip("Keras itself reads no sparse tensors on PyTorch; a distributed dataset makes them dense")
    expected = run_plain(backend, in_worker_fit_sparse, False, plain)
    for found in run(backend, NUM_WORKERS, in_worker_fit_sparse, True, plain):
        assert_close(found, expected)


def in_worker_fit_scipy(scope, distribute):
    import contextlib

    import keras
    import scipy.sparse

    dense = np.eye(6, 5, dtype="float32") * np.arange(1, 7, dtype="float32")[:, None]
    y = np.arange(6, dtype="float32")[:, None]
    x = scipy.sparse.coo_matrix(dense).tocsr()
    keras.utils.set_random_seed(0)
    with strategy().scope() if scope else contextlib.nullcontext():
        is_sparse = keras.backend.backend() != "torch"
        model = keras.Sequential([keras.Input((5,), sparse=is_sparse), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
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
        for found in run(backend, NUM_WORKERS, in_worker_fit_scipy, True, distribute):
            assert_close(found, expected)


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
