"""`TensorFlowCore`: the interface of loops and steps to a native `tf.distribute` strategy and its workers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import tensorflow as tf

from kdist.arrays.row_exchange import gather_rows
from kdist.backends.contract import Runtime
from kdist.backends.tensorflow.components import Components
from kdist.backends.tensorflow.workers import Workers
from kdist.errors import UnsupportedError
from kdist.topology import Topology

if TYPE_CHECKING:
    import keras


_cores: weakref.WeakSet[TensorFlowCore] = weakref.WeakSet()


@contextlib.contextmanager
def aligned() -> Iterator[None]:
    """After Ctrl-C or an error between two replicas, gives the next collective of all local devices one number.

    TensorFlow counts the collectives of each device in Python. Tensors of devices with different numbers never find
    each other, and the next step would hang.
    """
    try:
        yield
    except BaseException:
        for core in [*_cores]:
            keys = getattr(core.native.extended, "_collective_keys", None)
            for next_of in () if keys is None else [*keys._instance_key_table.values()]:
                next_of.update(dict.fromkeys(next_of, max(next_of.values(), default=0)))
        raise


class TensorFlowCore(Runtime):
    """The replicas and variables of one native strategy, and the workers of the cluster."""

    group: Workers

    exchanges_in_programs = True

    def __init__(self, native: tf.distribute.Strategy, topology: Topology, group: Workers) -> None:
        super().__init__(topology, group)
        self.native = native
        self.components = Components(self)
        _cores.add(self)

    @contextlib.contextmanager
    def engine_errors(self) -> Iterator[None]:
        """Also prepares for the next step; see `aligned`."""
        with aligned(), super().engine_errors():
            yield

    def scope(self) -> AbstractContextManager[object]:
        """Mirrors new variables over the devices, or places them on the device that holds all variables.

        The native scope is entered only while a variable is created. Inside it, TensorFlow cannot convert a
        variable to a number or apply an optimizer, and Keras divides losses by the number of replicas.
        """
        return tf.variable_creator_scope(self._mirrored)

    def _mirrored(self, next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable:
        from tensorflow.python.framework import ops

        if tf.distribute.has_strategy():  # the running replica's, or the user's native strategy
            return next_creator(**kwargs)
        # Keras's metrics request ON_READ variables, and every read of such a variable costs a collective.
        # Plain mirrored variables are enough, because a ReplicaScope equalizes all written values with one
        # collective. `Components` holds the separate values of the replicas in `run`.
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            kwargs["synchronization"] = tf.VariableSynchronization.AUTO
        if self.topology.is_central:  # one variable for all replicas; `Components` holds a copy per replica
            with tf.device(self.topology.parameter_devices[0]):
                return next_creator(**kwargs)
        with self.native.scope():
            # The native scope's creator is on top. `tf.Variable` would call the user's creators again.
            *_, (_, create) = ops.get_default_graph()._variable_creator_stack
            return create(next_creator, **kwargs)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Hides the variable creators and the running native replica. There is no public API for this."""
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
        return bool(tf.executing_eagerly())

    def broadcast_variables(self, variables: Sequence[keras.Variable]) -> None:
        self.group.broadcast(variables)

    def to_holder(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with tf.device(self.topology.parameter_devices[0]):
            return [tf.identity(part) for part in parts]

    def sum_over_workers(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [self.group.sum(tensor) for tensor in tensors]

    def gather_over_workers(self, tensor: tf.Tensor) -> tf.Tensor:
        if self.num_workers == 1:
            return tensor
        if tensor.dtype == tf.string:  # TensorFlow cannot add or gather it
            if not self.can_exchange:
                raise UnsupportedError(
                    "Cannot gather strings of several workers inside a compiled function on TensorFlow.",
                    received={"shape": tuple(tensor.shape)},
                    hint="Call strategy.gather outside of the function, or gather integers.",
                )
            return tf.constant(gather_rows(self.group, [tensor.numpy()]), tf.string)
        mine = tf.one_hot(self.worker_index, self.num_workers, dtype=tf.int32) * tf.shape(tensor)[0]
        return self.group.all_gather_rows(tensor, self.group.sum(mine))

    def local_values(self, variable: keras.Variable) -> Sequence[tf.Tensor]:
        value = variable.value
        return value.values if isinstance(value, tf.distribute.DistributedValues) else [value]
