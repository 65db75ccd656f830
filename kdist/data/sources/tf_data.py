"""`tf.data.Dataset` as a source, on every backend. TensorFlow does the sharding of its own pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kdist.data.input_options import AutoShardPolicy
from kdist.data.sources.source import Source
from kdist.errors import DatasetError


class TFDataSource(Source):
    """Reads a `tf.data.Dataset`."""

    kind = "a tf.data.Dataset"

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._iterated = 0

    @property
    def num_batches(self) -> int | None:
        """The dataset's cardinality."""
        cardinality = int(self.dataset.cardinality())
        return cardinality if cardinality >= 0 else None

    @property
    def is_infinite(self) -> bool:
        """Whether the dataset repeats without end."""
        import tensorflow as tf

        return int(self.dataset.cardinality()) == tf.data.INFINITE_CARDINALITY

    @property
    def policy(self) -> AutoShardPolicy:
        """The policy that the dataset's options ask for."""
        return AutoShardPolicy[self.dataset.options().experimental_distribute.auto_shard_policy.name]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yields eager tensors. A reshuffling dataset gives the order that it gives in this epoch."""
        import tensorflow as tf

        # The n-th iteration of a dataset with `shuffle(seed=…)` has an order of its own.
        while self._iterated < epoch:
            next(iter(self.dataset), None)
            self._iterated += 1
        self._iterated += 1
        dataset = self.dataset.skip(start) if start else self.dataset
        iterator = iter(dataset)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except tf.errors.InvalidArgumentError as error:
                if "FILE based sharding" not in str(error):
                    raise
                raise DatasetError(
                    "AutoShardPolicy.FILE needs at least one file a worker.",
                    received={"error": str(error).split("}} ")[-1][:120]},
                    hint="Write the data to more files, or use AutoShardPolicy.DATA.",
                ) from error
            yield batch

    @property
    def reads_files(self) -> bool:
        """Whether TensorFlow finds a reader of files in the pipeline."""
        import tensorflow as tf

        try:
            self._sharded(AutoShardPolicy.FILE, 2, 0)
        except tf.errors.NotFoundError:
            return False
        return True

    def share_of_files(self, num_workers: int, worker_index: int) -> Source:
        """TensorFlow moves a shard to the reader of files."""
        import tensorflow as tf

        try:
            return TFDataSource(self._sharded(AutoShardPolicy.FILE, num_workers, worker_index))
        except tf.errors.NotFoundError:
            raise DatasetError(
                "AutoShardPolicy.FILE needs a pipeline that reads files.",
                received={"dataset": self.dataset},
                hint="Use AutoShardPolicy.DATA.",
            ) from None

    def hinted(self, num_workers: int, worker_index: int) -> Source:
        """TensorFlow fills in `shard(SHARD_HINT, SHARD_HINT)`."""
        return TFDataSource(self._sharded(AutoShardPolicy.HINT, num_workers, worker_index))

    def _sharded(self, policy: AutoShardPolicy, num_workers: int, worker_index: int) -> Any:
        import tensorflow as tf

        # What tf.distribute applies; there is no public name for the rewriting of a pipeline.
        from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset

        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy.name]
        return _AutoShardDataset(self.dataset.with_options(options), num_workers, worker_index)
