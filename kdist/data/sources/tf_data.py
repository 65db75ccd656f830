"""A source for `tf.data.Dataset`, on every backend. TensorFlow shards its pipelines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras

from kdist.data.input_options import AutoShardPolicy
from kdist.data.sources.source import Source
from kdist.errors import DatasetError

if TYPE_CHECKING:
    from kdist.arrays.types import Shape, Structure

_LETS_GO = "kdist lets an iterator go"


class TFDataSource(Source):
    """Reads a `tf.data.Dataset`."""

    kind = "a tf.data.Dataset"

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._reshuffles = any(getattr(part, "_reshuffle_each_iteration", False) for part in _parts(dataset))
        # The state of a reshuffling pipeline before each epoch, or `None` if TensorFlow cannot save it.
        self._starts: list[Any] = []
        self._last = -1

    @property
    def num_batches(self) -> int | None:
        cardinality = int(self.dataset.cardinality())
        return cardinality if cardinality >= 0 else None

    @property
    def is_infinite(self) -> bool:
        import tensorflow as tf

        return int(self.dataset.cardinality()) == tf.data.INFINITE_CARDINALITY

    @property
    def inner_shapes(self) -> list[Shape] | None:
        first = 0 if self.is_unbatched else 1
        return [None if shape.rank is None else tuple(shape[first:]) for shape in self._shapes()]

    @property
    def is_unbatched(self) -> bool:
        return any(shape.rank == 0 for shape in self._shapes())

    def _shapes(self) -> list[Any]:
        specs = keras.tree.flatten(self.dataset.element_spec)
        return [spec.shape for spec in specs if hasattr(spec, "shape")]  # the spec of `None` has no shape

    @property
    def policy(self) -> AutoShardPolicy:
        return AutoShardPolicy[self.dataset.options().experimental_distribute.auto_shard_policy.name]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Structure]:
        """Yields eager tensors. A reshuffling dataset yields them in the order of this epoch."""
        import tensorflow as tf

        iterator: Iterator[Structure]
        if self._reshuffles:
            iterator = _Iterator(self._iterator(epoch, start))
        else:
            iterator = iter(Iterated(self.dataset.skip(start) if start else self.dataset))
        try:
            yield from iterator
        except tf.errors.InvalidArgumentError as error:
            if "FILE based sharding" not in str(error):
                raise
            raise DatasetError(
                "AutoShardPolicy.FILE cannot shard the dataset: it has fewer files than workers.",
                received={"error": str(error).split("}} ")[-1][:120]},
                hint="Write the data to more files, or use AutoShardPolicy.DATA.",
            ) from error

    def _iterator(self, epoch: int, start: int) -> Any:
        """Returns the iterator of an epoch. Each iterator of `shuffle(seed=…)` has a different order."""
        iterator: Any = None
        if epoch < len(self._starts):
            iterator = self._restored(epoch)
        elif self._last < len(self._starts) - 1:
            self._restored(len(self._starts) - 1)  # a new iterator follows the last restored one
        while epoch >= len(self._starts):
            iterator = iter(self.dataset)
            self._starts.append(_saved(iterator))
        self._last = epoch
        for _ in range(start):
            if next(iterator, None) is None:
                break
        return iterator

    def _restored(self, epoch: int) -> Any:
        import tensorflow as tf

        if self._starts[epoch] is None:
            raise DatasetError(
                f"Cannot return to epoch {epoch}: this tf.data pipeline shuffles in a new order in each epoch, and "
                "TensorFlow cannot restore an earlier order.",
                received={"epochs_begun": len(self._starts)},
                hint="Create the dataset again and call `set_state` on the new dataset, or shuffle with "
                "reshuffle_each_iteration=False.",
            )
        iterator = iter(self.dataset)
        tf.raw_ops.DeserializeIterator(
            resource_handle=iterator._iterator_resource, serialized=self._starts[epoch]
        )
        return iterator

    @property
    def reads_files(self) -> bool:
        import tensorflow as tf

        try:
            self._sharded(AutoShardPolicy.FILE, 2, 0)
        except tf.errors.NotFoundError:
            return False
        return True

    def share_of_files(self, num_workers: int, worker_index: int) -> Source:
        """Returns a source that reads only this worker's files. TensorFlow shards the file reader."""
        import tensorflow as tf

        try:
            return TFDataSource(self._sharded(AutoShardPolicy.FILE, num_workers, worker_index))
        except tf.errors.NotFoundError:
            raise DatasetError(
                "AutoShardPolicy.FILE cannot shard the dataset: its pipeline does not read files.",
                received={"dataset": self.dataset},
                hint="Use AutoShardPolicy.DATA.",
            ) from None

    def hinted(self, num_workers: int, worker_index: int) -> Source:
        """Returns a source in which TensorFlow has filled in `shard(SHARD_HINT, SHARD_HINT)`."""
        return TFDataSource(self._sharded(AutoShardPolicy.HINT, num_workers, worker_index))

    def _sharded(self, policy: AutoShardPolicy, num_workers: int, worker_index: int) -> Any:
        import tensorflow as tf

        # `tf.distribute` uses this class. TensorFlow has no public API that rewrites a pipeline.
        from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset

        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy.name]
        return _AutoShardDataset(self.dataset.with_options(options), num_workers, worker_index)


class Iterated:
    """A `tf.data.Dataset` whose iterators can be deleted without waiting.

    Deleting a TensorFlow iterator waits for the thread that tunes its pipeline. That thread sleeps for up to
    a minute if it misses the call to end, because TensorFlow calls before it marks the iterator as canceled.
    Meanwhile, the other workers would wait for this worker. Therefore another thread deletes the iterator.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Structure]:
        return _Iterator(iter(self._dataset))


class _Iterator(Iterator[Any]):
    def __init__(self, native: Any) -> None:
        self._native = [native]

    def __next__(self) -> Any:
        return next(self._native[0])

    def __del__(self) -> None:
        if not sys.is_finalizing():  # a thread would never start then
            threading.Thread(target=self._native.clear, name=_LETS_GO, daemon=True).start()


def _parts(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and, recursively, its input datasets."""
    yield dataset
    for part in dataset._inputs():
        yield from _parts(part)


def _saved(iterator: Any) -> Any:
    import tensorflow as tf

    try:
        # Policy 2 raises an error if the state of a part of the pipeline cannot be saved.
        return tf.raw_ops.SerializeIterator(
            resource_handle=iterator._iterator_resource, external_state_policy=2
        )
    except tf.errors.OpError:
        return None
