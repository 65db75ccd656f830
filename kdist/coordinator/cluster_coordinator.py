"""`ClusterCoordinator`: schedules functions on the workers of a `ParameterServerStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kdist.backends.coordination import PerWorkerValues, RemoteValue
from kdist.coordinator.strategy import ParameterServerStrategy
from kdist.errors import InvalidArgumentError, check_function


class ClusterCoordinator:
    """Schedules functions on workers without waiting for them.

    If a worker is lost, another worker repeats its function. Changes of variables in `strategy.run` are still
    applied only once. If a function fails, the next `schedule`, `join` or `done` raises its error, and kdist
    drops the functions that are still waiting.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/coordinator/ClusterCoordinator

    Args:
        strategy: A `kdist.ParameterServerStrategy`.

    Example:

    ```python
    coordinator = kdist.coordinator.ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    for _ in range(100):
        coordinator.schedule(step_fn, args=(iterator,))
    coordinator.join()
    ```
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            raise InvalidArgumentError(
                "`strategy` is not a ParameterServerStrategy.",
                received={"strategy": strategy},
                hint="Create the strategy: kdist.ParameterServerStrategy(cluster_resolver)",
            )
        if strategy.is_synchronous:
            raise InvalidArgumentError(
                "ClusterCoordinator does not support synchronous=True, because it runs functions on single workers.",
                received={"strategy": "ParameterServerStrategy(synchronous=True)"},
                hint="Train with `fit`, or create the strategy without synchronous=True.",
            )
        assert strategy.coordination is not None
        self._strategy = strategy
        self._coordination = strategy.coordination

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., object],
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> RemoteValue:
        """Schedules one call of a function on any worker, and returns immediately.

        Args:
            fn: The function. It is captured at its first call, together with the values that it refers to.
            args: Its positional arguments. Arrays, lists and dictionaries are copied at once. For a per-worker
                iterator, each worker passes its own iterator.
            kwargs: Its keyword arguments.

        Returns:
            A `RemoteValue`. Its `fetch` method returns the result of the function.

        Raises:
            BaseException: If an earlier function failed; the error of that function.
        """
        check_function("fn", fn, "Pass a function: coordinator.schedule(step, args=(iterator,))")
        import keras

        def copied(leaf: object) -> object:
            if isinstance(leaf, np.ndarray):
                return leaf.copy()
            # Tensors of other backends than PyTorch cannot change.
            return leaf.clone() if keras.ops.is_tensor(leaf) and hasattr(leaf, "clone") else leaf

        # Sent to a worker later, when the program may have written other values into an array or a list.
        args, kwargs = keras.tree.map_structure(copied, (tuple(args or ()), dict(kwargs or {})))
        return self._coordination.schedule(fn, args, kwargs)

    def join(self) -> None:
        """Waits until all scheduled functions are done.

        Raises:
            BaseException: If a function failed; the error of that function.
        """
        self._coordination.closures.wait()

    def done(self) -> bool:
        """Returns whether all scheduled functions are done.

        Raises:
            BaseException: If a function failed; the error of that function.
        """
        return self._coordination.closures.done()

    def fetch(self, val: object) -> Any:
        """Waits for the `RemoteValue`s in a structure, and returns their results.

        Args:
            val: A `RemoteValue`, or a nested structure of `RemoteValue`s.

        Returns:
            The same structure with the results of the functions, as NumPy arrays and Python values.
        """
        import keras

        return keras.tree.map_structure(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val
        )

    def create_per_worker_dataset(self, dataset_fn: object) -> PerWorkerValues:
        """Creates a dataset on each worker.

        Args:
            dataset_fn: A function without arguments that returns a dataset, for example from
                `strategy.distribute_datasets_from_function`; or a dataset, which is copied to each worker.

        Returns:
            A `PerWorkerValues`. Pass its iterator, `iter(...)`, as an argument to `schedule`.
        """
        return self._coordination.create_per_worker_dataset(dataset_fn)
