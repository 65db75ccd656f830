"""Training, test and prediction steps on PyTorch. Each local replica runs Keras's step on its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import torch

from kdist import keras_hooks
from kdist.arrays.rows import map_leaves, to_dense
from kdist.backends.contract import ReplicaBatches
from kdist.backends.model_step import ReplicatedSteps
from kdist.backends.replica import shares_of
from kdist.backends.torch.core import TorchCore
from kdist.backends.torch.functions import in_replicas
from kdist.backends.torch.kept_gradients import TorchKeptGradients
from kdist.backends.torch.recorded_steps import RecordedSteps
from kdist.backends.torch.recording import Recording
from kdist.backends.torch.replicas import TorchReplica
from kdist.errors import check_equal_arrays

if TYPE_CHECKING:
    from kdist.arrays.types import Structure, Tensor


class TorchSteps(ReplicatedSteps):
    """Runs the steps of one model, with one thread per local replica."""

    runtime: TorchCore

    def __init__(self, runtime: TorchCore, model: keras.Model, kind: str) -> None:
        super().__init__(runtime, model, kind)
        self._recorded = RecordedSteps(runtime, model, kind)

    def run(self, batch: ReplicaBatches) -> list[Structure]:
        model, training = self.model, self.kind == "train"
        # Keras does the same, because torch modules in the model may read this mode.
        if model.training != training:
            model.train(training)
        return self._recorded.run(model, batch, self._run)

    def _run(self, batch: ReplicaBatches, recording: Recording | None = None) -> list[Structure]:
        def body(replica: TorchReplica, index: int) -> Structure:
            return self.in_replica(replica, _tensors(batch.parts[index]))

        with self.around_replicas():
            strategy: Any = keras_hooks.strategy_of(self.model)
            is_training = self.kind == "train"
            return in_replicas(self.runtime, strategy, body, shares_of(batch.split), is_training, recording)

    def sync(self) -> None:
        """Sets torch modules to evaluation mode after training, as Keras does. Checks for lost workers."""
        if self.kind == "train":
            self.model.eval()
        self.runtime.group.check_intact(finishes=True)

    def new_kept(self) -> TorchKeptGradients:
        return TorchKeptGradients(self.runtime, self.model)

    def concatenate(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def of_chief(self, outputs: Structure) -> Structure:
        leaves = [leaf.clone() for leaf in keras.tree.flatten(outputs)]
        self.runtime.group.broadcast(leaves, self.runtime.torch_devices[0])
        return keras.tree.pack_sequence_as(outputs, leaves)

    def gather(self, results: Sequence[Structure], sizes: Sequence[int]) -> Structure:
        device = self.runtime.torch_devices[0]
        local = [keras.tree.flatten(result) for result in results]
        leaves = [torch.cat([part.to(device) for part in parts]) for parts in zip(*local, strict=True)]
        group = self.runtime.group
        if not self._knows_widths():  # gloo would abort the process, or join wrong bytes
            form = " and ".join(f"{leaf.dtype} {tuple(leaf.shape[1:])}" for leaf in leaves)
            check_equal_arrays([data.decode() for data in group.all_gather_bytes(form.encode())])
        return keras.tree.pack_sequence_as(results[0], group.gather_rows(leaves, sizes))

    def _knows_widths(self) -> bool:
        """Returns whether no width of the model's outputs can depend on the rows. Then workers need no message."""
        model: Any = self.model
        outputs = getattr(model, "outputs", None) if type(model).__module__.startswith("keras.") else None
        return outputs is not None and not any(None in output.shape[1:] for output in outputs)


_SAME_DTYPES = ("float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")


def to_device(batch: Structure, device: torch.device) -> Structure:
    """Returns a copy of a batch with tensors on a device. Strings do not change.

    Always copies, because Keras multiplies sample weights in place. This must not affect the user's tensors
    or another replica, because autograd counts the writes to the whole batch.
    """

    def put(leaf: Tensor | None) -> object:
        if leaf is None:
            return leaf
        if not isinstance(leaf, torch.Tensor):
            array = to_dense(leaf)
            # Keras converts other dtypes later, for example uint16 to int32, as in `fit` on arrays.
            if array.dtype.name not in _SAME_DTYPES:
                return np.array(array)
            is_ready = device.type != "cpu" and array.flags.writeable and array.flags.c_contiguous
            return torch.from_numpy(array if is_ready else array.copy()).to(device)
        return leaf.to(device, copy=leaf.device == device)

    return map_leaves(put, batch)


def _tensors(batch: Structure) -> Structure:
    """Converts the remaining numeric arrays to tensors. Strings and objects are for a custom `train_step`."""

    def convert(leaf: object) -> object:
        is_number = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcV"
        return keras.ops.convert_to_tensor(leaf) if is_number else leaf

    return keras.tree.map_structure(convert, batch)
