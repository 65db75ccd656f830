"""Training, test and prediction steps on PyTorch: each local replica runs Keras's own step on its rows."""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import torch

from kdist import keras_hooks
from kdist.arrays.rows import num_rows, take, to_dense
from kdist.backends.contract import GlobalBatch, ReplicaBatches, StepFunction
from kdist.backends.model_step import check_rows, global_metric_results, run_step
from kdist.backends.replica import RowShare, split_rows
from kdist.backends.torch.loops import in_replicas
from kdist.backends.torch.replicas import TorchReplica
from kdist.communication.options import hint_ignored

if TYPE_CHECKING:
    from kdist.backends.torch.runtime import TorchRuntime

Split = Sequence[tuple[slice, RowShare]]


class _ReplicatedFunction(StepFunction):
    """Splits a global batch over the replicas and runs a function in each of the local ones."""

    training = False

    def __init__(self, runtime: TorchRuntime, model: Any) -> None:
        self.runtime = runtime
        self._model = weakref.ref(model)
        if getattr(model, "jit_compile", False):
            hint_ignored(
                "jit_compile=True", "steps with collectives run eagerly on PyTorch.", runtime.worker_index
            )

    @property
    def model(self) -> Any:
        """The model, which owns this function and not the other way round."""
        return self._model()

    def run(self, batch: GlobalBatch | ReplicaBatches) -> tuple[list[Any], Split]:
        """Returns what each local replica returned, and which rows each of all replicas had."""
        model = self.model
        # As Keras does: layers that are torch modules may ask.
        if model.training != self.training:
            model.train(self.training)
        parts, split = self._split(batch)
        are_placed = isinstance(batch, ReplicaBatches) and batch.are_placed

        def body(replica: TorchReplica, index: int) -> Any:
            return self.in_replica(replica, _tensors(parts[index], are_placed))

        with self.around_replicas(model):
            shares = [rows for _, rows in split]
            strategy = keras_hooks.strategy_of(model)
            return in_replicas(self.runtime, strategy, body, shares, self.training), split

    def _split(self, batch: GlobalBatch | ReplicaBatches) -> tuple[Sequence[Any], Split]:
        """Returns the batches of the local replicas, and the rows and shares of all."""
        replicas = self.runtime.num_replicas
        if isinstance(batch, ReplicaBatches):
            return batch.parts, split_rows(batch.num_rows * replicas, replicas)
        split = split_rows(num_rows(batch), replicas)
        bounds = [split[i][0] for i in self.runtime.replica_ids]
        return [take(batch, rows.start, rows.stop) for rows in bounds], split

    def around_replicas(self, model: Any) -> AbstractContextManager[Any]:
        """Entered once, outside the replicas."""
        return contextlib.nullcontext()

    @abstractmethod
    def in_replica(self, replica: TorchReplica, data: Any) -> Any:
        """What one replica does with its rows."""


class _LogsFunction(_ReplicatedFunction):
    method: str

    def __call__(self, batches: Sequence[GlobalBatch | ReplicaBatches]) -> Any:
        """Runs one step a batch. Returns the logs of the last one."""
        logs: Any = {}
        for batch in batches:
            results, _ = self.run(batch)
            logs = results[0]
        return logs

    def around_replicas(self, model: Any) -> AbstractContextManager[Any]:
        """Results of metrics speak for all replicas."""
        return global_metric_results(model)

    def in_replica(self, replica: TorchReplica, data: Any) -> Any:
        """Runs the step of Keras, or the user's."""
        return run_step(replica, self.model, self.method, data)


class TrainFunction(_LogsFunction):
    """Runs `model.train_step`."""

    method = "train_step"
    training = True

    def sync(self) -> None:
        """After an epoch, torch modules in the model are back in evaluation mode, as with plain Keras."""
        self.model.eval()


class TestFunction(_LogsFunction):
    """Runs `model.test_step`."""

    method = "test_step"


class PredictFunction(_ReplicatedFunction):
    """Runs `model.predict_step` and gathers the rows of all replicas."""

    def __call__(self, batches: Sequence[GlobalBatch | ReplicaBatches]) -> Any:
        """Returns the predictions for all rows of all batches, in order, as tensors."""
        outputs = [self._predict(batch) for batch in batches]
        return keras.tree.map_structure(lambda *parts: torch.cat(parts), *outputs)

    def in_replica(self, replica: TorchReplica, data: Any) -> Any:
        """Predicts the replica's rows."""
        outputs = self.model.predict_step(data)
        assert replica.scope is not None
        replica.scope.aggregate()
        return outputs

    def _predict(self, batch: GlobalBatch | ReplicaBatches) -> Any:
        results, split = self.run(batch)
        rows = [part.stop - part.start for part, _ in split]
        for replica_id, result in zip(self.runtime.replica_ids, results, strict=True):
            check_rows(result, rows[replica_id])
        whole = split[0][0] == split[-1][0] and len(split) > 1
        local = [keras.tree.flatten(result) for result in results]
        device = self.runtime.torch_devices[0]
        leaves = [torch.cat([part.to(device) for part in parts]) for parts in zip(*local, strict=True)]
        workers = self.runtime.workers
        if whole:
            leaves = [leaf.clone() for leaf in local[0]]
            if workers is not None:  # all have the same rows, but a layer may draw random numbers
                workers.broadcast(leaves, device)
        elif workers is not None:
            per_worker = len(results)
            sizes = [sum(rows[i : i + per_worker]) for i in range(0, len(rows), per_worker)]
            leaves = workers.gather_rows(leaves, sizes)
        return keras.tree.pack_sequence_as(results[0], leaves)


_SAME_DTYPES = ("float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns a copy of a batch whose numbers are tensors on a device. Strings stay as they are."""

    def put(leaf: Any) -> Any:
        if leaf is None:
            return leaf
        if not isinstance(leaf, torch.Tensor):
            array = to_dense(leaf)
            # Keras gives other dtypes their places: uint16 becomes int32, as in `fit` on arrays.
            if array.dtype.name not in _SAME_DTYPES:
                return np.array(array)
            if array is not leaf:
                leaf = torch.from_numpy(_writable(array))
            elif device.type == "cpu":
                return torch.from_numpy(array.copy())
            else:
                leaf = torch.from_numpy(_writable(array))
        return leaf.to(device, copy=leaf.device == device)

    return keras.tree.map_structure(put, batch)


def _writable(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()


def _tensors(batch: Any, are_its_own: bool) -> Any:
    """Returns one replica's batch as tensors of its own on the device in scope."""

    def convert(leaf: Any) -> Any:
        if leaf is None:
            return None
        if not isinstance(leaf, torch.Tensor):
            leaf = to_dense(leaf)
            # Strings and objects are for the user's own `train_step`.
            if leaf.dtype.kind not in "biufcV":
                return leaf
        # Keras multiplies sample weights in place. That must reach neither the user's tensors nor another
        # replica (autograd counts the writes to the whole batch). Arrays are copied as they are converted.
        copied = are_its_own or not isinstance(leaf, torch.Tensor)
        return keras.ops.convert_to_tensor(leaf if copied else leaf.clone())

    return keras.tree.map_structure(convert, batch)
