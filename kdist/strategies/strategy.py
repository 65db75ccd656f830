"""The base class of all strategies: which replicas there are, and the scope that makes them current."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdist.context import Scope
from kdist.data.input_options import InputOptions

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime
    from kdist.cluster import ClusterResolver
    from kdist.data.distributed_dataset import DistributedDataset
    from kdist.data.input_context import InputContext, ValueContext


class Strategy:
    """A policy for distributing computation over devices and workers.

    Create one, build and compile models in its `scope()`, then call `fit`, `evaluate` and `predict` as on one
    device.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

    Example:

    ```python
    import kdist, keras

    strategy = kdist.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
    model.fit(x, y, batch_size=128)
    ```
    """

    def __init__(self, runtime: Runtime) -> None:
        from kdist import keras_hooks

        keras_hooks.install()
        self._runtime = runtime

    @property
    def runtime(self) -> Runtime:
        """The devices and workers of this strategy, as the backend drives them."""
        return self._runtime

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over which gradients are summed, over all workers."""
        return self._runtime.num_replicas

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of a multi-worker strategy; `None` for a strategy of one process."""
        return None

    def scope(self) -> Scope:
        """Returns a context manager that makes this strategy current.

        Models, optimisers and metrics created inside belong to the strategy, and remember it: `fit` works
        outside the scope too. Scopes of the same strategy may be nested, those of different ones not; a scope
        counts for the thread that entered it.

        Returns:
            A context manager whose `as` target is the strategy.

        Raises:
            StrategyScopeError: On entering, inside the scope of another strategy or inside a replica.
        """
        return Scope(self, self._runtime.scope)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes the datasets that a function makes, one a worker.

        The function batches and shards: its dataset gives per-replica batches, and each replica of the worker
        takes one in turn at every step.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            dataset_fn: Called once on each worker with a `kdist.InputContext`. Returns a `tf.data.Dataset`, a
                PyTorch `DataLoader`, a `keras.utils.PyDataset`, a Grain dataset, a generator function (called
                once an epoch) or an iterable, of batches with the rows of one replica.
            options: A `kdist.InputOptions`.

        Returns:
            A `kdist.DistributedDataset`, to iterate over or to hand to `fit`, `evaluate` and `predict`.

        Raises:
            DatasetError: The function failed on a worker, or returned something else; on all workers.

        Example:

        ```python
        def dataset_fn(context):
            batch_size = context.get_per_replica_batch_size(128)
            mine = x[context.input_pipeline_id :: context.num_input_pipelines]
            return tf.data.Dataset.from_tensor_slices(mine).batch(batch_size)

        model.fit(strategy.distribute_datasets_from_function(dataset_fn))
        ```
        """
        from kdist.data.distribute import distribute_from_function

        return distribute_from_function(self.runtime, dataset_fn, options or InputOptions())

    # The older name of the same method.
    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes a dataset of global batches: each replica takes its rows.

        Rows are split as evenly as possible, the larger parts first, whatever their number. Which rows a
        worker reads is the dataset's `AutoShardPolicy`.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            dataset: A `tf.data.Dataset`, a PyTorch `DataLoader`, a `keras.utils.PyDataset`, a Grain dataset, a
                generator function (called once an epoch) or an iterable, of global batches. Every worker
                passes the same one.
            options: A `kdist.InputOptions`.

        Returns:
            A `kdist.DistributedDataset`, to iterate over or to hand to `fit`, `evaluate` and `predict`.

        Raises:
            DatasetError: The policy cannot be applied to the dataset, or it is no dataset; on all workers.

        Example:

        ```python
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1000, seed=1).batch(128)
        for batch in strategy.experimental_distribute_dataset(dataset):
            ...
        ```
        """
        from kdist.data.distribute import distribute_dataset

        return distribute_dataset(self.runtime, dataset, options or InputOptions())

    def make_experimental_numpy_dataset(self, numpy_input: Any) -> Any:
        """Makes a dataset of the rows of arrays, for `experimental_distribute_dataset`.

        Args:
            numpy_input: A structure of arrays with the same number of rows.

        Returns:
            A `tf.data.Dataset` on TensorFlow; else a dataset with its methods `shuffle`, `repeat`, `take`,
            `skip` and `batch`.

        Example:

        ```python
        dataset = strategy.make_experimental_numpy_dataset((x, y)).shuffle(1000, seed=1).batch(128)
        ```
        """
        from kdist.backends import get_backend

        return get_backend().numpy_dataset(numpy_input)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Makes one value for each replica of this worker.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            value_fn: Called with a `kdist.experimental.ValueContext` for each local replica.

        Returns:
            A `kdist.DistributedValues`; the value itself where the worker has one replica.

        Example:

        ```python
        ids = strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        ```
        """
        from kdist.data.distribute import distribute_values

        return distribute_values(self.runtime, value_fn)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of a value, one for each replica of this worker.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            value: A value or a structure of values, such as an element of a distributed dataset.

        Returns:
            One value a local replica; `(value,)` for something that is not distributed.
        """
        import keras

        from kdist.values import local_results

        return local_results(value, keras.tree.map_structure, keras.tree.flatten)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} num_replicas_in_sync={self.num_replicas_in_sync}>"
