"""A source for `keras.utils.PyDataset`. Keras's adapter runs its threads or processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import keras

from kdist import keras_hooks
from kdist.data.sources.source import Source

if TYPE_CHECKING:
    from kdist.arrays.types import Structure


class PyDatasetSource(Source):
    """Reads a `keras.utils.PyDataset`."""

    kind = "a PyDataset"
    _epochs = 0

    @property
    def num_batches(self) -> int | None:
        return self.dataset.num_batches

    def batches(self, epoch: int, start: int = 0) -> Iterator[Structure]:
        """Yields NumPy arrays from the dataset's workers. Calls the epoch hooks, also for skipped epochs."""
        while self._epochs < epoch:  # the hooks may change the dataset
            self.dataset.on_epoch_begin()
            self.dataset.on_epoch_end()
            self._epochs += 1
        self._epochs += 1
        if start and self.num_batches is not None and start >= self.num_batches:
            self.dataset.on_epoch_begin()
            self.dataset.on_epoch_end()
            return
        dataset = _Tail(self.dataset, start) if start else self.dataset
        for batch in keras_hooks.py_dataset_batches(dataset):
            # Keras wraps a single array in a tuple.
            single = isinstance(batch, tuple) and len(batch) == 1 and hasattr(batch[0], "shape")
            yield batch[0] if single else batch


class _Tail(keras.utils.PyDataset):
    """A PyDataset without its first batches."""

    def __init__(self, dataset: keras.utils.PyDataset, start: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._start = start

    @property
    def num_batches(self) -> int | None:
        length = self._dataset.num_batches
        return None if length is None else max(length - self._start, 0)

    def __getitem__(self, index: int) -> Structure:
        return self._dataset[index + self._start]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
