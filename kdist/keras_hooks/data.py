"""Keras's data adapters and its `EpochIterator`: the batches of arrays, datasets and loaders."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import numpy as np
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetEnqueuer
    from keras.src.trainers.epoch_iterator import EpochIterator


def epoch_iterator(
    native: Callable[[DataAdapter], Iterable[object]], keeps_batches: bool, **arguments: object
) -> EpochIterator:
    """Returns Keras's `EpochIterator` over *global* batches, in the order that plain Keras would give.

    Its attribute `prepare` can be set to a function. It takes the iterable of an epoch's batches and returns
    an iterator over the inputs of the steps.

    Args:
        native: Takes Keras's data adapter and returns the iterable of batches for the backend's own loop,
            because each backend shuffles differently.
        keeps_batches: Whether one iterable serves all epochs; each iteration changes its order.
        **arguments: The arguments of Keras's `EpochIterator`.
    """
    from keras.src.trainers.epoch_iterator import EpochIterator

    class GlobalBatchIterator(EpochIterator):
        prepare: Callable[[Iterable[object]], Iterator[object]] | None = None
        _kept: Iterable[object] | None = None

        def _get_iterator(self) -> Iterable[object]:
            if self._kept is None:
                self._kept = native(self.data_adapter)
            batches = self._kept
            if not keeps_batches:
                self._kept = None
            return batches if self.prepare is None else self.prepare(batches)

    iterator = GlobalBatchIterator(**arguments)
    queue = _endless_queue(iterator)
    if queue is not None:
        # kdist reads batches ahead, also past the end of an epoch, where Keras would stop the queue.
        queue.stop = lambda **_: None
    return iterator


def _endless_queue(iterator: EpochIterator) -> PyDatasetEnqueuer | None:
    """Returns the queue of an infinite `PyDataset`, or `None`."""
    adapter = iterator.data_adapter
    return getattr(adapter, "enqueuer", None) if adapter.num_batches is None else None


def data_adapter(num_batches: int | None, epochs: Iterable[object]) -> DataAdapter:
    """Returns a Keras `DataAdapter` for batches that come from kdist. Some iterators of `epochs` are never started."""
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    class DistributedDataAdapter(DataAdapter):
        batch_size = None

        @property
        def num_batches(self) -> int | None:
            return num_batches

        def get_numpy_iterator(self) -> Iterable[object]:
            return epochs

        def get_jax_iterator(self, super_batch: int | None = None) -> Iterable[object]:
            # Only the loop of Keras 3.16 requests stacked steps.
            assert not super_batch, "Keras's own loop must not read kdist's batches."
            return epochs

        get_tf_dataset = get_torch_dataloader = get_numpy_iterator

    return DistributedDataAdapter()


def shuffles_py_dataset(iterator: EpochIterator) -> bool:
    """Returns whether an `epoch_iterator`, or a hook of the dataset, may shuffle a `PyDataset`."""
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDataset, PyDatasetAdapter

    adapter = iterator.data_adapter
    if not isinstance(adapter, PyDatasetAdapter):
        return False
    own = type(adapter.py_dataset)
    hooks = own.on_epoch_begin, own.on_epoch_end
    return bool(adapter.shuffle) or hooks != (PyDataset.on_epoch_begin, PyDataset.on_epoch_end)


def before_epoch_end(iterator: EpochIterator, function: Callable[[], None]) -> None:
    """Calls a function before each `on_epoch_end` of the data, until `release`."""
    on_epoch_end = iterator.data_adapter.on_epoch_end

    def called() -> None:
        function()
        on_epoch_end()

    iterator.data_adapter.on_epoch_end = called


def first_of_py_dataset(iterator: EpochIterator, draws_order: bool) -> tuple[object, ...] | None:
    """Returns the first batch of a `PyDataset`, or `None`; its queue would lose batches that are not used.

    Args:
        iterator: The `epoch_iterator`.
        draws_order: Whether plain Keras starts an epoch to build the model. If the batches are shuffled, it
            draws an order for it, so the first epoch has the second order.
    """
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    if not isinstance(iterator.data_adapter, PyDatasetAdapter):
        return None
    dataset = iterator.data_adapter.py_dataset
    dataset.on_epoch_begin()  # it may prepare the batches there
    indices = [0]
    if draws_order and iterator.data_adapter.shuffle and dataset.num_batches is not None:
        indices = list(range(dataset.num_batches))
        random.shuffle(indices)
    return iterator.data_adapter._standardize_batch(dataset[indices[0]])


def release(iterator: EpochIterator) -> None:
    iterator.prepare = iterator._current_iterator = iterator._epoch_iterator = None
    vars(iterator.data_adapter).pop("on_epoch_end", None)
    queue = _endless_queue(iterator)
    if queue is not None:
        vars(queue).pop("stop", None)
        with contextlib.suppress(Exception):  # from batches that were read ahead and never used
            queue.stop()


def skip_steps(iterator: EpochIterator, number: int) -> None:
    """Adds earlier steps to the count of an `epoch_iterator`, from which Keras infers the end of the data."""
    iterator._steps_seen += number


def forget_batches(iterator: EpochIterator) -> None:
    """Makes an `epoch_iterator` create its batches again, from the current random state."""
    iterator._kept = None


def torch_loader_of(iterator: EpochIterator) -> Any:
    """Returns the PyTorch `DataLoader` that an `epoch_iterator` reads, or `None`."""
    from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

    adapter = iterator.data_adapter
    return adapter._dataloader if isinstance(adapter, TorchDataLoaderAdapter) else None


def create_batches(iterator: EpochIterator) -> Iterable[object]:
    """Creates the iterable of batches of an `epoch_iterator`, without starting it."""
    return iterator._get_iterator()


def dataset_of(iterator: EpochIterator) -> Any:
    """Returns the dataset that an `epoch_iterator` reads, or `None` if Keras does not keep it."""
    return getattr(iterator.data_adapter, "_dataset", None)


def py_dataset_batches(dataset: keras.utils.PyDataset) -> Iterator[tuple[object, ...]]:
    """Yields the batches of one epoch of a `PyDataset`, prepared by its own threads or processes."""
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    adapter = PyDatasetAdapter(dataset, class_weight=None, shuffle=False)
    adapter.on_epoch_begin()
    try:
        yield from adapter.get_numpy_iterator()
    finally:
        adapter.on_epoch_end()


def reads_generator(adapter: DataAdapter) -> bool:
    """Returns whether a data adapter reads a generator, which cannot be read again."""
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

    return isinstance(adapter, GeneratorDataAdapter)


def num_array_rows(iterator: EpochIterator) -> int | None:
    """Returns the number of rows of the arrays that an `epoch_iterator` reads, or `None` for other data."""
    return getattr(iterator.data_adapter, "_num_samples", None)


def shuffles_arrays(iterator: EpochIterator) -> bool:
    """Returns whether an `epoch_iterator` shuffles arrays with the backend's global random state."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    return isinstance(iterator.data_adapter, ArrayDataAdapter) and bool(iterator.data_adapter._shuffle)


def train_validation_split(arrays: object, validation_split: float) -> Any:
    """Splits arrays into a training and a validation part, as Keras does."""
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.train_validation_split(arrays, validation_split=validation_split)


def class_weight_to_sample_weights(y: object, class_weight: Mapping[int, float]) -> np.ndarray:
    """Translates `class_weight` into one weight per row, as Keras does."""
    from keras.src.trainers.data_adapters import data_adapter_utils

    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
