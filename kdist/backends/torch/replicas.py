"""One replica on PyTorch, with its collectives and its copy of every variable."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import torch

from kdist import keras_hooks
from kdist.arrays.types import R, Scalar, T
from kdist.backends import debugging
from kdist.backends.aggregation import ReplicaScope
from kdist.backends.replica import Replica, RowShare
from kdist.backends.threads import Baton
from kdist.backends.torch import moments
from kdist.backends.torch.copies import VariableCopies
from kdist.backends.torch.divided import Divided, DTensor, OnParts
from kdist.backends.torch.recording import Recording, exchange
from kdist.backends.torch.schedule import buckets
from kdist.backends.torch.workers import Workers
from kdist.cluster import logs
from kdist.context import StrategyLike

Tensors = list[torch.Tensor]
# Up to this number of replicas, one collective for the moments is faster than three smaller ones.
_FEW_REPLICAS = 16


class TorchReplica(Replica):
    """A replica that runs in a thread of this process.

    Args:
        shares: The row shares of all replicas, over all workers.
        baton: Passes the turn to the other replicas of this process.
        copies: The variable copies of all local replicas that do not use the real variables.
        recording: The recording of this step, or `None`.
    """

    def __init__(
        self,
        strategy: StrategyLike,
        replica_id: int,
        shares: Sequence[RowShare],
        local_index: int,
        baton: Baton,
        workers: Workers,
        copies: Sequence[VariableCopies] = (),
        is_model_step: bool = True,
        recording: Recording | None = None,
    ) -> None:
        super().__init__(strategy, replica_id, len(shares), shares[replica_id], local_index, is_model_step)
        self.copies, self.recording = copies, recording
        self._shares, self._baton, self._workers = shares, baton, workers

    @property
    def has_neighbors(self) -> bool:
        """Whether this process has several replicas."""
        return len(self._shares) > self._workers.num_workers

    def scalar(self, number: Scalar, dtype: object) -> torch.Tensor:
        """Creates a number as a tensor on the device, because a copy would wait for the GPU's work."""
        dtype = getattr(torch, keras.backend.standardize_dtype(dtype))
        device = self.strategy.runtime.torch_devices[self.local_index]
        return torch.full((), number, dtype=dtype, device=device)

    def note(self, collective: str, tensors: Sequence[torch.Tensor]) -> None:
        """With `KDIST_DEBUG=1`, compares the next collective with the other workers."""
        if self._workers.num_workers > 1 and self.local_index == 0 and debugging.is_on():
            debugging.check(self.strategy.runtime, collective, debugging.signature(tensors))

    def all_reduce_sum(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sums over the local replicas in their order, then over the workers.

        Do not write to the results, because all local replicas of a device share them.
        """
        with torch.no_grad():
            if self.has_neighbors or self.recording is not None or self._workers.num_workers == 1:
                return self._sum_in_place([tensor.detach().clone() for tensor in tensors])
            totals = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
            start = self._workers.start_all_reduce
            # Contiguous on all workers, because others do not go through shared memory.
            sources = [tensor.detach().contiguous() for tensor in tensors]
            for finish in [start(t, result=total) for t, total in zip(sources, totals, strict=True)]:
                finish()
            return totals

    def all_reduce_packed(self, tensors: Any, weight: Any = None, dtype: str | None = None) -> Tensors:
        """Sums tensors as `packed` does, but in place and with few calls, because each call costs time."""
        if self.num_replicas_in_sync == 1:
            return list(tensors)
        groups = buckets(tensors)
        results: list[Any] = [None] * len(tensors)
        with torch.no_grad():
            flats = [torch.cat([tensors[i].detach().reshape(-1) for i in group]) for group in groups]
            for flat in flats if weight is not None else ():
                flat.mul_(weight)
            for total, group in zip(self._sum_in_place(flats, dtype), groups, strict=True):
                parts = total.split([tensors[i].numel() for i in group])
                for i, part in zip(group, parts, strict=True):
                    results[i] = part.view(tensors[i].shape)
        return results

    def all_reduce_with_gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        return _SumWithGradient.apply(tensor, self)

    def moments(
        self,
        x: torch.Tensor,
        axes: Sequence[int],
        keepdims: bool = False,
        mask: torch.Tensor | None = None,
    ) -> tuple[Any, Any]:
        """Returns the mean and variance over the rows of all replicas, with one collective per direction."""
        if mask is not None:
            return super().moments(x, axes, keepdims, mask)
        x = keras.ops.convert_to_tensor(x)
        if self.num_replicas_in_sync == 1:
            return keras.ops.moments(x, axes, keepdims)
        # Outside of a model's step, the rows are unknown. The message size grows with the replica count.
        if not self.is_model_step or self.num_replicas_in_sync > _FEW_REPLICAS:
            return super().moments(x, axes, keepdims)
        axes = [axis % x.ndim for axis in axes]
        shares = tuple(rows.share for rows in self._shares)
        mean, variance = moments.combined(
            x, axes, self.replica_id_in_sync_group, shares, self.all_reduce_with_gradient
        )
        return (mean, variance) if keepdims else (mean.squeeze(axes), variance.squeeze(axes))

    def sum_gradients(
        self, gradients: Sequence[torch.Tensor], variables: Sequence[keras.Variable]
    ) -> list[torch.Tensor]:
        """Returns the gradients of the global loss, for the first replica on the devices of the variables."""
        # The gradients of sharded variables are already sums.
        own = [i for i, gradient in enumerate(gradients) if not isinstance(gradient, DTensor)]
        if not self.is_model_step and self.replica_id_in_sync_group == 0 and self.divides_variables:
            for variable in (variables[i] for i in own):
                if isinstance(keras_hooks.native_value(variable), Divided):
                    _warn_of_plain_gradient(variable.path)
        sums = super().sum_gradients([gradients[i] for i in own], [variables[i] for i in own])
        if self.local_index > 0:
            return sums
        if self.scope is not None and self.scope.copies is not None:
            holders = (keras_hooks.native_value(variables[i]).device for i in own)
            sums = [total.to(holder) for total, holder in zip(sums, holders, strict=True)]
        results = list(gradients)
        for i, total in zip(own, sums, strict=True):
            results[i] = total
        return results

    def new_slots(self, arrays: Sequence[np.ndarray]) -> list[Tensors]:
        devices = self.strategy.runtime.torch_devices
        return [[torch.tensor(array, device=device) for array in arrays] for device in devices]

    def write_slot(self, slot: torch.Tensor, value: torch.Tensor) -> None:
        """Copies, because a recorded step uses the same tensors again."""
        slot.copy_(value.detach())

    @property
    def divides_variables(self) -> bool:
        return self.strategy.runtime.storage is not None

    def take_variables(self, variables: Sequence[keras.Variable]) -> None:
        self.strategy.runtime.storage.take(variables)

    def apply_gradients(self, apply: Callable[[], object]) -> object:
        """Runs Keras's `optimizer.apply` on the real variables, only in the first local replica.

        The gradients are already summed, and the other replicas wait for the next turn. The copies are
        updated immediately, for steps that use the new weights.
        """
        assert isinstance(self.scope, TorchScope)
        # The update starts from the weights that layers have assigned in this step, on all replicas.
        self.scope.aggregate(only=self.scope.is_pending)
        if self.local_index > 0:
            return None
        with OnParts() if self.divides_variables else nullcontext():
            return self.scope.change_real_variables(apply)

    def gather_tensor(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        self.note(f"all_gather(axis={axis})", [])
        return _GatherWithGradient.apply(tensor.movedim(axis, 0), self).movedim(0, axis)

    def gather_rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Returns the rows of all replicas, and the index of this replica's first row."""

        def combine(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
            local = torch.cat([value.to(values[0].device) for value in values])
            starts = list(itertools.accumulate((len(value) for value in values), initial=0))
            whole, first = self._workers.gather_uneven(local)
            return whole, [first + start for start in starts]

        mine = tensor.detach().contiguous()
        what = ("gathering", (tensor.dtype, tuple(tensor.shape[1:])))
        whole, starts = self._baton.meet(self.local_index, what, mine, combine)
        return whole.to(tensor.device), starts[self.local_index]

    def call_once(self, what: str, value: T, merge: Callable[[Sequence[T]], R]) -> R:
        return self._baton.meet(self.local_index, (what, None), value, merge)

    def _sum_in_place(self, tensors: Tensors, dtype: str | None = None) -> Tensors:
        what = ("sum", [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
        combine = functools.partial(self._sum_over_replicas, dtype)
        totals = self._baton.meet(self.local_index, what, tensors, combine)
        return [total.to(tensor.device) for total, tensor in zip(totals, tensors, strict=True)]

    def _sum_over_replicas(self, dtype: str | None, values: Sequence[Tensors]) -> Tensors:
        with torch.no_grad():
            totals = values[0]
            for others in values[1:]:
                for total, other in zip(totals, others, strict=True):
                    total += other.to(total.device)
            start, divisor = self._workers.start_all_reduce, self.compression_divisor
            return exchange(self.recording, start, totals, dtype, divisor)


@functools.cache  # once per variable
def _warn_of_plain_gradient(path: str) -> None:
    logs.logger.warning(
        "optimizer.apply sums the gradient of the sharded variable %r over the replicas, because it is a plain tensor. "
        "If you read it from a variable, it may already be the sum, and the update is too large.\n"
        "Pass the gradients unchanged. To accumulate them, set gradient_accumulation_steps, or add them up in a list.",
        path,
    )


class _SumWithGradient(torch.autograd.Function):
    """A sum over all replicas. Keeps the replica, because a GPU's backward pass runs in another thread."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, replica: TorchReplica) -> torch.Tensor:
        ctx.replica = replica
        (total,) = replica.all_reduce_sum([tensor])
        # Not shared with the other replicas, because autograd changes the tensor that a function returns.
        return total.clone() if replica.has_neighbors else total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = ctx.replica.gradient_weight
        return _SumWithGradient.apply(gradient * weight, ctx.replica) / weight, None


class _GatherWithGradient(torch.autograd.Function):
    """The rows of all replicas. The gradient of a replica's rows includes their use in other replicas."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, replica: TorchReplica) -> torch.Tensor:
        ctx.replica, ctx.number = replica, len(rows)
        whole, ctx.first = replica.gather_rows(rows)
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = _SumWithGradient.apply(gradient, ctx.replica)
        return total[ctx.first : ctx.first + ctx.number], None


class TorchScope(ReplicaScope):
    """Gives each local replica its `copies` of the variables, or the real variables without copies."""

    def __init__(self, replica: TorchReplica, copies: VariableCopies | None = None) -> None:
        super().__init__(replica)
        self.replica = replica
        self.copies = copies
        self._components = replica.strategy.runtime.components
        # The first replica also writes the real variables. The copies of the others follow them.
        self._is_first = replica.local_index == 0
        self._others = replica.copies if self._is_first else ()

    def local(self, variable: keras.Variable) -> torch.Tensor:
        """Returns the tensor that this replica reads and writes, and for which it computes gradients."""
        if keras_hooks.native_value(variable) is None:
            self._initialize(variable)
        if self.has_component(variable):
            return self._components.get(variable, self.replica.local_index)
        return keras_hooks.native_value(variable) if self.copies is None else self.copies.get(variable)

    def is_pending(self, variable: keras.Variable) -> bool:
        """Returns whether an optimizer needs the aggregate of the values that the replicas have written."""
        real = keras_hooks.native_value(variable)
        return real.pending is not None if isinstance(real, Divided) else variable.trainable

    def write(self, variable: keras.Variable, value: torch.Tensor) -> None:
        if isinstance(value, DTensor):  # the gradient of a sharded variable
            value = value.full_tensor()
        if self.has_component(variable):
            self.local(variable)
            with torch.no_grad():
                self._components.write(variable, self.replica.local_index, value)
            return
        real = keras_hooks.native_value(variable)
        if isinstance(real, Divided) and not self.is_untracked:
            real.write_later(value)
            return
        for copies in self._others:
            copies.get(variable)  # a replica that reads the variable later must still see its old value
        with torch.no_grad():
            self.local(variable).copy_(value)
            if self._is_first and self.copies is not None:
                keras_hooks.native_value(variable).copy_(value)

    def aggregated(self, variable: keras.Variable, value: torch.Tensor) -> None:
        """Stores the aggregated value; for a sharded variable, this worker's part of it."""
        real = keras_hooks.native_value(variable)
        if isinstance(real, Divided):
            real.write(value)
        else:
            self.write(variable, value)

    def snapshot(self, variable: keras.Variable) -> torch.Tensor:
        return self.local(variable).detach().clone()

    def show(self, variable: keras.Variable, total: torch.Tensor) -> None:
        """Stores the aggregated value in the real variable, only in the first local replica."""
        if self._is_first:
            with torch.no_grad():
                self._components.show(variable, total)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context manager in which Keras uses the real variables, as without a scope."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def change_real_variables(self, change: Callable[[], T]) -> T:
        followers = self.replica.copies
        before = [copies.versions() for copies in followers]
        with self.suspended(), self.replica.strategy.runtime.on_holder(), torch.no_grad():
            result = change()
        for copies, versions in zip(followers, before, strict=True):
            copies.refresh(unless=versions)
        return result

    def _initialize(self, variable: keras.Variable) -> None:
        # Keras initializes a variable that was created in a scope at the exit of a scope that initializes.
        with self.suspended(), keras.StatelessScope():
            pass
        self.replica.strategy.runtime.broadcast_variables([variable])
