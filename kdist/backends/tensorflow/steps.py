"""Training, test and prediction steps on TensorFlow: one `tf.function` over all local replicas."""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops

from kdist import keras_hooks
from kdist.arrays.rows import is_scipy, num_rows, take
from kdist.backends.contract import GlobalBatch, ReplicaBatches, StepFunction
from kdist.backends.model_step import check_rows, global_metric_results, run_step
from kdist.backends.replica import RowShare, split_rows
from kdist.backends.tensorflow.loops import local_index
from kdist.backends.tensorflow.replicas import TensorFlowReplica, TensorFlowScope

if TYPE_CHECKING:
    from kdist.backends.tensorflow.runtime import TensorFlowRuntime

_ALIGNMENT = 64  # bytes: of the widest vectors that Eigen uses


class _ReplicatedFunction(StepFunction):
    """Splits a global batch over the replicas and runs a function in each of the local ones."""

    def __init__(self, runtime: TensorFlowRuntime, model: Any) -> None:
        self.runtime = runtime
        self._model = weakref.ref(model)
        self._eager = bool(model.run_eagerly)
        self._compiled: dict[Any, Any] = {}

    @property
    def model(self) -> Any:
        """The model, which owns this function and not the other way round."""
        return self._model()

    def run(self, batch: GlobalBatch | ReplicaBatches) -> tuple[tuple[Any, ...], list[slice]]:
        """Returns what each local replica returned, and which rows each of all replicas had."""
        parts, split = self._split(batch)
        local = [split[i][1] for i in self.runtime.replica_ids]
        # Tuples, not lists: TensorFlow would wrap lists among the arguments of a function.
        leaves = [
            [None if leaf is None else as_tensor(leaf) for leaf in keras.tree.flatten(p)] for p in parts
        ]
        tensors = [leaf for part in leaves for leaf in part if leaf is not None]
        tensors += [tf.constant([s.share, s.counts, s.scalar_weight], tf.float64) for s in local]
        return self._function(parts[0], leaves[0])(*tensors), [rows for rows, _ in split]

    def _split(self, batch: GlobalBatch | ReplicaBatches) -> tuple[Sequence[Any], list[Any]]:
        """Returns the batches of the local replicas, and the rows and shares of all."""
        replicas = self.runtime.num_replicas
        if isinstance(batch, ReplicaBatches):
            return batch.parts, split_rows(batch.num_rows * replicas, replicas)
        split = split_rows(num_rows(batch), replicas)
        tensors = keras.tree.map_structure(lambda leaf: None if leaf is None else as_tensor(leaf), batch)
        bounds = [split[i][0] for i in self.runtime.replica_ids]
        return [take(tensors, rows.start, rows.stop) for rows in bounds], split

    def _function(self, batch: GlobalBatch, leaves: list[Any]) -> Callable[..., Any]:
        """Returns the function for batches of this structure: one trace for any number of rows.

        Rows are unknown in the trace, as in Keras's own loop on TensorFlow: some of its numbers depend on it.
        """
        present = [leaf for leaf in leaves if leaf is not None]
        structure = keras.tree.map_structure(lambda leaf: None if leaf is None else 0, batch)
        key = (repr(structure), tuple((type(leaf), leaf.dtype, tuple(leaf.shape[1:])) for leaf in present))
        if key not in self._compiled or self._eager:
            # For the replicas' threads. Not while tracing: it may create a variable.
            self._thread_state = keras_hooks.ThreadState()
        if key not in self._compiled:
            run = tf.autograph.experimental.do_not_convert(functools.partial(self._run_flat, structure))
            if not self._eager:
                rows = [_spec_of_any_rows(leaf) for leaf in present]
                replicas = len(self.runtime.devices)
                signature = rows * replicas + [tf.TensorSpec([3], tf.float64)] * replicas
                run = tf.function(run, input_signature=signature)
            self._compiled[key] = run
        return self._compiled[key]

    def _run_flat(self, structure: Any, *tensors: Any) -> tuple[Any, ...]:
        replicas = len(self.runtime.devices)
        size = len(tensors) // replicas - 1
        parts = []
        for start in range(0, size * replicas, size):
            present = iter(tensors[start : start + size])
            leaves = [None if leaf is None else next(present) for leaf in keras.tree.flatten(structure)]
            parts.append(keras.tree.pack_sequence_as(structure, leaves))
        return self._run_all(parts, tensors[size * replicas :])

    def _run_all(self, parts: Sequence[Any], shares: Sequence[Any]) -> tuple[Any, ...]:
        native = self.runtime.native

        @tf.autograph.experimental.do_not_convert
        def one_replica() -> Any:
            index = local_index(self.runtime)
            rows = RowShare(*tf.unstack(shares[index]))
            replica_id = self.runtime.replica_ids[index]
            strategy: Any = keras_hooks.strategy_of(self.model)
            replica = TensorFlowReplica(strategy, replica_id, self.runtime.num_replicas, rows, index)
            with self._thread_state, replica:
                return self.in_replica(replica, parts[index])

        self.scopes: dict[int, TensorFlowScope] = {}
        with self.around_replicas():
            results = native.experimental_local_results(native.run(one_replica))
        self.scopes[0].commit()
        self.scopes = {}
        return results

    def around_replicas(self) -> contextlib.AbstractContextManager[None]:
        """Entered once, outside the replicas."""
        return contextlib.nullcontext()

    @abstractmethod
    def in_replica(self, replica: TensorFlowReplica, data: Any) -> Any:
        """What one replica does with its rows."""


