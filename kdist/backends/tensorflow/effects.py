"""Records how scheduled functions change variables on TensorFlow, and commits the changes after the run.

The function runs on a worker and computes only gradients and differences. These are copied to the servers.
When all have arrived, a function of the coordinator applies them without the worker. If a worker dies, either
nothing was applied and the function runs again, or everything was applied.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf
from tensorflow.python.distribute.sharded_variable import ShardedVariable
from tensorflow.python.eager import record, tape

from kdist import keras_hooks
from kdist.arrays.structures import merged
from kdist.backends.aggregation import NotesAdditions
from kdist.backends.coordination import experimental_get_current_worker_index
from kdist.backends.tensorflow.served import offsets_of, shards_of
from kdist.errors import UnsupportedError

# Tensors with at least this many elements are sent separately, because packing takes longer than a message.
_LARGE = 16_384


@dataclass
class Write:
    """A variable that a function has written, and whether its change is added to the server's value."""

    variable: keras.Variable
    is_addition: bool


@dataclass
class Update:
    """A call of an optimizer's `apply`."""

    optimizer: keras.Optimizer
    variables: list[keras.Variable]


class ClosureScope(NotesAdditions, keras.StatelessScope):
    """Gives a traced function access to the servers' variables, and records its changes.

    It reads a variable that is not trainable once, and then sees this value and its own writes. `initialize`
    initializes a variable that has no value yet.
    """

    def __init__(self, initialize: Callable[[keras.Variable], None]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._initialize = initialize
        self._graph = tf.compat.v1.get_default_graph()
        self._read: dict[int, tf.Tensor] = {}
        self._written: dict[int, tuple[Write, tf.Tensor]] = {}
        self._updates: list[tuple[Update, list[tf.Tensor | tf.IndexedSlices | None]]] = []

    def get_current_value(self, variable: keras.Variable) -> tf.Variable | tf.Tensor:
        if id(variable) in self._written:
            return self._written[id(variable)][1]
        if keras_hooks.native_value(variable) is None:
            self._initialize(variable)
        native = keras_hooks.native_value(variable)
        if not variable.trainable or self.is_adding:
            return self._value(variable)
        if not isinstance(native, ShardedVariable):
            return native
        value = self._value(variable)
        tape.variable_accessed(value)
        return value

    def _value(self, variable: keras.Variable) -> tf.Tensor:
        """Reads a variable once, outside of every loop and branch."""
        if id(variable) not in self._read:
            with self._graph.as_default():
                value = tf.identity(tf.convert_to_tensor(keras_hooks.native_value(variable)))
                if stride := keras_hooks.seed_stride(
                    variable
                ):  # workers that read the same seed state must draw different numbers
                    index = tf.cast(experimental_get_current_worker_index() * stride, value.dtype)
                    value += tf.stack([index, tf.zeros_like(index)])
                # Keras and the tapes treat a tensor with these attributes as a variable.
                value.handle, value.trainable = value, True
                self._read[id(variable)] = value
        return self._read[id(variable)]

    def _require_no_branch(self) -> None:
        if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self._graph:
            raise UnsupportedError(
                "A scheduled function changes a variable in a branch, a loop over tensors or an inner `tf.function`.",
                hint="Compute the value there, and assign it outside: v.assign(keras.ops.where(x > 0, v + x, v))",
            )

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        self._require_no_branch()
        variable, value = update
        is_number = not variable.trainable and keras.backend.standardize_dtype(variable.dtype) != "bool"
        known = self._written.get(id(variable))
        is_addition = (self.is_adding or is_number) and (known is None or known[0].is_addition)
        if is_addition:
            self._value(variable)
        self._written[id(variable)] = Write(variable, is_addition), tf.cast(value, variable.dtype)

    def take_gradients(
        self,
        optimizer: keras.Optimizer,
        grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
        variables: Sequence[keras.Variable],
    ) -> None:
        """Replaces an optimizer's `apply`, because the servers apply the gradients."""
        self._require_no_branch()
        self._updates.append((Update(optimizer, list(variables)), list(grads)))

    def take(self, variable: keras.Variable, indices: tf.Tensor) -> tf.Tensor | None:
        """Returns rows of a variable, so that only these are sent; `None` if the whole variable is needed."""
        native = keras_hooks.native_value(variable)
        if native is None or id(variable) in self._written or not isinstance(indices, tf.Tensor):
            return None
        if tf.compat.v1.get_default_graph() is not self._graph:
            return None  # in a branch or a loop, whose gradient does not support operations of a tape
        indices = tf.where(indices < 0, indices + tf.cast(native.shape[0], indices.dtype), indices)
        rows = self._rows(variable, native, tf.reshape(indices, [-1]))
        return tf.reshape(rows, tf.concat([tf.shape(indices), native.shape[1:]], axis=0))

    def _rows(
        self, variable: keras.Variable, native: tf.Variable | ShardedVariable, indices: tf.Tensor
    ) -> tf.Tensor:
        """Looks up each row once. The gradient keeps occurrences separate, because optimizers square them."""
        whole = not isinstance(native, ShardedVariable)
        with record.stop_recording():
            unique, places = tf.unique(indices)
            rows = tf.gather(native, unique) if whole else tf.nn.embedding_lookup(native, unique)
            rows = tf.gather(rows, places)
        if variable.trainable:
            # The tape watches the whole value, for which the gradient is requested. It is not read.
            value = self.get_current_value(variable)
            if whole:
                tape.variable_accessed(value)

            def backward(upstream: tf.Tensor) -> list[tf.IndexedSlices]:
                return [
                    tf.IndexedSlices(
                        tf.convert_to_tensor(upstream), indices, tf.constant(native.shape.as_list())
                    )
                ]

            record.record_operation("ServedRows", [rows], [value.handle], backward)
        return rows

    def effects(self) -> tuple[Plan, list[tf.Tensor]]:
        """Returns the function's changes: the plan, which all calls share, and the tensors of this call."""
        plan = Plan()
        for update, grads in self._updates:
            plan.add_update(update, grads)
        for write, value in self._written.values():
            base = None
            if write.is_addition:
                base = tf.cast(self._read[id(write.variable)], value.dtype)
                if write.variable.trainable or not value.dtype.is_floating:
                    value, base = value - base, None
            plan.add_write(write, value, base)
        return plan, plan.pack()


class _Slot:
    """The position of a tensor in the messages: the message index, the first element and the shape."""

    def __init__(self, message: int, start: int = 0, shape: Sequence[int] | None = None) -> None:
        self.message, self.start, self.shape = message, start, shape

    def of(self, messages: Sequence[tf.Tensor]) -> tf.Tensor:
        message = messages[self.message]
        if self.shape is None:
            return message
        return tf.reshape(message[self.start : self.start + math.prod(self.shape)], self.shape)


class Plan:
    """The changes of a function, as messages to servers. Small dense tensors of a server are packed.

    Created while the function is traced. The coordinator compiles it to a function that commits messages.
    """

    def __init__(self) -> None:
        self.devices: list[str] = []
        """The device of each message."""
        self._writes: list[tuple[Write, list[_Slot], list[_Slot] | None]] = []
        self._updates: list[tuple[Update, list[Sequence[_Slot | tuple[_Slot, _Slot]] | None]]] = []
        self._tensors: list[tf.Tensor] = []
        self._flat: dict[tuple[str, tf.DType], list[tuple[_Slot, tf.Tensor]]] = {}
        self._commit: Callable[[list[tf.Tensor]], None] | None = None
        self._lock = threading.Lock()

    def add_write(self, write: Write, value: tf.Tensor, base: tf.Tensor | None) -> None:
        """Adds a write. Without a base, an addition's value is the difference."""
        native = keras_hooks.native_value(write.variable)
        bases = None if base is None else self._dense(native, base)
        self._writes.append((write, self._dense(native, value), bases))

    def add_update(self, update: Update, grads: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> None:
        entries: list[Sequence[_Slot | tuple[_Slot, _Slot]] | None] = []
        for variable, grad in zip(update.variables, grads, strict=True):
            native = keras_hooks.native_value(variable)
            if grad is None:
                entries.append(None)
            elif isinstance(grad, tf.IndexedSlices):
                entries.append(self._sparse(native, grad))
            else:
                entries.append(self._dense(native, tf.reshape(tf.convert_to_tensor(grad), variable.shape)))
        self._updates.append((update, entries))

    def _dense(self, native: tf.Variable | ShardedVariable, value: tf.Tensor) -> list[_Slot]:
        shards = shards_of(native)
        parts = tf.split(value, [int(s.shape[0]) for s in shards]) if len(shards) > 1 else [value]
        slots = []
        for shard, part in zip(shards, parts, strict=True):
            if part.shape.num_elements() >= _LARGE:
                slots.append(self._message(shard.device, part))
                continue
            slot = _Slot(-1, shape=[int(length) for length in part.shape])
            self._flat.setdefault((shard.device, part.dtype), []).append((slot, part))
            slots.append(slot)
        return slots

    def _sparse(
        self, native: tf.Variable | ShardedVariable, grad: tf.IndexedSlices
    ) -> list[tuple[_Slot, _Slot]]:
        return [
            (self._message(shard.device, part.values), self._message(shard.device, part.indices))
            for shard, part in zip(shards_of(native), _split(grad, native), strict=True)
        ]

    def _message(self, device: str, tensor: tf.Tensor) -> _Slot:
        self.devices.append(device)
        self._tensors.append(tensor)
        return _Slot(len(self._tensors) - 1)

    def pack(self) -> list[tf.Tensor]:
        for (device, _), members in self._flat.items():
            message = self._message(
                device, tf.concat([tf.reshape(part, [-1]) for _, part in members], axis=0)
            )
            start = 0
            for slot, part in members:
                slot.message, slot.start = message.message, start
                start += part.shape.num_elements()
        tensors, self._tensors, self._flat = self._tensors, [], {}  # they would keep the trace alive
        return tensors

    def commit(self, messages: Sequence[tf.Tensor]) -> None:
        """Applies all changes once. The messages are already on their servers, so no worker is needed."""
        with self._lock:
            if self._commit is None:
                self._commit = tf.function(self._apply, autograph=False, reduce_retracing=True)
            self._commit(list(messages))

    def _apply(self, messages: Sequence[tf.Tensor]) -> None:
        scope = CommitScope()
        with scope:
            for update, entries in self._updates:
                grads = [
                    scope.gradient(v, entry, messages)
                    for v, entry in zip(update.variables, entries, strict=True)
                ]
                update.optimizer.apply(grads, update.variables)
        for write, slots, bases in self._writes:
            native = keras_hooks.native_value(write.variable)
            for index, (shard, slot) in enumerate(zip(shards_of(native), slots, strict=True)):
                with tf.device(shard.device):
                    value = slot.of(messages)
                    if bases is not None:
                        value = merged(
                            tf.where, tf.convert_to_tensor(shard), bases[index].of(messages), value
                        )
                    elif write.is_addition:
                        value = shard + value
                    shard.assign(value)


class CommitScope(keras.StatelessScope):
    """Runs optimizers on each variable's server, and shard by shard for sharded variables."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self._shard: int | None = None
        self._parts: dict[int, list[tf.Tensor | tf.IndexedSlices]] = {}
        self._kept: list[tf.Tensor | tf.IndexedSlices] = []

    def gradient(
        self,
        variable: keras.Variable,
        entry: Sequence[_Slot | tuple[_Slot, _Slot]] | None,
        messages: Sequence[tf.Tensor],
    ) -> tf.Tensor | tf.IndexedSlices | None:
        """Returns the gradient of a whole variable, and stores its parts."""
        if entry is None:
            return None
        native = keras_hooks.native_value(variable)
        parts = []
        for shard, part in zip(shards_of(native), entry, strict=True):
            with tf.device(shard.device):
                if isinstance(part, tuple):
                    values, indices = (slot.of(messages) for slot in part)
                    parts.append(tf.IndexedSlices(values, indices, tf.constant(shard.shape.as_list())))
                else:
                    parts.append(part.of(messages))
        whole = parts[0] if len(parts) == 1 else _joined(parts, native)
        self._parts[id(whole)] = parts
        self._kept.append(whole)
        return whole

    def get_current_value(self, variable: keras.Variable) -> tf.Variable:
        native = keras_hooks.native_value(variable)
        if self._shard is not None and isinstance(native, ShardedVariable):
            return native.variables[self._shard]
        return native

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        native = self.get_current_value(variable)
        with tf.device(shards_of(native)[0].device):
            native.assign(tf.cast(value, native.dtype))

    def _backend_update_step(
        self,
        optimizer: keras.Optimizer,
        grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
        variables: Sequence[keras.Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        """Replaces the optimizer's method, and updates each variable on its server."""
        elementwise = keras_hooks.is_elementwise(optimizer)
        for grad, variable in zip(grads, variables, strict=True):
            native = keras_hooks.native_value(variable)
            shards = shards_of(native)
            if len(shards) == 1 or not elementwise:
                with tf.device(shards[0].device):
                    optimizer.update_step(grad, variable, learning_rate)
                continue
            for index, part in enumerate(self._parts.get(id(grad)) or _split(grad, native)):
                self._shard = index
                try:
                    with tf.device(shards[index].device):
                        optimizer.update_step(part, variable, learning_rate)
                finally:
                    self._shard = None

    def _apply_weight_decay(self, optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> None:
        """Replaces the optimizer's method."""
        for variable in variables if optimizer.weight_decay is not None else ():
            if keras_hooks.decays(optimizer, variable):
                for shard in shards_of(keras_hooks.native_value(variable)):
                    with tf.device(shard.device):
                        rate = tf.cast(optimizer.learning_rate, shard.dtype)
                        shard.assign(shard - shard * tf.cast(optimizer.weight_decay, shard.dtype) * rate)


def _joined(
    parts: Sequence[tf.Tensor | tf.IndexedSlices], native: tf.Variable | ShardedVariable
) -> tf.Tensor | tf.IndexedSlices:
    if not isinstance(parts[0], tf.IndexedSlices):
        return tf.concat(parts, axis=0)
    indices = [
        part.indices + tf.cast(first, part.indices.dtype)
        for part, first in zip(parts, offsets_of(native), strict=False)
    ]
    return tf.IndexedSlices(
        tf.concat([part.values for part in parts], axis=0),
        tf.concat(indices, axis=0),
        tf.constant(native.shape.as_list()),
    )


def _split(
    grad: tf.Tensor | tf.IndexedSlices, native: tf.Variable | ShardedVariable
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Splits a gradient into parts for the shards of a variable."""
    shards, offsets = shards_of(native), offsets_of(native)
    if not isinstance(grad, tf.IndexedSlices):
        return list(tf.split(tf.convert_to_tensor(grad), [int(shard.shape[0]) for shard in shards]))
    parts = []
    for shard, first, end in zip(shards, offsets, offsets[1:], strict=False):
        values, indices = grad.values, grad.indices
        if len(shards) > 1:
            mine = tf.logical_and(indices >= first, indices < end)
            values, indices = tf.boolean_mask(values, mine), tf.boolean_mask(indices, mine) - first
        parts.append(tf.IndexedSlices(values, indices, tf.constant(shard.shape.as_list())))
    return parts


def look_up(variable: keras.Variable, indices: tf.Tensor) -> tf.Tensor | None:
    """Returns an embedding's rows if a function is being traced for a worker, otherwise `None`."""
    scope = keras_hooks.stateless_scope()
    return scope.take(variable, indices) if isinstance(scope, ClosureScope) else None
