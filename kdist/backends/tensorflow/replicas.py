"""A replica on TensorFlow, and the scope that gives it its components of variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from kdist import keras_hooks
from kdist.backends import debugging
from kdist.backends.aggregation import ReplicaScope, check_branch
from kdist.backends.replica import WIDE, Replica
from kdist.backends.tensorflow.collectives import SumsOfGraphs
from kdist.backends.tensorflow.components import is_shared, native_of
from kdist.context import StrategyLike, cross_replica

if TYPE_CHECKING:
    from kdist.arrays.types import R, Scalar, T
    from kdist.backends.tensorflow.core import TensorFlowCore


class CollectiveInXla(BaseException):
    """Raised by collectives in code for XLA. Keras adds text to an `Exception`, but not to this class."""


class TensorFlowReplica(Replica):
    """A replica that runs inside `tf.distribute.Strategy.run`."""

    def note(self, collective: str, tensors: Sequence[tf.Tensor]) -> None:
        """Compares collectives with other workers if `KDIST_DEBUG=1`, in a graph after tracing."""
        runtime = self.strategy.runtime
        if not debugging.is_on() or not runtime.can_exchange:
            super().note(collective, tensors)
        elif self.local_index == 0:
            with keras_hooks.without_scope(), runtime.suspended():
                debugging.check(runtime, collective, debugging.signature(tensors))

    def all_reduce_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if self.num_replicas_in_sync == 1:
            return list(tensors)
        self._require_no_xla()
        if in_memory := self._sums_in_memory(tensors):
            return in_memory(tensors)
        # TensorFlow keeps small integers on the host, and cannot reduce host and device tensors together.
        # float64 represents the integers that are summed here exactly.
        # A new tensor is on the replica's device, and TensorFlow reduces on the device of its input.
        sent = [tf.identity(t) if t.dtype.is_floating else tf.cast(t, tf.float64) for t in tensors]
        context = tf.distribute.get_replica_context()
        # One call per tensor, because TensorFlow concatenates the tensors of a call even if dtypes differ.
        # None for an empty tensor, which would crash TensorFlow's kernel for the devices of one worker.
        sums = [
            tensor
            if tensor.shape.num_elements() == 0
            else context.all_reduce(tf.distribute.ReduceOp.SUM, tensor)
            for tensor in sent
        ]
        return [tf.cast(total, tensor.dtype) for total, tensor in zip(sums, tensors, strict=True)]

    def _sums_in_memory(self, tensors: Sequence[tf.Tensor]) -> SumsOfGraphs | None:
        sums = self.strategy.runtime.group.sums_in_memory
        return sums if sums is not None and all(sums.can_sum(tensor.dtype) for tensor in tensors) else None

    def all_reduce_packed(
        self, tensors: Sequence[tf.Tensor], weight: Scalar | None = None, dtype: str | None = None
    ) -> list[tf.Tensor]:
        """Does not concatenate tensors for shared memory, which has room for all of them."""
        if dtype is not None or not self._sums_in_memory(tensors):
            return super().all_reduce_packed(tensors, weight, dtype)
        if weight is not None:
            tensors = [tensor * self.scalar(weight, tensor.dtype) for tensor in tensors]
        return self.all_reduce_sum(tensors)

    def _require_no_xla(self) -> None:
        if getattr(self.scope, "in_xla", False):
            raise CollectiveInXla

    def all_reduce_with_gradient(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums over all replicas. The gradient is weighted by the replica's `gradient_weight`."""

        @tf.custom_gradient
        def total(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                share = tf.cast(self.gradient_weight, tensor.dtype)
                return self.all_reduce_sum([upstream * share])[0] / share

            return self.all_reduce_sum([x])[0], gradient

        return total(tensor)

    def sum_gradients(
        self, gradients: Sequence[tf.Tensor | tf.IndexedSlices], variables: Sequence[keras.Variable]
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums dense gradients, and gathers gradients of looked-up rows (`tf.IndexedSlices`).

        Optimizers square each occurrence of a row separately, so a sum would not match the results of one
        device. A custom `CrossDeviceOps` does not receive these gradients, because it can only sum.
        """
        # The optimizer accumulates in dense arrays.
        adds_rows = self.kept_gradients is None
        sparse = [adds_rows and isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
        dense = [
            [item for item, is_sparse in zip(items, sparse, strict=True) if not is_sparse]
            for items in (gradients, variables)
        ]
        sums = iter(super().sum_gradients(*dense))
        return [
            self._gathered(gradient, variable) if is_sparse else next(sums)
            for gradient, variable, is_sparse in zip(gradients, variables, sparse, strict=True)
        ]

    def new_slots(self, arrays: Sequence[np.ndarray]) -> list[list[tf.Variable]]:
        runtime, slots = self.strategy.runtime, []
        with keras_hooks.without_scope(), tf.init_scope(), runtime.suspended():
            for name in runtime.devices:
                with tf.device(name):
                    slots.append([tf.Variable(array, trainable=False) for array in arrays])
        return slots

    def _gathered(self, slices: tf.IndexedSlices, variable: keras.Variable) -> tf.IndexedSlices:
        if self.num_replicas_in_sync == 1:
            return slices
        weight = self.gradient_weight
        if self.is_model_step:
            # If all replicas have the same rows, use only the first replica's, and not a fraction of each.
            rows = self.rows
            weight *= tf.math.divide_no_nan(rows.counts * rows.scalar_weight, rows.share)
        # Casts indices, because small integers may be on the host; see `all_reduce_sum`.
        values = slices.values * tf.cast(weight, slices.dtype)
        compression = self.strategy.runtime.compression if slices.dtype.name in WIDE else None
        if compression is not None:  # as the bits of float16, because TensorFlow cannot gather bfloat16
            values = tf.bitcast(tf.cast(values, compression), tf.float16)
        mine = tf.IndexedSlices(
            values,
            tf.cast(slices.indices, tf.int64),
            tf.constant(tf.TensorShape(variable.shape).as_list(), tf.int64),
        )
        # `tf.distribute` sums slices by concatenating them in the order of the replicas.
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, mine)
        values, indices = total.values, total.indices
        if compression is not None:
            values = tf.cast(tf.bitcast(values, compression), slices.dtype)
        if _are_unique(slices.indices):
            indices, positions = tf.unique(indices)
            values = tf.math.unsorted_segment_sum(values, positions, tf.size(indices))
        return tf.IndexedSlices(values, indices, mine.dense_shape)

    def gather_tensor(self, tensor: tf.Tensor, axis: int) -> tf.Tensor:
        self._require_no_xla()
        self.note(f"all_gather(axis={axis})", [])
        if tensor.dtype == tf.bfloat16:  # TensorFlow cannot gather it between workers
            sent = tf.cast(tensor, tf.float32)
        else:
            sent = tf.identity(tensor) if tensor.dtype.is_floating else tf.cast(tensor, tf.float64)
        return tf.cast(tf.distribute.get_replica_context().all_gather(sent, axis), tensor.dtype)

    def apply_gradients(self, apply: Callable[[], object]) -> object:
        """Runs Keras's `optimizer.apply` in each replica, or once if one device holds all variables."""
        if not self.strategy.runtime.topology.is_central or self.num_replicas_in_sync == 1:
            return super().apply_gradients(apply)

        def apply_once(_: object) -> object:
            with cross_replica(self.strategy), HolderScope(self):
                return apply()

        return self.call_once("apply_gradients", None, apply_once)

    def call_once(self, what: str, value: T, merge: Callable[[Sequence[T]], R]) -> R:
        self._require_no_xla()

        # Boxes hide the structure and its tensors from TensorFlow, which would flatten it.
        @tf.autograph.experimental.do_not_convert
        def merge_boxes(
            native: tf.distribute.Strategy, found: _Boxed | tf.distribute.DistributedValues
        ) -> None:
            boxes = found.values if isinstance(found, tf.distribute.DistributedValues) else [found]
            result = merge([box.value for box in boxes])
            for box in boxes:
                box.result = result

        mine = _Boxed(value)
        tf.distribute.get_replica_context().merge_call(merge_boxes, args=(mine,))
        self.scope.enter_again()
        return mine.result


def _are_unique(indices: tf.Tensor) -> bool:
    """Returns whether a gradient has one entry per row, as products with sparse matrices have, from `tf.unique`.

    The numbers themselves cannot tell: one replica may also look up each word of an embedding only once.
    """
    if isinstance(indices, tf.__internal__.EagerTensor):
        return False
    operation = indices.op
    while operation.type in ("Cast", "Identity", "Reshape"):
        operation = operation.inputs[0].op
    return operation.type in ("Unique", "UniqueV2")


class _Boxed:
    """A container that TensorFlow does not look into."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.result: Any = None


class TensorFlowScope(ReplicaScope):
    """Gives a replica access to its component of each mirrored variable.

    The variables that the step may write are read at the start. A write can happen in a branch of `tf.cond`,
    and tensors of a branch cannot be used outside it.
    """

    def __init__(self, replica: TensorFlowReplica, variables: Iterable[keras.Variable]) -> None:
        super().__init__(replica)
        self._strategy = replica.strategy
        runtime: TensorFlowCore = replica.strategy.runtime
        self._runtime = runtime
        self._index = replica.local_index
        self._components = runtime.components
        self._num_local = len(self._runtime.devices)
        self._graph = tf.compat.v1.get_default_graph()
        self._entered: dict[tuple[int, int], tf.Graph] = {}
        self.touched: dict[int, keras.Variable] = {}
        self.in_xla = False
        """Whether the graph that is being traced will be compiled by XLA."""
        self._at_start = {id(v): self.snapshot(v) for v in variables}

    def local(self, variable: keras.Variable) -> tf.Variable:
        if keras_hooks.native_value(variable) is None:
            initialize(variable, self._strategy)
        if self.is_untracked:  # an optimizer may write to the variable that it reads
            self.touched[id(variable)] = variable
        is_on_read = self.has_component(variable)
        if not is_on_read and not is_shared(variable, self._num_local):
            return native_of(variable, self._index, self._num_local)
        # Each branch of `tf.cond` is a separate graph. XLA cannot copy from another device.
        graph = self._graph if self.in_xla else tf.compat.v1.get_default_graph()
        key = (id(graph), id(variable))
        if key not in self._entered:
            self._entered[key] = graph
            with self._outside() if self.in_xla else contextlib.nullcontext():
                self._components.enter(variable, self._index, is_on_read)
        return self._components.get(variable, self._index, is_on_read).value

    @property
    def is_outermost(self) -> bool:
        """Whether the current graph is the replica's graph, not the graph of a branch or inner function."""
        return tf.compat.v1.get_default_graph() is self._graph

    def _outside(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if tf.executing_eagerly() else self._graph.as_default()

    def enter_again(self) -> None:
        """Called after a cross-replica function, which may have changed variables."""
        self._entered.clear()
        self._at_start.clear()  # later additions count from the new values

    def write(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Assigns to the component without the aggregation of `tf.distribute`."""
        component = self.local(variable)
        self.touched[id(variable)] = variable
        component.assign(tf.cast(value, component.dtype))

    def show(self, variable: keras.Variable, total: tf.Tensor) -> None:
        self.local(variable)
        self._components.show(variable, self._index, total)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Records a write. Raises an error in a branch if the write cannot be aggregated."""
        super().add_update(update)
        write = self._written.get(id(update[0]))
        if write and write.is_set and tf.compat.v1.get_default_graph() is not self._graph:
            check_branch(update[0])

    def snapshot(self, variable: keras.Variable) -> tf.Tensor:
        """Reads the component, which can be sharded over parameter servers."""
        return tf.identity(tf.convert_to_tensor(self.local(variable)))

    def old_value(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the value at the start of the step, or the current value if it was not read then."""
        known = self._at_start.get(id(variable))
        if known is not None:
            return known
        with self._outside():
            return self.snapshot(variable)  # tensors of a branch cannot be used outside it

    def aggregated(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Stores the aggregated value, from which later writes in the same step are counted."""
        super().aggregated(variable, value)
        self._at_start[id(variable)] = tf.identity(value)

    def change_real_variables(self, change: Callable[[], R]) -> R:
        """Writes shared variables back, because the function uses the variables themselves."""
        self.commit()
        return change()

    def commit(self) -> None:
        """Writes shared variables back after all replicas have ended."""
        for variable in self.touched.values():
            if is_shared(variable, self._num_local) and not self.has_component(variable):
                keras_hooks.native_value(variable).assign(self._components.get(variable, 0, False).value)

    def equalize(self, scopes: Iterable[TensorFlowScope]) -> None:
        """Copies the first replica's values to all local replicas after an exception."""
        for variable in {key: v for scope in scopes for key, v in scope.touched.items()}.values():
            first, *others = [native_of(variable, i, self._num_local) for i in range(self._num_local)]
            for other in others:
                if other is not first:
                    other.assign(first)
            self._components.reset(variable)


class HolderScope(keras.StatelessScope):
    """Gives code that runs once for all replicas access to the variables, and initializes new variables."""

    def __init__(self, replica: TensorFlowReplica) -> None:
        super().__init__(initialize_variables=False)
        self._strategy = replica.strategy

    def get_current_value(self, variable: keras.Variable) -> tf.Variable:
        if keras_hooks.native_value(variable) is None:
            initialize(variable, self._strategy)
        return keras_hooks.native_value(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        self.get_current_value(variable).assign(tf.cast(value, variable.dtype))


def initialize(variable: keras.Variable, strategy: StrategyLike) -> None:
    """Initializes a variable that was created in a stateless scope, where Keras defers initialization.

    This runs outside replicas and graphs, as if before the step.
    """
    runtime = strategy.runtime
    with keras_hooks.without_scope(), tf.init_scope(), runtime.suspended(), cross_replica(strategy):
        with runtime.scope(), keras.StatelessScope():
            pass
        runtime.broadcast_variables([variable])
