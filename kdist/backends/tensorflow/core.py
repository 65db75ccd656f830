"""`TensorFlowCore`: a native `tf.distribute` strategy and its workers, as loops and steps see them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdist.backends.contract import Runtime
from kdist.backends.tensorflow.components import Components
from kdist.backends.tensorflow.workers import Workers
from kdist.topology import Central, Topology


class TensorFlowCore(Runtime):
    """The replicas of one native strategy, which holds variables and runs them, and the workers of the cluster."""

    group: Workers

    exchanges_in_programs = True

    def __init__(self, native: tf.distribute.Strategy, topology: Topology, group: Workers) -> None:
        super().__init__(topology, group)
        self.native = native
        self.is_central = isinstance(topology.storage, Central)
        self.components = Components(self)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Mirrors new variables over the devices, or puts them on the one that holds them.

        The native scope is entered for the creation alone: within it TensorFlow refuses to turn a variable into a
        number and to apply an optimizer, and Keras divides losses by the number of replicas.
        """
        with tf.variable_creator_scope(self._mirrored):
            yield

    def _mirrored(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        from tensorflow.python.framework import ops

        if tf.distribute.has_strategy():  # of the replica that runs, or the user's own
            return next_creator(**kwargs)
        # Keras's metrics ask for ON_READ variables, each of which would cost a collective every time it is read.
        # A ReplicaScope makes what a step writes equal on all replicas with one collective, so that plain mirrored
        # variables show it; `Components` has what each replica of `run` reads.
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            kwargs["synchronization"] = tf.VariableSynchronization.AUTO
        if self.is_central:  # for each replica `Components` has a copy of what is one variable for all
            with tf.device(self.topology.parameter_devices[0]):
                return next_creator(**kwargs)
        with self.native.scope():
            # The one that this scope has put on top. `tf.Variable` would ask those of the user's scopes again.
            *_, (_, create) = ops.get_default_graph()._variable_creator_stack
            return create(next_creator, **kwargs)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Hides the scope's creator of variables, and the native replica that runs; there is no public way to."""
        from tensorflow.python.distribute import distribute_lib
        from tensorflow.python.framework import ops

        local = ops.get_default_graph()._thread_local
        creators = getattr(local, "_variable_creator_stack", [])
        local._variable_creator_stack = []
        distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
        try:
            yield
        finally:
            distribute_lib._pop_per_thread_mode()
            local._variable_creator_stack = creators

    @property
    def can_exchange(self) -> bool:
        """Not in a graph, which runs later."""
        return bool(tf.executing_eagerly())

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Sends the chief's values with one collective a dtype."""
        self.group.broadcast(variables)

    def to_holder(self, parts: Sequence[Any]) -> list[Any]:
        """Returns tensors on the device that holds variables."""
        with tf.device(self.topology.parameter_devices[0]):
            return [tf.identity(part) for part in parts]

    def sum_over_workers(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums tensors over the workers."""
        return [self.group.sum(tensor) for tensor in tensors]

    def gather_over_workers(self, tensor: Any) -> Any:
        """Concatenates the rows of the workers' tensors."""
        if self.num_workers == 1:
            return tensor
        mine = tf.one_hot(self.worker_index, self.num_workers, dtype=tf.int32) * tf.shape(tensor)[0]
        return self.group.all_gather_rows(tensor, self.group.sum(mine))

    def local_values(self, variable: Any) -> Sequence[Any]:
        """Returns the components of a mirrored variable."""
        value = variable.value
        return value.values if isinstance(value, tf.distribute.DistributedValues) else [value]
