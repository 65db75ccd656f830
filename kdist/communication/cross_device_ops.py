"""Reductions over the devices of one worker, with the names of `tf.distribute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdist.errors import check_whole
from kdist.values import DistributedValues, ReduceOp

if TYPE_CHECKING:
    from kdist.arrays.types import Tensor
    from kdist.communication.options import CommunicationOptions


class CrossDeviceOps:
    """Base class for reductions over the devices of one worker.

    kdist's own subclasses select an algorithm on TensorFlow. On JAX and PyTorch, the compiler or the process
    group selects the algorithm, and kdist logs a warning. The results are the same.

    You can pass a custom subclass to `MirroredStrategy` on every backend. kdist calls `batch_reduce` for the
    gradients of `optimizer.apply` and in `extended.batch_reduce_to`. It calls `reduce` in `strategy.reduce`
    and `extended.reduce_to`, and `broadcast` in `extended.broadcast_to`. Define at least
    `reduce_implementation`. The backend still reduces metrics, moving statistics, and the collectives of a
    replica context, such as `all_reduce`. With one device, kdist does not call the class.

    In compiled steps (TensorFlow graphs and JAX programs), the class is called during tracing. Write it with
    `keras.ops` and without side effects. On JAX, `fit` is one program without per-replica gradients, so it
    raises an error for a custom subclass. Use a loop with `strategy.run` instead.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/CrossDeviceOps

    Example:

    ```python
    class Reversed(kdist.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            values = per_replica_value.values
            total = sum(reversed(values[:-1]), values[-1])
            return total / len(values) if reduce_op is kdist.ReduceOp.MEAN else total

    strategy = kdist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=Reversed())
    ```
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: DistributedValues,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Tensor:
        """Reduces one value over the replicas.

        Args:
            reduce_op: `kdist.ReduceOp.SUM` or `MEAN`, or its name.
            per_replica_value: A `kdist.DistributedValues` of tensors of equal shapes, on the first device.
            destinations: The variable or device that gets the result.
            options: A `kdist.experimental.CommunicationOptions`, or `None`.

        Returns:
            A tensor with the shape of one component.
        """
        return self.reduce_implementation(ReduceOp.of(reduce_op), per_replica_value, destinations, options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[DistributedValues, object]],
        options: CommunicationOptions | None = None,
    ) -> Sequence[Tensor]:
        """Reduces several values over the replicas, such as all gradients of a step.

        Args:
            reduce_op: See `reduce`.
            value_destination_pairs: Pairs of a value and its destination; see `reduce`.
            options: See `reduce`.

        Returns:
            A sequence with one tensor per pair.
        """
        return self.batch_reduce_implementation(ReduceOp.of(reduce_op), value_destination_pairs, options)

    def broadcast(self, tensor: Tensor, destinations: object) -> Tensor:
        """Copies a tensor to its destinations; see `kdist.StrategyExtended.broadcast_to`."""
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: object,
        options: CommunicationOptions | None,
    ) -> Tensor:
        """Implements `reduce` in a subclass.

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define `reduce_implementation`.\n"
            "Define reduce_implementation(self, reduce_op, per_replica_value, destinations, options). "
            "Return a tensor."
        )

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[DistributedValues, object]],
        options: CommunicationOptions | None,
    ) -> Sequence[Tensor]:
        """Implements `batch_reduce` in a subclass. By default, calls `reduce` for each pair."""
        return [self.reduce(reduce_op, value, where, options) for value, where in value_destination_pairs]

    def broadcast_implementation(self, tensor: Tensor, destinations: object) -> Tensor:
        """Implements `broadcast` in a subclass. By default, returns the tensor, which all replicas share."""
        return tensor

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _AddsUp(CrossDeviceOps):
    """Adds one component after another. Only custom subclasses call it."""

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: object,
        options: CommunicationOptions | None,
    ) -> Tensor:
        first, *others = per_replica_value.values
        total = sum(others, first)
        return total / len(per_replica_value.values) if reduce_op is ReduceOp.MEAN else total


class ReductionToOneDevice(_AddsUp):
    """Reduces on one device and copies the result to the others.

    Args:
        reduce_to_device: The device that reduces; `None` for the first device.
        accumulation_fn: Ignored outside TensorFlow.
    """

    def __init__(self, reduce_to_device: str | None = None, accumulation_fn: object = None) -> None:
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn


class _PackedOps(_AddsUp):
    def __init__(self, num_packs: int = 1) -> None:
        check_whole("num_packs", num_packs, "Pass a number of packs, or 0.", least=0)
        self.num_packs = num_packs


class HierarchicalCopyAllReduce(_PackedOps):
    """Reduces along the tree of links between the GPUs of one host.

    Args:
        num_packs: The number of packs into which gradients are grouped; 0 for no packs.
    """


class NcclAllReduce(_PackedOps):
    """Reduces with NCCL, NVIDIA's library for GPUs.

    Args:
        num_packs: The number of packs into which gradients are grouped; 0 for no packs.
    """


def is_own(ops: CrossDeviceOps | None) -> bool:
    """Returns whether a class is user-defined, so that kdist calls it. Backends implement all others."""
    return ops is not None and type(ops) not in (
        ReductionToOneDevice,
        HierarchicalCopyAllReduce,
        NcclAllReduce,
    )
