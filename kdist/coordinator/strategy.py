"""Asynchronous training: variables on servers, and workers that come and go."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.backends import get_backend
from kdist.backends.coordination import Coordination
from kdist.cluster import ClusterResolver, TFConfigClusterResolver
from kdist.cluster.roles import coordinator_cluster, number_of
from kdist.coordinator.closures import Closures
from kdist.coordinator.staleness import Staleness
from kdist.errors import InvalidArgumentError
from kdist.strategies.description import Description
from kdist.strategies.strategy import Strategy
from kdist.topology import Topology


class ParameterServerStrategy(Strategy):
    """Variables live on parameter servers; each worker takes steps on its own, on the newest values that it finds.

    Make it on the coordinator: the task of type "chief". The tasks of type "worker" and "ps" run a `kdist.Server`.
    Models that are created in the scope are trained by `fit`, or by functions that a
    `kdist.coordinator.ClusterCoordinator` schedules. A worker may be lost and come back; its step is taken by another
    one, and counts once.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/ParameterServerStrategy

    Args:
        cluster_resolver: Says where workers and servers are; `TF_CONFIG` by default.
        variable_partitioner: Says into how many parts a variable is divided among the servers:
            `kdist.experimental.partitioners.MinSizePartitioner(max_shards=2)`. `None`: each is whole on one of them.
        synchronous: Whether all workers share each batch of `fit`, as under `MultiWorkerMirroredStrategy`.
        max_staleness: By how many updates of others the variables may be behind on which a step was computed, when it
            is applied. 0 takes one step after the other; `None` sets no bound.
        timeout: Seconds in which all workers and servers must have come.

    Raises:
        ClusterConfigError: The cluster has no worker or no server, or this task is not its coordinator.
        WorkerTimeoutError: A worker or server did not come; the message names it.

    Example:

    ```python
    resolver = kdist.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        kdist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
    strategy = kdist.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
    model.fit(x, y, batch_size=64)
    ```
    """

    coordination: Coordination | None = None
    """Drives the workers; `None` where one program runs on all of them."""

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        synchronous: bool = False,
        max_staleness: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        self._cluster_resolver = cluster_resolver or TFConfigClusterResolver()
        cluster = coordinator_cluster(self._cluster_resolver)
        _check(variable_partitioner, max_staleness)
        self.is_synchronous = synchronous
        self._told = Description(
            tasks=(
                number_of("worker", len(cluster.workers)),
                number_of("ps", len(cluster.servers)),
                *(["synchronous"] if synchronous else []),
            ),
            source="TF_CONFIG" if cluster_resolver is None else type(cluster_resolver).__name__,
        )
        backend = get_backend()
        if synchronous and backend.synchronous_runtime is not None:
            super().__init__(backend.synchronous_runtime(cluster, timeout))
            return
        # Here, since they bring Keras along.
        from kdist.coordinator.group import GroupSteps
        from kdist.coordinator.own import OwnCoordination
        from kdist.coordinator.steps import CoordinatorRuntime, ScheduledSteps

        closures = Closures(Staleness(max_staleness))
        common = (closures, cluster, variable_partitioner, synchronous, timeout)
        if backend.native_coordination is not None:
            self.coordination = backend.native_coordination(self, *common)
        else:
            assert backend.coordination_engine is not None
            self.coordination = OwnCoordination(self, backend.coordination_engine(), *common)
        atexit.register(self.coordination.close)
        runtime = backend.create_runtime(Topology(backend.list_devices()[:1]))
        steps = GroupSteps if synchronous else ScheduledSteps
        super().__init__(CoordinatorRuntime(runtime, self.coordination, steps))  # type: ignore[arg-type]

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that says where workers and servers are."""
        return self._cluster_resolver

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Calls a function in the replica of the worker, in a scheduled function; elsewhere on the coordinator."""
        if self.coordination is not None and self.coordination.in_closure():
            return self.coordination.run(self, fn, tuple(args), dict(kwargs or {}))
        return super().run(fn, args, kwargs, options)


def _check(variable_partitioner: Any, max_staleness: Any) -> None:
    if variable_partitioner is not None and not callable(variable_partitioner):
        raise InvalidArgumentError(
            "`variable_partitioner` is not a function of a shape and a dtype.",
            received={"variable_partitioner": variable_partitioner},
            hint="For example: kdist.experimental.partitioners.MinSizePartitioner(max_shards=2)",
        )
    if max_staleness is not None and (not isinstance(max_staleness, int) or max_staleness < 0):
        raise InvalidArgumentError(
            "`max_staleness` is neither None nor an integer of at least 0.",
            received={"max_staleness": max_staleness},
            hint="Pass a number of updates, or None for no limit.",
        )
