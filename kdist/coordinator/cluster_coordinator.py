"""`ClusterCoordinator`: schedules functions on the workers of a `ParameterServerStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.backends.coordination import PerWorkerValues, RemoteValue
from kdist.coordinator.strategy import ParameterServerStrategy
from kdist.errors import InvalidArgumentError


class ClusterCoordinator:
    """Schedules functions on workers, without waiting for them.

    A function that a lost worker was running is run by another one; what it does to variables in `strategy.run` is
    done once. What a function raises is raised by the next `schedule`, `join` or `done`, and functions that wait are
    dropped.

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
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Lets some worker call a function, soon; does not wait.

        Args:
            fn: The function. What it refers to travels to the worker once, as it is at the first call.
            args: Its positional arguments; a per-worker iterator among them is the worker's own.
            kwargs: Its keyword arguments.

        Returns:
            A `RemoteValue`, which is fetched for what the function returned.

        Raises:
            BaseException: What a function has raised that was scheduled before.
        """
        if not callable(fn):
            raise InvalidArgumentError(
                "`fn` is not a function.",
                received={"fn": fn},
                hint="Pass a function: coordinator.schedule(step, args=(iterator,))",
            )
        return self._coordination.schedule(fn, tuple(args or ()), dict(kwargs or {}))

    def join(self) -> None:
        """Waits until every scheduled function has run.

        Raises:
            BaseException: What one of them has raised.
        """
        self._coordination.closures.wait()

    def done(self) -> bool:
        """Says whether every scheduled function has run.

        Raises:
            BaseException: What one of them has raised.
        """
        return self._coordination.closures.done()

    def fetch(self, val: Any) -> Any:
        """Waits for the `RemoteValue`s in a structure.

        Args:
            val: A `RemoteValue`, or a structure of them.

        Returns:
            The structure with what the functions have returned: NumPy arrays and Python values.
        """
        import keras

        return keras.tree.map_structure(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerValues:
        """Makes a dataset on each worker.

        Args:
            dataset_fn: A function without arguments that returns a dataset, which may come from
                `strategy.distribute_datasets_from_function`; or a dataset, of which each worker has a copy.

        Returns:
            A `PerWorkerValues`: `iter` of it goes to `schedule`, as an argument.
        """
        return self._coordination.create_per_worker_dataset(dataset_fn)
