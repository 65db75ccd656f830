"""The base class of all strategies: which replicas there are, and the scope that makes them current."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from kdist.context import Scope, current_replica, has_strategy, note_joined
from kdist.data.input_options import InputOptions
from kdist.names import without_left_out
from kdist.strategies.description import Description, announce, describe

if TYPE_CHECKING:
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

    own_ops: CrossDeviceOps | None = None
    """The user's own class by which gradients and values are reduced; `None` where the engine does it."""
    _told: Description = Description()
    """What its `repr` tells that nothing else says."""

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
        """The devices and workers of this strategy, as the backend drives them."""
        return self._runtime

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over which gradients are summed, over all workers."""
        return self._runtime.num_replicas

    @property
    def extended(self) -> StrategyExtended:
        """What most users need not know of a strategy; see `StrategyExtended`."""
        from kdist.strategies.extended import StrategyExtended

        return StrategyExtended(self)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of a multi-worker strategy; `None` for a strategy of one process."""
        return None

    @property
    def keras_distribution(self) -> Any:
        """The `keras.distribution.Distribution` that this strategy amounts to, for code that asks Keras.

        kdist needs no distribution to be set. One that is set when a strategy is made, or its scope is entered, must
        say the same; in the scope, and while the strategy's models train, Keras sees none.

        Returns:
            A `keras.distribution.DataParallel`, or a `ModelParallel` where variables are divided.

        Raises:
            UnsupportedError: On the backend `keras.distribution` does nothing, or it has nothing like this strategy.
        """
        from kdist.strategies.distributions import distribution_of

        return distribution_of(self._runtime)

    def scope(self) -> Scope[Self]:
        """Returns a context manager that makes this strategy current.

        Models, optimizers and metrics created inside belong to the strategy, and remember it: `fit` works
        outside the scope too. At its end all workers have the chief's values of the variables that were created
        inside: every worker must leave it, having created the same ones. Scopes of the same strategy may be
        nested, those of different ones not; a scope counts for the thread that entered it.

        Returns:
            A context manager whose `as` target is the strategy.

        Raises:
            StrategyScopeError: On entering, inside the scope of another strategy or inside a replica.
            WorkerMismatchError: On leaving, if workers have created different variables.
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
            # The other workers may have come further, or not as far.
            self.new_variables.forget()
            raise
        if not has_strategy():  # this was the outermost scope
            self.new_variables.share()

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
                once an epoch) or an iterable, of batches with the rows of one replica; or of single elements, of
                which each replica takes one a step, until there is not one for each.
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
        from kdist.data.numpy_dataset import NumpyDataset

        native = get_backend().numpy_dataset(numpy_input)
        return NumpyDataset(numpy_input) if native is None else native

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

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls a function in every replica, each with its component of distributed arguments.

        In the function, `kdist.get_replica_context()` says which replica runs. Gradients that
        `optimizer.apply` is given are summed over all replicas; what the function writes to Keras variables is
        aggregated at its end, by each variable's `aggregation`; of one with `synchronization="on_read"` each
        replica keeps its own component, and outside there is what they aggregate to. A mean loss of Keras's is
        divided by the number of replicas, so that the sum is a mean.

        On JAX the function is compiled, once for each structure, shape and dtype of its arguments; Python
        numbers, strings and what the function closes over are constants of the program. On TensorFlow and
        PyTorch it runs as it is; `kdist.function` around the call compiles it on TensorFlow.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            fn: The function of a replica.
            args: Positional arguments. Of a `kdist.DistributedValues` (what a distributed dataset gives) each
                replica gets its component; anything else goes to all as it is.
            kwargs: Keyword arguments, as `args`.
            options: A `kdist.RunOptions`.

        Returns:
            The function's result: a structure of `kdist.DistributedValues` with one component per replica of
            this worker, or the value itself if the worker has one replica. A Python number or string that all
            replicas return is one value, and so is a tensor that comes from `merge_call` for all of them.

        Raises:
            StrategyScopeError: Inside a replica.

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

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None) -> Any:
        """Reduces a value over all replicas, of all workers.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            reduce_op: `kdist.ReduceOp.SUM` or `MEAN`, or its name.
            value: A `kdist.DistributedValues`, or a structure of them, such as `run` returns.
            axis: An axis to reduce along too, within each replica; usually 0, the rows. In a `MEAN` every
                element then counts the same, also where replicas have different numbers of rows. `None` to
                reduce over the replicas only, whose shapes must be equal.

        Returns:
            A structure of tensors, equal on all workers. The `MEAN` of integers has the dtype of a true division
            in TensorFlow: float32 for 8 and 16 bits, else float64. JAX has float64 only if `jax_enable_x64` is set.

        Raises:
            InvalidArgumentError: There is no such operation or axis, or a value that is not distributed is to
                be summed.
            StrategyScopeError: Inside a replica.

        Example:

        ```python
        losses = strategy.run(step, args=(batch,))  # per-row losses
        mean = strategy.reduce("MEAN", losses, axis=0)
        ```
        """
        from kdist.strategies.reductions import reduce

        return reduce(self, reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the values of all replicas, of all workers, along an axis.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            value: A `kdist.DistributedValues` of tensors of rank 1 at least, or a structure of them. Their
                shapes may differ along `axis`.
            axis: The axis to concatenate along.

        Returns:
            A structure of tensors, equal on all workers, in the order of the replicas.

        Raises:
            InvalidArgumentError: The values have no such axis, or differ along another one.
            StrategyScopeError: Inside a replica.

        Example:

        ```python
        predictions = strategy.gather(strategy.run(model, args=(batch,)), axis=0)
        ```
        """
        from kdist.strategies.reductions import gather

        return gather(self.runtime, value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of a value, one for each replica of this worker.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

        Args:
            value: A value or a structure of values, such as an element of a distributed dataset.

        Returns:
            One value per local replica. A dictionary, list or tuple becomes one structure per replica, whether
            its leaves are distributed or not; any other value that is not distributed becomes `(value,)`. A
            Keras variable becomes the variable once per replica, or, with `synchronization="on_read"`, each
            replica's own value; all workers must ask for these values together.
        """
        import keras

        from kdist.values import PerReplica, local_results

        def of_variable(leaf: Any) -> Any:
            if not isinstance(leaf, keras.Variable) or current_replica() is not None:
                return leaf
            if leaf.synchronization == "on_read":
                return self.run(lambda: leaf.value)
            return PerReplica([leaf] * len(self.runtime.devices))

        value = keras.tree.map_structure(of_variable, value)
        num_local = len(self.runtime.devices)
        return local_results(value, num_local, keras.tree.map_structure, keras.tree.is_nested)

    def __repr__(self) -> str:
        return describe(self)
