"""Generators, generator functions, Grain's datasets and any other iterable of batches as sources."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

from kdist.arrays import rows
from kdist.data.sources.source import Source


def _begins_single(items: Any) -> bool:
    return len(items) > 0 and rows.is_single(rows.to_host(items[0]))


class IterableSource(Source):
    """Reads anything that can be iterated again and again: a list of batches, an object with `__iter__`."""

    kind = "an iterable"

    @property
    def num_batches(self) -> int | None:
        """The length, where there is one."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None

    @property
    def is_unbatched(self) -> bool:
        """Whether the first item of a list is a single element."""
        return isinstance(self.dataset, (list, tuple)) and _begins_single(self.dataset)


class GeneratorFunctionSource(Source):
    """Reads a function without arguments that returns an iterator, called once an epoch."""

    kind = "a generator function"

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Calls the function and yields what its iterator yields."""
        return itertools.islice(self.dataset(), start, None)


class IteratorSource(Source):
    """Reads an iterator, which can be read once: the next epoch goes on where the last one stopped."""

    kind = "a generator"
    can_read_ahead = False


class GrainSource(Source):
    """Reads a `grain.MapDataset`, `grain.IterDataset` or `grain.DataLoader`."""

    kind = "a Grain dataset"

    @property
    def num_batches(self) -> int | None:
        """The length of a map dataset that ends."""
        length = len(self.dataset) if hasattr(self.dataset, "__len__") else sys.maxsize
        return length if length < sys.maxsize else None

    @property
    def is_infinite(self) -> bool:
        """Whether a map dataset repeats without end."""
        return hasattr(self.dataset, "__len__") and self.num_batches is None

    @property
    def is_unbatched(self) -> bool:
        """Whether the first item of a map dataset is a single element."""
        return hasattr(self.dataset, "__getitem__") and _begins_single(self.dataset)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yields NumPy arrays. A map dataset goes to its start at once."""
        if start and hasattr(self.dataset, "__getitem__"):
            return iter(self.dataset[start:])
        return super().batches(epoch, start)


class NumpySource(Source):
    """Reads kdist's own `NumpyDataset`."""

    kind = "a dataset of NumPy arrays"

    @property
    def num_batches(self) -> int | None:
        """The dataset's cardinality."""
        cardinality = self.dataset.cardinality()
        return cardinality if cardinality >= 0 else None

    @property
    def is_infinite(self) -> bool:
        """Whether the dataset repeats without end."""
        return self.num_batches is None

    @property
    def is_unbatched(self) -> bool:
        """Whether the first item is a single element."""
        return any(rows.is_single(rows.to_host(item)) for item in self.dataset.take(1).epoch(0))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yields the batches in the order of this epoch; those left out are not made."""
        return self.dataset.skip(start).epoch(epoch)