class LogsFunction(_ReplicatedFunction):
    """Runs `model.train_step` or `model.test_step`."""

    def __init__(self, runtime: TensorFlowRuntime, model: Any, method: str) -> None:
        super().__init__(runtime, model)
        self._method = method

    def __call__(self, batches: Sequence[GlobalBatch | ReplicaBatches]) -> Any:
        """Returns the logs of the last batch."""
        for batch in batches:
            results, _ = self.run(batch)
        return results[0]

    def around_replicas(self) -> contextlib.AbstractContextManager[None]:
        """Results of metrics speak for all replicas."""
        return global_metric_results(self.model)

    def in_replica(self, replica: TensorFlowReplica, data: Any) -> Any:
        """Runs the step with the replica's own variables."""
        with TensorFlowScope(replica, self.model.non_trainable_variables) as self.scopes[replica.local_index]:
            return run_step(replica, self.model, self._method, data)


class PredictFunction(_ReplicatedFunction):
    """Runs `model.predict_step` and gathers the rows of all replicas."""

    def __call__(self, batches: Sequence[GlobalBatch | ReplicaBatches]) -> Any:
        """Returns the predictions for all rows of all batches, in order, as tensors."""
        outputs = [self._predict(batch) for batch in batches]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

    def _predict(self, batch: GlobalBatch | ReplicaBatches) -> Any:
        results, split = self.run(batch)
        rows = [part.stop - part.start for part in split]
        for replica_id, result in zip(self.runtime.replica_ids, results, strict=True):
            check_rows(result, rows[replica_id])
        have_the_same = split[0] == split[-1] and len(split) > 1
        gather = self._of_chief if have_the_same else self._gather
        return keras.tree.map_structure(lambda *parts: gather(parts, rows), *results)

    def _of_chief(self, parts: Sequence[Any], rows: list[int]) -> Any:
        """All have the same rows, but a layer may draw random numbers."""
        workers = self.runtime.workers
        return parts[0] if workers is None else in_components(workers.of_chief, parts[0])

    def _gather(self, parts: Sequence[Any], rows: list[int]) -> Any:
        local = tf.concat(parts, axis=0)
        workers = self.runtime.workers
        if workers is None:
            return local
        if isinstance(local, tf.RaggedTensor):
            return in_components(self.runtime.gather_over_workers, local)
        per_worker = len(parts)
        sizes = [sum(rows[i : i + per_worker]) for i in range(0, len(rows), per_worker)]
        times = local.shape[0] // sizes[workers.worker_index]  # as many rows as its input has
        return workers.all_gather_rows(local, [times * size for size in sizes])

    def in_replica(self, replica: TensorFlowReplica, data: Any) -> Any:
        """Predicts the replica's rows."""
        with TensorFlowScope(replica, self.model.non_trainable_variables) as scope:
            self.scopes[replica.local_index] = scope
            outputs = self.model.predict_step(data)
            scope.aggregate()
            return outputs


def in_components(function: Callable[[Any], Any], tensor: Any) -> Any:
    """Calls a function of tensors with one; with a ragged one, for the values and the lengths of its rows."""
    if not isinstance(tensor, tf.RaggedTensor):
        return function(tensor)
    lengths = [function(part) for part in tensor.nested_row_lengths()]
    return tf.RaggedTensor.from_nested_row_lengths(function(tensor.flat_values), lengths)


def as_tensor(leaf: Any) -> Any:
    """Returns an array of any kind as a tensor of TensorFlow's; `None`, sparse and ragged ones as they are."""
    if leaf is None or tf.is_tensor(leaf):
        return leaf
    if hasattr(leaf, "detach"):  # of PyTorch
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if str(leaf.dtype) == "torch.bfloat16" else leaf.numpy()
    if is_scipy(leaf):
        entries = leaf.tocsr().tocoo()  # in the order of the rows, as TensorFlow's operations want them
        indices = np.stack([entries.row, entries.col], axis=1).astype("int64")
        return tf.SparseTensor(indices, entries.data, entries.shape)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf" and leaf.dtype.isnative:
        return _copied(leaf)
    return tf.convert_to_tensor(leaf)


def on_device(leaf: Any) -> Any:
    """Returns an array of any kind as a tensor on the device in scope."""
    tensor = as_tensor(leaf)
    is_number = isinstance(tensor, tf.Tensor) and tensor.dtype != tf.string
    return tf.identity(tensor) if is_number else tensor  # copies nothing that is there


def _copied(array: np.ndarray) -> Any:
    """Returns a copy as a tensor on the device in scope.

    One copy, where `tf.convert_to_tensor` makes two of most arrays: into memory that is aligned as TensorFlow
    wants it, which its tensor then holds as its own.
    """
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return ops.EagerTensor(copy, context.context().device_name, None)


def _spec_of_any_rows(leaf: Any) -> Any:
    shape = [None, *leaf.shape[1:]]
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, leaf.dtype)
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    return tf.TensorSpec(shape, leaf.dtype)
