"""How the devices of one worker add up, in the words of `tf.distribute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.errors import InvalidArgumentError
from kdist.values import DistributedValues, ReduceOp


class CrossDeviceOps:
    """Base class of the ways to reduce over the devices of one worker.

    Those of TensorFlow's that have a class here are a choice that its engine follows; JAX's compiler and PyTorch's
    process groups choose themselves, of which a warning tells. The numbers are the same.

    A subclass of your own is called by `MirroredStrategy` on every backend: `batch_reduce` for the gradients that
    `optimizer.apply` is given and by `extended.batch_reduce_to`, `reduce` by `strategy.reduce` and
    `extended.reduce_to`, `broadcast` by `extended.broadcast_to`. Define `reduce_implementation` at least. The
    engines still reduce what belongs to kdist itself, such as metrics and moving statistics, and what a replica asks
    of its context, such as `all_reduce`. One device has nothing to reduce, and calls nothing.

    Where the step is a graph (TensorFlow) or a program (JAX), the class is called while that is traced: write it with
    `keras.ops`, without side effects. On JAX `fit` is one program that knows no gradients of single replicas, and
    refuses a class of your own; a loop with `strategy.run` has them.

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
        destinations: Any,
        options: Any = None,
    ) -> Any:
        """Reduces one value over the replicas.

        Args:
            reduce_op: `kdist.ReduceOp.SUM` or `MEAN`, or its name.
            per_replica_value: A `kdist.DistributedValues` of tensors of one shape, which lie on the first device.
            destinations: The variable or the device that the result is for.
            options: A `kdist.experimental.CommunicationOptions`, or `None`.

        Returns:
            A tensor of the shape of a component.
        """
        return self.reduce_implementation(ReduceOp.of(reduce_op), per_replica_value, destinations, options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[DistributedValues, Any]],
        options: Any = None,
    ) -> Sequence[Any]:
        """Reduces several values over the replicas, such as all gradients of a step.

        Args:
            reduce_op: As in `reduce`.
            value_destination_pairs: Pairs of a value and its destination, as in `reduce`.
            options: As in `reduce`.

        Returns:
            A tensor for each pair, in their order.
        """
        return self.batch_reduce_implementation(ReduceOp.of(reduce_op), value_destination_pairs, options)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to where it is to be; see `kdist.StrategyExtended.broadcast_to`."""
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: DistributedValues, destinations: Any, options: Any
    ) -> Any:
        """What `reduce` does: for subclasses.

        Raises:
            NotImplementedError: The class does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define `reduce_implementation`.\n"
            "Define reduce_implementation(self, reduce_op, per_replica_value, destinations, options). "
            "Return a tensor."
        )

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[DistributedValues, Any]],
        options: Any,
    ) -> Sequence[Any]:
        """What `batch_reduce` does: for subclasses. By default, one `reduce` after the other."""
        return [self.reduce(reduce_op, value, where, options) for value, where in value_destination_pairs]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """What `broadcast` does: for subclasses. By default nothing: a tensor is the same for all replicas."""
        return tensor

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _AddsUp(CrossDeviceOps):
    """For subclasses of the user's, which call it: one component after the other is added up."""

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: DistributedValues, destinations: Any, options: Any
    ) -> Any:
        first, *others = per_replica_value.values
        total = sum(others, first)
        return total / len(per_replica_value.values) if reduce_op is ReduceOp.MEAN else total


class ReductionToOneDevice(_AddsUp):
    """Adds up on one device and copies the result to the others.

    Args:
        reduce_to_device: The device to add up on; `None` for the first one.
        accumulation_fn: Ignored outside TensorFlow.
    """

    def __init__(self, reduce_to_device: str | None = None, accumulation_fn: object = None) -> None:
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn


class _PackedOps(_AddsUp):
    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise InvalidArgumentError(
                "`num_packs` is negative.",
                received={"num_packs": num_packs},
                hint="Pass a number of packs, or 0.",
            )
        self.num_packs = num_packs


class HierarchicalCopyAllReduce(_PackedOps):
    """Adds up along the tree of links between the GPUs of one host.

    Args:
        num_packs: Into how many packs the gradients are grouped; 0 for none.
    """


class NcclAllReduce(_PackedOps):
    """NVIDIA's all-reduce; needs GPUs.

    Args:
        num_packs: Into how many packs the gradients are grouped; 0 for none.
    """


def is_own(ops: CrossDeviceOps | None) -> bool:
    """Says whether a class is the user's own, which kdist calls; the engine knows the others."""
    return ops is not None and type(ops) not in (
        ReductionToOneDevice,
        HierarchicalCopyAllReduce,
        NcclAllReduce,
    )
