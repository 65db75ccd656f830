"""Asynchronous training with parameter servers."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.backends import get_backend
from kdist.backends.coordination import Coordination
from kdist.cluster import ClusterResolver, TFConfigClusterResolver
from kdist.cluster.roles import coordinator_cluster, number_of
from kdist.coordinator.closures import Closures, Staleness
from kdist.errors import InvalidArgumentError, check_positive, check_whole
from kdist.strategies.description import Description
from kdist.strategies.running import RunOptions
from kdist.strategies.strategy import Strategy
from kdist.topology import Topology


class ParameterServerStrategy(Strategy):
    """Trains asynchronously: servers hold the variables, and workers do not wait for each other.

    Create the strategy on the coordinator, which is the task of type "chief". The tasks of type "worker" and
    "ps" run a `kdist.Server`. Train a model that was created in the scope with `fit`, or with functions that
    a `kdist.coordinator.ClusterCoordinator` schedules. If a worker is lost, another worker repeats its step,
    and the servers apply the step once. The lost worker can join again.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/ParameterServerStrategy

    Args:
        cluster_resolver: Returns the addresses of the workers and servers. By default, it reads `TF_CONFIG`.
        variable_partitioner: Shards variables over the servers, for example
            `kdist.experimental.partitioners.MinSizePartitioner(max_shards=2)`; by default, it shards none.
        synchronous: Whether all workers share each batch of `fit`, as under `MultiWorkerMirroredStrategy`.
        max_staleness: The maximum number of updates of other steps between the read and the update of a step.
            0 runs the steps one after another; `None` sets no limit.
        timeout: Seconds to wait until all workers and servers have joined.

    Raises:
        ClusterConfigError: If the cluster has no worker or no server, or this task is not its coordinator.
        WorkerTimeoutError: If a worker or server does not join in time; the message names it.

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
    """Schedules functions on workers; `None` if the backend runs all workers itself (`synchronous=True`)."""

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        synchronous: bool = False,
        max_staleness: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        self._cluster_resolver = cluster_resolver or TFConfigClusterResolver()
        cluster = coordinator_cluster(self._cluster_resolver)
        _check(variable_partitioner, max_staleness, timeout)
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
        # Imported here, because these modules import Keras.
        from kdist.coordinator.group import GroupSteps
        from kdist.coordinator.grpc_coordination import GrpcCoordination
        from kdist.coordinator.steps import CoordinatorRuntime, ScheduledSteps

        closures = Closures(Staleness(max_staleness))
        common = (closures, cluster, variable_partitioner, synchronous, timeout)
        if backend.native_coordination is not None:
            self.coordination = backend.native_coordination(self, *common)
        else:
            assert backend.coordination_engine is not None
            self.coordination = GrpcCoordination(self, backend.coordination_engine(), *common)
        atexit.register(self.coordination.close)
        runtime = backend.create_runtime(Topology(backend.list_devices()[:1]))
        steps = GroupSteps if synchronous else ScheduledSteps
        super().__init__(CoordinatorRuntime(runtime, self.coordination, steps))  # type: ignore[arg-type]

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that returns the addresses of the workers and servers."""
        return self._cluster_resolver

    def run(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs a function in the worker's replica, or on the coordinator outside a scheduled function."""
        if self.coordination is not None and self.coordination.in_closure():
            return self.coordination.run(self, fn, tuple(args), dict(kwargs or {}))
        return super().run(fn, args, kwargs, options)


def _check(variable_partitioner: object, max_staleness: object, timeout: object) -> None:
    if variable_partitioner is not None and not callable(variable_partitioner):
        raise InvalidArgumentError(
            "`variable_partitioner` is not a function of a shape and a dtype.",
            received={"variable_partitioner": variable_partitioner},
            hint="For example: kdist.experimental.partitioners.MinSizePartitioner(max_shards=2)",
        )
    if max_staleness is not None:
        hint = "Pass a number of updates, or None for no limit."
        check_whole("max_staleness", max_staleness, hint, least=0)
    check_positive("timeout", timeout, "Pass a number of seconds.")
