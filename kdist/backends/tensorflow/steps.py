"""Training, test and prediction steps on TensorFlow: one `tf.function` over all local replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops

from kdist import keras_hooks
from kdist.arrays.memory import aligned_empty
from kdist.arrays.rows import is_scipy, leaves_of, torch_to_numpy
from kdist.backends.contract import ReplicaBatches
from kdist.backends.model_step import ReplicatedSteps
from kdist.backends.replica import shares_of
from kdist.backends.tensorflow.core import TensorFlowCore
from kdist.backends.tensorflow.functions import in_replicas
from kdist.backends.tensorflow.iteration import spec_of_any_rows
from kdist.backends.tensorflow.kept_gradients import TensorFlowKeptGradients
from kdist.backends.tensorflow.replicas import TensorFlowReplica
from kdist.backends.tensorflow.xla import compiled_call


class TensorFlowSteps(ReplicatedSteps):
    """Runs the compiled steps of one model in the replicas of a native strategy."""

    runtime: TensorFlowCore

    def __init__(self, runtime: TensorFlowCore, model: keras.Model, kind: str) -> None:
        super().__init__(runtime, model, kind)
        self._eager = bool(model.run_eagerly)
        self._compiled: dict[tuple[object, ...], Any] = {}
        # After its first call, the traced function takes a list of tensors: `tf.function` would check each argument
        # again, which takes 0.3 ms or more per step.
        self._traced: dict[tuple[object, ...], tf.types.experimental.ConcreteFunction] = {}

    def run(self, batch: ReplicaBatches) -> tuple[object, ...]:
        shares = shares_of(batch.split)
        leaves = [leaves_of(part) for part in batch.parts]
        # A flat list of arguments, because TensorFlow would wrap nested lists.
        tensors = [leaf for part in leaves for leaf in part]
        for share in (shares[i] for i in self.runtime.replica_ids):
            tensors.append(_constant(share.share, share.counts, share.scalar_weight))
        structure = keras.tree.map_structure(lambda leaf: None if leaf is None else 0, batch.parts[0])
        key = (
            self.kept.is_due if self.keeps and self.kept is not None else None,
            repr(structure),
            tuple((type(leaf), leaf.dtype, tuple(leaf.shape[1:])) for leaf in leaves[0]),
        )
        traced = self._traced.get(key)
        if traced is not None and not tf.config.functions_run_eagerly():
            return tuple(traced._call_flat(tensors, traced.captured_inputs))
        function = self._function(key, structure, leaves[0])
        results: tuple[object, ...] = function(*tensors)
        if not self._eager and all(isinstance(tensor, tf.Tensor) for tensor in tensors):
            self._traced[key] = function.get_concrete_function()
        return results

    def _function(self, key: tuple[object, ...], structure: object, leaves: list[tf.Tensor]) -> Any:
        """Returns the function for batches of this structure, with one trace for any number of rows.

        The number of rows is unknown in the trace, because some results of Keras depend on this.
        """
        if key not in self._compiled or self._eager:
            # The replicas' threads need it. Created before tracing, because it may create a variable.
            self._thread_state = keras_hooks.ThreadState()
        if key not in self._compiled:
            run = tf.autograph.experimental.do_not_convert(functools.partial(self._run_flat, structure))
            if not self._eager:
                rows = [spec_of_any_rows(leaf) for leaf in leaves]
                replicas = len(self.runtime.devices)
                signature = rows * replicas + [tf.TensorSpec([3], tf.float64)] * replicas
                run = tf.function(run, input_signature=signature)
            self._compiled[key] = run
        return self._compiled[key]

    def _run_flat(self, structure: object, *tensors: tf.Tensor) -> tuple[object, ...]:
        replicas = len(self.runtime.devices)
        size = len(tensors) // replicas - 1
        parts = []
        for start in range(0, size * replicas, size):
            present = iter(tensors[start : start + size])
            leaves = [None if leaf is None else next(present) for leaf in keras.tree.flatten(structure)]
            parts.append(keras.tree.pack_sequence_as(structure, leaves))

        def body(replica: TensorFlowReplica, index: int) -> object:
            return self.in_replica(replica, parts[index])

        strategy: Any = keras_hooks.strategy_of(self.model)
        shares, variables = tensors[size * replicas :], self.model.non_trainable_variables
        with self.around_replicas(), compiled_call(self.model, self.runtime):
            return tuple(in_replicas(self.runtime, strategy, body, self._thread_state, shares, variables))

    def new_kept(self) -> TensorFlowKeptGradients:
        self._traced = {key: traced for key, traced in self._traced.items() if key[0] is None}
        self._compiled = {key: compiled for key, compiled in self._compiled.items() if key[0] is None}
        return TensorFlowKeptGradients(self.runtime, self.model)

    def concatenate(self, parts: Sequence[tf.Tensor | tf.RaggedTensor]) -> tf.Tensor | tf.RaggedTensor:
        return tf.concat(parts, axis=0)

    def of_chief(self, outputs: object) -> Any:
        of_chief = self.runtime.group.of_chief
        return keras.tree.map_structure(lambda leaf: in_components(of_chief, leaf), outputs)

    def gather(self, results: Sequence[object], sizes: Sequence[int]) -> Any:
        return keras.tree.map_structure(lambda *parts: self._gather(parts, sizes), *results)

    def _gather(
        self, parts: Sequence[tf.Tensor | tf.RaggedTensor], sizes: Sequence[int]
    ) -> tf.Tensor | tf.RaggedTensor:
        local = tf.concat(parts, axis=0)
        if isinstance(local, tf.RaggedTensor):
            return in_components(self.runtime.gather_over_workers, local)
        times = local.shape[0] // sizes[self.runtime.worker_index]  # output rows per input row
        return self.runtime.group.all_gather_rows(local, [times * size for size in sizes])


@functools.lru_cache(64)
def _constant(*numbers: float) -> tf.Tensor:
    """Returns a vector; most steps have the shares of the step before, and creating a tensor takes 30 µs."""
    return tf.constant(numbers, tf.float64)


def in_components(
    function: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor | tf.RaggedTensor
) -> tf.Tensor | tf.RaggedTensor:
    """Applies a function to a tensor. For a ragged tensor, applies it to the values and the row lengths."""
    if not isinstance(tensor, tf.RaggedTensor):
        return function(tensor)
    lengths = [function(part) for part in tensor.nested_row_lengths()]
    return tf.RaggedTensor.from_nested_row_lengths(function(tensor.flat_values), lengths)


def as_tensor(leaf: Any) -> tf.Tensor | tf.SparseTensor | None:
    """Converts an array of any framework to a TensorFlow tensor. Returns `None` and tensors unchanged."""
    if leaf is None or tf.is_tensor(leaf):
        return leaf
    if hasattr(leaf, "detach"):  # a PyTorch tensor
        leaf = torch_to_numpy(leaf)
    if is_scipy(leaf):
        entries = leaf.tocsr().tocoo()  # TensorFlow's operations need the entries in row order
        indices = np.stack([entries.row, entries.col], axis=1).astype("int64")
        return tf.SparseTensor(indices, entries.data, entries.shape)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf" and leaf.dtype.isnative:
        # Copies once, into aligned memory that the tensor then owns. `tf.convert_to_tensor` copies most arrays twice.
        copy = aligned_empty(leaf.shape, leaf.dtype)
        np.copyto(copy, leaf)
        return ops.EagerTensor(copy, context.context().device_name, None)
    return tf.convert_to_tensor(leaf)


def on_device(leaf: object) -> tf.Tensor | tf.SparseTensor | None:
    """Converts an array of any framework to a tensor on the device in scope."""
    tensor = as_tensor(leaf)
    is_number = isinstance(tensor, tf.Tensor) and tensor.dtype != tf.string
    return tf.identity(tensor) if is_number else tensor  # does not copy if it is already on the device
