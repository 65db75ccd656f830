"""`DistributedIterator`: elements, the end, and a position that is saved and restored."""

from __future__ import annotations

import numpy as np
import pytest

from tests.data.fit_multi_process_test import NUM_WORKERS, arrays, in_batches
from tests.processes import each_backend, run, strategy


def in_worker_iterate():
    import keras

    import kdist

    x, y = arrays(10)
    dataset = strategy().experimental_distribute_dataset(in_batches(x, y, (4, 4, 2)))
    spec = [(tuple(s.shape), s.dtype) for s in dataset.element_spec]
    iterator = iter(dataset)
    first = keras.ops.convert_to_numpy(iterator.get_next()[0])
    assert iterator.get_next_as_optional().has_value()
    state = dataset.get_state()
    last = keras.ops.convert_to_numpy(iterator.get_next_as_optional().get_value()[0])
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(kdist.errors.OutOfRangeError):
        iterator.get_next()
    return spec, first, last, state, dataset.get_state()


@each_backend
def test_the_iterator(backend):
    x, _ = arrays(10)
    for index, (spec, first, last, state, end) in enumerate(run(backend, NUM_WORKERS, in_worker_iterate)):
        assert spec == [((None, 3), "float32"), ((None, 1), "float32")]
        np.testing.assert_array_equal(first, x[2 * index : 2 * index + 2])
        np.testing.assert_array_equal(last, x[8 + index : 9 + index])
        assert state == {"epoch": 0, "step": 2}
        assert end == {"epoch": 1, "step": 0}


def resumable(kind):
    """Datasets that shuffle, made anew as after a restart."""
    import keras

    values = np.arange(12, dtype="int32")
    if kind == "tf.data":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(values).shuffle(12, seed=1).batch(4)
    if kind == "DataLoader":
        import torch

        generator = torch.Generator().manual_seed(1)
        return torch.utils.data.DataLoader(values, batch_size=4, shuffle=True, generator=generator)
    if kind == "Grain":
        import grain

        return grain.MapDataset.source(values).shuffle(seed=1).batch(4)
    if kind == "numpy":
        from kdist.data.numpy_dataset import NumpyDataset

        return NumpyDataset(values).shuffle(12, seed=1).batch(4)

    class Numbers(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return values[4 * index : 4 * index + 4]

    return Numbers(workers=2)


def in_worker_resume(kind):
    import keras

    def read(dataset, number):
        return [keras.ops.convert_to_numpy(e).tolist() for _, e in zip(range(number), dataset, strict=False)]

    whole = strategy().experimental_distribute_dataset(resumable(kind))
    expected = [read(whole, 9) for _ in range(2)]
    first = strategy().experimental_distribute_dataset(resumable(kind))
    read(first, 9)
    begun = iter(first)
    [next(begun) for _ in range(2)]
    again = strategy().experimental_distribute_dataset(resumable(kind))
    again.set_state(first.get_state())
    begun.close()
    return expected, first.get_state(), read(again, 9), again.get_state()


@each_backend
@pytest.mark.parametrize("kind", ["tf.data", "DataLoader", "Grain", "numpy", "PyDataset"])
def test_a_position_is_saved_and_restored(backend, kind):
    for expected, state, found, end in run(backend, NUM_WORKERS, in_worker_resume, kind):
        assert state == {"epoch": 1, "step": 2}
        assert found == expected[1][2:]
        assert end == {"epoch": 2, "step": 0}
        assert expected[0] != expected[1] or kind in ("PyDataset", "Grain")  # these have one order
