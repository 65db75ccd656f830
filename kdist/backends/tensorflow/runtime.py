"""`TensorFlowRuntime`: the replicas and workers of a strategy, and the code that runs in them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import values as native_values

from kdist.arrays.types import Shape
from kdist.backends.contract import StepFunction
from kdist.backends.tensorflow import functions, iteration, steps, tasks, workers
from kdist.backends.tensorflow.core import TensorFlowCore
from kdist.backends.tensorflow.served import Placement
from kdist.cluster import environment
from kdist.cluster.roles import ServerCluster
from kdist.topology import Central, Topology
from kdist.values import PerReplica


class PerReplicaSpec(native_values.PerReplicaSpec):
    """The `tf.TypeSpec` of a `kdist.PerReplica`, as `tf.distribute` has for its own `PerReplica`."""

    value_type = property(lambda self: PerReplica)

    def _to_components(self, value: PerReplica) -> tuple[object, ...]:
        return value.values

    def _from_components(self, components: Sequence[object]) -> PerReplica:
        return PerReplica(components)


class TensorFlowRuntime(TensorFlowCore):
    """Runs functions and steps in the replicas of the native strategy."""

    run = functions.run

    def traced(self, iterator: Any) -> iteration.GraphIterator | None:
        """Returns an iterator that reads when the graph runs; `None` in eager mode."""
        return None if tf.executing_eagerly() else iteration.traced(iterator)

    def element_of(self, iterator: Any) -> iteration.Element:
        """Returns the description that all iterators of one trace of a `tf.function` share."""
        return iteration.Element.of(iterator)

    def element_spec(self, part: object, inner_shapes: list[Shape] | None) -> Any:
        """Returns `tf.TypeSpec`s, which can be the signature of a `tf.function`."""
        number = len(self.devices)
        element = iteration.Element(self, self.place([part] * number)[0], inner_shapes)
        return element.packed(
            element.specs if number == 1 else [PerReplicaSpec(*[spec] * number) for spec in element.specs]
        )

    def begin_loop(self) -> None:
        """Raises an error in a graph, because AutoGraph has not replaced this loop."""
        if not tf.executing_eagerly():
            raise iteration.LoopInGraphError

    def place(self, parts: Sequence[object]) -> list[object]:
        placed = []
        for part, name in zip(parts, self.devices, strict=True):
            with tf.device(name):
                placed.append(None if part is None else keras.tree.map_structure(steps.on_device, part))
        return placed

    def step_function(self, model: keras.Model, kind: str) -> StepFunction:
        return steps.TensorFlowSteps(self, model, kind)


class SynchronousRuntime(TensorFlowRuntime):
    """Trains synchronously with parameter servers, with one replica per worker.

    It runs replicas on workers, as `CentralStorageStrategy` runs them on the devices of a machine.

    TensorFlow runs the coordinator's programs over all tasks. Variables are not sharded. Each replica copies
    the variables that it reads, and optimizers run on the servers that hold the variables.
    """

    def __init__(self, cluster: ServerCluster, timeout: float) -> None:
        environment.set_default("GRPC_FAIL_FAST", "use_caller")
        found, servers = tasks.of(cluster)
        tasks.require([*found, *servers], timeout)
        tf.config.experimental_connect_to_cluster(
            tasks.native_spec(cluster), job_name="chief", protocol="grpc"
        )
        devices = tuple(task.device for task in found)
        self.placement = Placement([server.device for server in servers], None)
        native = tf.distribute.MirroredStrategy(
            [tasks.COORDINATOR], tf.distribute.ReductionToOneDevice(reduce_to_device=servers[0].device)
        )
        # The constructor accepts only devices of one task, for collectives. A reduction supports other tasks.
        native.extended._initialize_strategy(devices)
        topology = Topology(devices, storage=Central(servers[0].device))
        super().__init__(native, topology, _Remote(found, servers))

    def scope(self) -> AbstractContextManager[object]:
        """Places new variables on the servers in turn."""
        return self.placement.scope()


class _Remote(workers.Workers):
    """Represents one process, although other tasks run the programs of its replicas."""

    def __init__(self, found: Sequence[tasks.Task], servers: Sequence[tasks.Task]) -> None:
        super().__init__()
        self._tasks = [*found, *servers]

    def explain_failure(self, error: BaseException) -> BaseException:
        lost = tasks.lost(self._tasks) if isinstance(error, tf.errors.OpError) else []
        return tasks.lost_error(lost) if lost else error
