"""`Strategy`, the base class of all strategies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from kdist.context import Scope, current_replica, has_strategy, note_joined
from kdist.data.input_options import InputOptions
from kdist.names import without_left_out
from kdist.strategies.description import Description, announce, describe

if TYPE_CHECKING:
    import keras

    from kdist.backends.contract import Runtime
    from kdist.cluster import ClusterResolver
    from kdist.communication.cross_device_ops import CrossDeviceOps
    from kdist.data.distributed_dataset import DistributedDataset
    from kdist.data.input_context import InputContext, ValueContext
    from kdist.strategies.extended import StrategyExtended
    from kdist.strategies.running import RunOptions
    from kdist.values import ReduceOp


@without_left_out
class Strategy:
    """Distributes computation over devices and workers.

    Create a strategy, then build and compile a model in its `scope()`. Call `fit`, `evaluate` and `predict`
    as on one device.

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

    own_ops: CrossDeviceOps | None = None
    """The user-defined object that reduces gradients and values; `None` if the backend reduces them."""
    _told: Description = Description()
    """Details for `repr` and for the log that the runtime does not have."""

    def __init__(self, runtime: Runtime) -> None:
        from kdist import keras_hooks
        from kdist.backends import get_backend
        from kdist.strategies.distributions import check_current
        from kdist.strategies.new_variables import NewVariables

        keras_hooks.install(get_backend().native_moments)
        self._runtime = runtime
        self.new_variables = NewVariables(runtime)
        check_current(self)
        announce(self)
        if runtime.num_workers > 1:
            note_joined(self)

    @property
    def runtime(self) -> Runtime:
        """The backend's `Runtime`, which controls the devices and workers of this strategy."""
        return self._runtime

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all workers. Gradients are summed over these replicas."""
        return self._runtime.num_replicas

    @property
    def extended(self) -> StrategyExtended:
        """Methods for libraries and advanced users; see `StrategyExtended`."""
        from kdist.strategies.extended import StrategyExtended

        return StrategyExtended(self)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The cluster resolver of a multi-worker strategy; `None` if the strategy uses only one process."""
        return None

    @property
    def keras_distribution(self) -> keras.distribution.Distribution:
        """The equivalent `keras.distribution.Distribution`, for code that needs one.

        You do not need to set it. If a distribution is set when you create the strategy or enter its scope,
        it must be equivalent. In the scope, and while the strategy's models train, Keras does not see it.

        Returns:
            A `keras.distribution.DataParallel`, or a `ModelParallel` if variables are sharded.

        Raises:
            UnsupportedError: If the backend ignores `keras.distribution`, or no distribution is equivalent.
        """
        from kdist.strategies.distributions import distribution_of

        return distribution_of(self._runtime)

    def scope(self) -> Scope[Self]:
        """Returns a context manager that makes this strategy current in this thread.

        Models, optimizers and metrics that you create in the scope belong to the strategy. You can call `fit`
        outside the scope, because a model remembers its strategy. When the scope ends, all workers receive
        the chief's values of the new variables. Every worker must therefore create the same variables and
        leave the scope. You can nest scopes of the same strategy, but not scopes of different strategies.

        Returns:
            A context manager whose `as` target is the strategy.

        Raises:
            StrategyScopeError: If you enter it inside the scope of another strategy or inside a replica.
            WorkerMismatchError: If the workers have created different variables when the scope ends.
        """
        return Scope(self, self._resources)

    @contextlib.contextmanager
    def _resources(self) -> Iterator[None]:
        from kdist import keras_hooks
        from kdist.strategies.distributions import check_current

        check_current(self)
        try:
            with keras_hooks.without_distribution(), self._runtime.scope():
                yield
        except BaseException:
            # Sharing is a collective, and the other workers may have failed elsewhere or not at all.
            self.new_variables.forget()
            raise
        if not has_strategy():  # this was the outermost scope
            self.new_variables.share()

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes datasets that a function creates, one dataset per worker.

        The function must shard and batch the data itself. Its dataset returns per-replica batches, and in
        each step every replica of the worker takes the next batch in turn.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            dataset_fn: Called once on each worker with a `kdist.InputContext`. Returns a `tf.data.Dataset`,
                PyTorch `DataLoader`, `keras.utils.PyDataset`, Grain dataset, generator function (called once
                per epoch) or iterable. Its elements are batches for one replica, or single rows. With single
                rows, each replica takes one row per step, until fewer rows than replicas are left.
            options: A `kdist.InputOptions`.

        Returns:
            A `kdist.DistributedDataset`. Iterate over it, or pass it to `fit`, `evaluate` and `predict`.

        Raises:
            DatasetError: If the function fails or returns another type on a worker. All workers raise it.

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

    # An older name in `tf.distribute`.
    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_dataset(
        self, dataset: object, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes a dataset of global batches over the replicas.

        kdist splits any number of rows as evenly as possible, and the first replicas get the larger parts.
        The `AutoShardPolicy` of the dataset sets which rows each worker reads.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            dataset: A `tf.data.Dataset`, PyTorch `DataLoader`, `keras.utils.PyDataset`, Grain dataset,
                generator function (called once per epoch) or iterable. Its elements are global batches. Pass
                the same dataset on every worker.
            options: A `kdist.InputOptions`.

        Returns:
            A `kdist.DistributedDataset`. Iterate over it, or pass it to `fit`, `evaluate` and `predict`.

        Raises:
            DatasetError: If it is not a dataset, or does not support the policy. All workers raise it.

        Example:

        ```python
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1000, seed=1).batch(128)
        for batch in strategy.experimental_distribute_dataset(dataset):
            ...
        ```
        """
        from kdist.data.distribute import distribute_dataset

        return distribute_dataset(self.runtime, dataset, options or InputOptions())

    def make_experimental_numpy_dataset(self, numpy_input: object) -> Any:
        """Creates a dataset from the rows of arrays, for `experimental_distribute_dataset`.

        Args:
            numpy_input: A nested structure of arrays with the same number of rows.

        Returns:
            A `tf.data.Dataset` on TensorFlow. On other backends, a dataset with the methods `shuffle`,
            `repeat`, `take`, `skip` and `batch`.

        Example:

        ```python
        dataset = strategy.make_experimental_numpy_dataset((x, y)).shuffle(1000, seed=1).batch(128)
        ```
        """
        from kdist.backends import get_backend
        from kdist.data.numpy_dataset import NumpyDataset

        native = get_backend().numpy_dataset(numpy_input)
        return NumpyDataset(numpy_input) if native is None else native

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], object]) -> Any:
        """Creates one value per replica of this worker.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            value_fn: Called once per local replica, with a `kdist.experimental.ValueContext`.

        Returns:
            A `kdist.DistributedValues`, or the value itself if the worker has one replica.

        Example:

        ```python
        ids = strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        ```
        """
        from kdist.data.distribute import distribute_values

        return distribute_values(self.runtime, value_fn)

    def run(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls a function once per replica, with the replica's component of each distributed argument.

        In the function, `kdist.get_replica_context()` returns the context of the replica. `optimizer.apply`
        sums the gradients over all replicas. When the function ends, kdist aggregates the values that it
        assigned to Keras variables, by each variable's `aggregation`. With `synchronization="on_read"`, each
        replica keeps its own value, and reading the variable outside aggregates the values. Keras's mean
        losses are divided by the number of replicas, so that their sum is a mean.

        On JAX, the function is compiled once per structure, shape and dtype of its arguments. Python numbers,
        strings and closure variables become constants of the program. On TensorFlow and PyTorch, it runs
        eagerly. To compile it on TensorFlow, wrap the call in `kdist.function`.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            fn: The function to call in each replica.
            args: Positional arguments. Each replica receives its component of a `kdist.DistributedValues`,
                such as an element of a distributed dataset. All replicas receive other values unchanged.
            kwargs: Keyword arguments, handled like `args`.
            options: A `kdist.RunOptions`.

        Returns:
            The results as a structure of `kdist.DistributedValues`, with one component per replica of this
            worker. A worker with one replica returns the plain result. If all replicas return an equal Python
            number or string, or the same tensor from `merge_call`, it stays one value.

        Raises:
            StrategyScopeError: If you call it inside a replica.

        Example:

        ```python
        def step(x):
            return keras.ops.sum(x)

        for batch in strategy.experimental_distribute_dataset(dataset):
            total = strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
        ```
        """
        from kdist.strategies.running import run

        return run(self, fn, args, kwargs, options)

    def reduce(self, reduce_op: ReduceOp | str, value: object, axis: int | Sequence[int] | None) -> Any:
        """Reduces a value over all replicas of all workers.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            reduce_op: `kdist.ReduceOp.SUM` or `MEAN`, or its name.
            value: A `kdist.DistributedValues` or a structure of them, for example the result of `run`.
            axis: The axis or axes to also reduce within each replica, usually 0 for the rows. Every element has the
                same weight in a `MEAN`, even if replicas have different numbers of rows. `None` reduces only
                over the replicas, which must have equal shapes.

        Returns:
            A structure of tensors, equal on all workers. `SUM` counts Booleans, as int32. Without an axis, it keeps
            the dtype of integers, and can overflow. The `MEAN` of integers is floating point, as in TensorFlow:
            float32 for 8 and 16 bits, else float64. JAX needs `jax_enable_x64` for float64.

        Raises:
            InvalidArgumentError: If the operation or axis does not exist, the shapes differ, or `SUM` is used
                on one worker with several replicas with a value that is not distributed.
            WorkerMismatchError: If the shapes or dtypes differ between the workers.
            StrategyScopeError: If you call it inside a replica.

        Example:

        ```python
        losses = strategy.run(step, args=(batch,))  # per-row losses
        mean = strategy.reduce("MEAN", losses, axis=0)
        ```
        """
        from kdist.strategies.reductions import reduce

        return reduce(self, reduce_op, value, axis)

    def gather(self, value: object, axis: int) -> Any:
        """Concatenates the values of all replicas of all workers along an axis.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            value: A `kdist.DistributedValues` of tensors with at least one axis, or a structure of them.
            axis: The axis to concatenate along. Shapes can differ along it.

        Returns:
            A structure of tensors, equal on all workers, in the order of the replicas.

        Raises:
            InvalidArgumentError: If the axis does not exist, or shapes differ along another axis.
            WorkerMismatchError: If dtypes, or shapes along another axis, differ between the workers.
            StrategyScopeError: If you call it inside a replica.

        Example:

        ```python
        predictions = strategy.gather(strategy.run(model, args=(batch,)), axis=0)
        ```
        """
        from kdist.strategies.reductions import gather

        return gather(self.runtime, value, axis)

    def experimental_local_results(self, value: object) -> tuple[Any, ...]:
        """Returns the components of a value, one per replica of this worker.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            value: A value or a structure of values, for example an element of a distributed dataset.

        Returns:
            A tuple with one value per local replica. A dictionary, list or tuple becomes one structure per
            replica, even if its leaves are not distributed. Any other undistributed value becomes `(value,)`.
            A Keras variable is repeated once per replica. If it has `synchronization="on_read"`, you get each
            replica's value, and all workers must call this method together.
        """
        import keras

        from kdist.values import PerReplica, local_results

        def of_variable(leaf: object) -> object:
            if not isinstance(leaf, keras.Variable) or current_replica() is not None:
                return leaf
            if leaf.synchronization == "on_read":
                return self.run(lambda: leaf.value)
            return PerReplica([leaf] * len(self.runtime.devices))

        value = keras.tree.map_structure(of_variable, value)
        return local_results(value, len(self.runtime.devices))

    def __repr__(self) -> str:
        return describe(self)
