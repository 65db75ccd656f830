"""Datasets of single elements: each replica gets one per step. The data end when a replica would get none."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from tests.helpers.processes import BACKENDS, each_backend, full_unless, run, strategy

KINDS = ("tf.data", "DataLoader", "Grain", "list", "generator function", "numpy")
CASES = [
    pytest.param(backend, kind, marks=full_unless((b + k) % 3 == 0))
    for b, backend in enumerate(BACKENDS)
    for k, kind in enumerate(KINDS)
]


def elements(number, first=0):
    """Returns pairs of a vector and a number, all different."""
    return [(np.float32([i, -i, 100 + i]), np.int32(i)) for i in range(first, first + number)]


def dataset_of(kind, number, first=0):
    items = elements(number, first)
    if kind == "list":
        return items
    if kind == "generator function":
        return lambda: iter(items)
    if kind == "Grain":
        import grain

        return grain.MapDataset.source(items)
    vectors = np.float32([x for x, _ in items]).reshape(number, 3)
    numbers = np.int32([i for _, i in items])
    if kind == "tf.data":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((vectors, numbers))
    if kind == "numpy":
        from kdist.data.numpy_dataset import NumpyDataset

        return NumpyDataset((vectors, numbers))
    import torch

    pairs = torch.utils.data.TensorDataset(torch.from_numpy(vectors), torch.from_numpy(numbers))
    return torch.utils.data.DataLoader(pairs, batch_size=None)


def parts_of(spec):
    """Returns the shape and dtype of one replica's part."""
    import keras

    # On TensorFlow, the spec has a component per replica; the spec of a single tensor is its only component.
    parts = getattr(spec, "_component_specs", spec)
    one, *others = parts if isinstance(parts, tuple) else [spec]
    assert all(other == one for other in others)
    return tuple(one.shape), keras.backend.standardize_dtype(one.dtype)


def in_worker(kind, lengths):
    """Returns the elements that each local replica gets, step by step, with its result, and the spec."""
    import os

    import keras

    s = strategy()
    rank = int(os.environ["RANK"])
    dataset = s.distribute_datasets_from_function(
        lambda context: dataset_of(kind, lengths[rank], 10 * context.input_pipeline_id)
    )
    known = dataset.num_steps
    spec = [parts_of(leaf) for leaf in dataset.element_spec]
    found = []
    for x, number in dataset:
        total = s.run(lambda x, number: keras.ops.sum(x) * keras.ops.cast(number, "float32"), (x, number))
        locals_ = [s.experimental_local_results(value) for value in (x, number, total)]
        found += [
            [keras.ops.convert_to_numpy(leaf).tolist() for leaf in part]
            for part in zip(*locals_, strict=True)
        ]
    again = dataset.reduce(0, lambda steps, _: steps + 1)
    return known, spec, found, again, dataset.get_state()


def check(results, lengths, local, kind):
    steps = min(length // local for length in lengths)
    for rank, (known, spec, found, again, state) in enumerate(results):
        assert known == (steps if kind in ("tf.data", "Grain", "list", "numpy") else None)
        assert spec == [((3,), "float32"), ((), "int32")]
        expected = elements(steps * local, 10 * rank)
        assert found == [[x.tolist(), i, float(i * x.sum())] for x, i in expected]
        assert again == steps and state == {"epoch": 2, "step": 0, "pipelines": len(results)}


@pytest.mark.parametrize(("backend", "kind"), CASES, scope="module")
def test_each_replica_gets_an_element(backend, kind):
    for number in (4, 5):
        check(run(backend, 1, in_worker, kind, [number]), [number], 2, kind)


@pytest.mark.kills("data_steps_without_an_element")
@each_backend
def test_the_data_end_with_the_first_worker(backend):
    check(run(backend, 2, in_worker, "list", [3, 2]), [3, 2], 1, "list")
    check(run(backend, 2, in_worker, "generator function", [2, 4]), [2, 4], 1, "generator function")


def in_worker_compiled():
    """Returns the sums that compiled functions read, and the errors of `fit`."""
    import keras

    s = strategy()
    dataset = s.distribute_datasets_from_function(lambda context: dataset_of("numpy", 5))

    @kdist.function
    def total(batches):
        sums = keras.ops.zeros(())
        for x, _ in batches:
            sums = sums + s.reduce("SUM", s.run(keras.ops.sum, args=(x,)), axis=None)
        return sums

    @kdist.function
    def following(iterator):
        return s.reduce("SUM", next(iterator)[1], axis=None)

    iterator = iter(dataset)
    numbers = [int(following(iterator)) for _ in range(2)]
    with pytest.raises(kdist.errors.OutOfRangeError):
        following(iterator)
    mixed = s.distribute_datasets_from_function(lambda context: [np.ones(4, "float32"), np.float32(1)])
    with pytest.raises(kdist.errors.DatasetError, match="both batches and single elements"):
        next(iter(mixed))
    refused = []
    for layers in ([keras.layers.Dense(1)], [keras.Input((3,)), keras.layers.Dense(1)]):
        with s.scope():
            model = keras.Sequential(layers)
            model.compile("sgd", "mse")
        with pytest.raises(kdist.errors.DatasetError) as info:
            model.fit(dataset, verbose=0)
        refused.append(str(info.value))
    return float(total(dataset)), numbers, refused


@pytest.mark.kills("data_steps_without_an_element")
@each_backend
def test_compiled_functions_read_them_and_fit_refuses(backend):
    total, numbers, refused = run(backend, 1, in_worker_compiled)[0]
    assert total == sum(x.sum() for x, _ in elements(4)) and numbers == [0 + 1, 2 + 3]
    assert all("The dataset is not batched" in text and "Batch it first" in text for text in refused)


def failing():
    """Returns each worker's error if one worker cannot read the first element of its list."""
    import kdist

    class Elements(list):
        def __getitem__(self, index):
            if strategy().runtime.worker_index == 1:
                raise OSError("no such file")
            return super().__getitem__(index)

    try:
        strategy().distribute_datasets_from_function(lambda context: Elements(elements(3)))
    except (OSError, kdist.errors.DatasetError) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.kills("data_first_element_read_alone")
def test_an_element_that_one_worker_cannot_read_is_an_error_on_all():
    (first, text), (second, _) = run("torch", 2, failing)
    assert (first, second) == ("DatasetError", "OSError")
    assert "failed on worker 1" in text
