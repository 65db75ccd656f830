"""Sources for generators, generator functions, Grain datasets and other iterables of batches."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kdist.arrays import rows
from kdist.data.sources.source import Source

if TYPE_CHECKING:
    from kdist.arrays.types import Structure


def _begins_single(items: Sequence[Structure]) -> bool:
    return len(items) > 0 and rows.is_single(rows.to_host(items[0]))


class IterableSource(Source):
    """Reads an object that can be iterated repeatedly, such as a list of batches."""

    kind = "an iterable"

    @property
    def num_batches(self) -> int | None:
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None

    @property
    def is_unbatched(self) -> bool:
        return isinstance(self.dataset, (list, tuple)) and _begins_single(self.dataset)


class GeneratorFunctionSource(Source):
    """Reads a function without arguments that returns an iterator. Calls it once per epoch."""

    kind = "a generator function"

    def batches(self, epoch: int, start: int = 0) -> Iterator[Structure]:
        return itertools.islice(self.dataset(), start, None)


class IteratorSource(Source):
    """Reads an iterator, which can be read only once. The next epoch continues where the last epoch ended."""

    kind = "a generator"
    can_read_ahead = False


class GrainSource(Source):
    """Reads a `grain.MapDataset`, `grain.IterDataset` or `grain.DataLoader`."""

    kind = "a Grain dataset"

    @property
    def num_batches(self) -> int | None:
        length = len(self.dataset) if hasattr(self.dataset, "__len__") else sys.maxsize
        return length if length < sys.maxsize else None

    @property
    def is_infinite(self) -> bool:
        return hasattr(self.dataset, "__len__") and self.num_batches is None

    @property
    def is_unbatched(self) -> bool:
        return hasattr(self.dataset, "__getitem__") and _begins_single(self.dataset)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Structure]:
        """Yields NumPy arrays. A map dataset skips to `start` without reading the batches before it."""
        if start and hasattr(self.dataset, "__getitem__"):
            return iter(self.dataset[start:])
        return super().batches(epoch, start)


class NumpySource(Source):
    """Reads a `NumpyDataset`."""

    kind = "a dataset of NumPy arrays"

    @property
    def num_batches(self) -> int | None:
        cardinality = self.dataset.cardinality()
        return cardinality if cardinality >= 0 else None

    @property
    def is_infinite(self) -> bool:
        return self.num_batches is None

    @property
    def is_unbatched(self) -> bool:
        return any(rows.is_single(rows.to_host(item)) for item in self.dataset.take(1).epoch(0))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Structure]:
        """Yields the batches in the order of this epoch. Skipped batches are not created."""
        return self.dataset.skip(start).epoch(epoch)
