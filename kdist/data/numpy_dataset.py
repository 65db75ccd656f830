"""`NumpyDataset`, a small replacement of `tf.data` for arrays that does not need TensorFlow."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import keras
import numpy as np

from kdist.errors import InvalidArgumentError, check_whole

if TYPE_CHECKING:
    from kdist.arrays.types import Structure


class NumpyDataset:
    """A dataset of the rows of arrays, with some methods of `tf.data.Dataset`.

    Each method returns a new dataset. The elements are single rows until you call `batch`.

    Args:
        arrays: A structure of arrays with the same number of rows.

    Example:

    >>> import numpy as np
    >>> from kdist.data.numpy_dataset import NumpyDataset
    >>> [batch.tolist() for batch in NumpyDataset(np.arange(5)).batch(2)]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(self, arrays: Structure) -> None:
        self._arrays = keras.tree.map_structure(np.asarray, arrays)
        lengths = {len(array) if array.ndim else None for array in keras.tree.flatten(self._arrays)}
        if len(lengths) != 1 or None in lengths:
            raise InvalidArgumentError(
                "The arrays do not have the same number of rows.",
                received={"shapes": [array.shape for array in keras.tree.flatten(self._arrays)]},
                hint="Pass arrays whose first axes have the same length.",
            )
        (self._num_items,) = lengths
        self._items: Callable[[int], Iterator[int | np.ndarray]] = lambda epoch: iter(range(len(self)))
        self._iterated = 0

    def _derived(
        self, items: Callable[[int], Iterator[int | np.ndarray]], num_items: int | None
    ) -> NumpyDataset:
        derived = copy.copy(self)
        derived._items, derived._num_items, derived._iterated = items, num_items, 0
        return derived

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> NumpyDataset:
        """Draws each element at random from a buffer.

        Args:
            buffer_size: The elements in the buffer. Use the size of the dataset for a perfect shuffle.
            seed: Makes the order reproducible. All workers must use the same seed.
            reshuffle_each_iteration: Whether the order changes each time the dataset is iterated.
        """
        outer = self._items
        base = int(np.random.randint(2**31)) if seed is None else seed

        def items(epoch: int) -> Iterator[int | np.ndarray]:
            random = np.random.default_rng([base, epoch if reshuffle_each_iteration else 0])
            source = outer(epoch)
            buffer = list(itertools.islice(source, buffer_size))
            for item in source:
                drawn = int(random.integers(len(buffer)))
                yield buffer[drawn]
                buffer[drawn] = item
            yield from (buffer[i] for i in random.permutation(len(buffer)))

        return self._derived(items, self._num_items)

    def repeat(self, count: int | None = None) -> NumpyDataset:
        """Repeats the dataset `count` times, or forever if `count` is `None` or negative."""
        outer = self._items
        times = -1 if count is None else count

        def items(epoch: int) -> Iterator[int | np.ndarray]:
            rounds = itertools.count() if times < 0 else range(times)
            # The number of a round is unique over all epochs, so each round is shuffled differently.
            return itertools.chain.from_iterable(outer(epoch * max(times, 1_000_003) + i) for i in rounds)

        num_items = None if times < 0 or self._num_items is None else self._num_items * times
        return self._derived(items, num_items)

    def take(self, count: int) -> NumpyDataset:
        """Keeps the first `count` elements."""
        outer = self._items
        num_items = count if self._num_items is None else min(self._num_items, count)
        return self._derived(lambda epoch: itertools.islice(outer(epoch), count), num_items)

    def skip(self, count: int) -> NumpyDataset:
        """Skips the first `count` elements."""
        outer = self._items
        num_items = None if self._num_items is None else max(self._num_items - count, 0)
        return self._derived(lambda epoch: itertools.islice(outer(epoch), count, None), num_items)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> NumpyDataset:
        """Combines rows into batches.

        Args:
            batch_size: The rows per batch. For `experimental_distribute_dataset`, the rows per global batch.
            drop_remainder: Whether to drop a last batch with fewer rows.
        """
        check_whole("batch_size", batch_size, "Pass the number of rows per batch: dataset.batch(64)")
        outer = self._items

        def items(epoch: int) -> Iterator[np.ndarray]:
            source = outer(epoch)
            while indices := list(itertools.islice(source, batch_size)):
                if len(indices) == batch_size or not drop_remainder:
                    yield np.array(indices)

        num_items = self._num_items
        if num_items is not None:
            num_items = (num_items if drop_remainder else num_items + batch_size - 1) // batch_size
        return self._derived(items, num_items)

    def prefetch(self, buffer_size: int) -> NumpyDataset:
        """Does nothing, because distributed datasets prefetch batches automatically."""
        return self

    def __len__(self) -> int:
        if self._num_items is None:
            raise TypeError("The dataset has no length, because it repeats forever. Use dataset.take(n).")
        return self._num_items

    def cardinality(self) -> int:
        """Returns the number of elements, or -1 if the dataset repeats forever."""
        return -1 if self._num_items is None else self._num_items

    def __iter__(self) -> Iterator[Structure]:
        """Starts the next epoch."""
        epoch, self._iterated = self._iterated, self._iterated + 1
        return self.epoch(epoch)

    def epoch(self, epoch: int) -> Iterator[Structure]:
        """Yields the elements in the order of an epoch, counted from 0."""
        for item in self._items(epoch):
            yield keras.tree.map_structure(lambda array, i=item: array[i], self._arrays)
