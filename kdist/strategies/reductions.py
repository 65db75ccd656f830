"""`Strategy.reduce` and `Strategy.gather`, which turn one value per replica into one value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from kdist.arrays.structures import as_summand
from kdist.backends import debugging
from kdist.backends.contract import Runtime
from kdist.backends.replica import divide
from kdist.context import StrategyLike, checked_axis, current_replica
from kdist.errors import InvalidArgumentError, StrategyScopeError
from kdist.values import DistributedValues, PerReplica, ReduceOp, Tensor

if TYPE_CHECKING:
    from kdist.communication.cross_device_ops import CrossDeviceOps


ByOwn = Callable[[ReduceOp, Sequence[Tensor]], Tensor]


def reduce(
    strategy: StrategyLike,
    reduce_op: ReduceOp | str,
    value: object,
    axis: int | Sequence[int] | None,
    destinations: object = None,
    options: object = None,
) -> Any:
    """Reduces a value over all replicas and along an axis; see `Strategy.reduce`."""
    require_cross_replica("reduce")
    op, runtime, own = ReduceOp.of(reduce_op), strategy.runtime, strategy.own_ops
    where = runtime.devices[0] if destinations is None else destinations

    def by_own(op: ReduceOp, parts: Sequence[Tensor]) -> Tensor:
        assert own is not None
        return _checked(runtime, own, own.reduce(op, PerReplica(parts), where, options), parts)

    with runtime.engine_errors():
        _debug(runtime, f"Strategy.reduce({op.name}, axis={axis})", value, axis)
        return keras.tree.map_structure(
            lambda leaf: _reduce_leaf(runtime, op, leaf, axis, None if own is None else by_own), value
        )


def batch_reduce(
    strategy: StrategyLike, reduce_op: ReduceOp | str, pairs: Iterable[tuple[object, object]], options: object
) -> list[Any]:
    """Reduces several values over all replicas. A custom `CrossDeviceOps` gets them in one call."""
    require_cross_replica("extended.batch_reduce_to")
    op, runtime, own = ReduceOp.of(reduce_op), strategy.runtime, strategy.own_ops
    pairs = list(pairs)
    results: dict[int, Tensor] = {}
    if own is not None:
        parts = {
            i: _summands(runtime, op, value)
            for i, (value, _) in enumerate(pairs)
            if isinstance(value, DistributedValues)
        }
        found = own.batch_reduce(op, [(PerReplica(p), pairs[i][1]) for i, p in parts.items()], options)
        if not isinstance(found, (list, tuple)) or len(found) != len(parts):
            raise InvalidArgumentError(
                f"{type(own).__name__}.batch_reduce did not return a list with one tensor per value.",
                received={"values": len(parts), "result": found},
                hint="Return one reduced tensor per pair in `value_destination_pairs`.",
            )
        results = {
            i: _checked(runtime, own, result, p) for (i, p), result in zip(parts.items(), found, strict=True)
        }
    return [
        results[i] if i in results else reduce(strategy, op, value, None, where, options)
        for i, (value, where) in enumerate(pairs)
    ]


def _summands(runtime: Runtime, op: ReduceOp, leaf: object) -> list[Tensor]:
    """Returns the components to reduce, on the first device, with the dtype of their sum or mean."""
    check_components(runtime, leaf)
    parts = runtime.to_holder(_parts(leaf))
    _check_equal_shapes(parts)
    return [as_summand(op, part) for part in parts]


def _checked(runtime: Runtime, own: CrossDeviceOps, result: object, parts: Sequence[Tensor]) -> Tensor:
    """Returns the result of a custom `CrossDeviceOps` if it is a tensor with the shape of the components."""
    if isinstance(result, DistributedValues):  # one value per device, all equal
        result = result.values[0]
    shape = tuple(parts[0].shape)
    problem = f"{type(own).__name__} returned a result that is not a tensor with the shape of a component."
    hint = f"Return one tensor of shape {shape}."
    try:
        if result is None:
            raise TypeError("None")
        (tensor,) = runtime.to_holder([keras.ops.convert_to_tensor(result)])
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(problem, received={"result": result, "shape": shape}, hint=hint) from error
    if not _agree(tuple(tensor.shape), shape):
        raise InvalidArgumentError(
            problem, received={"result": tuple(tensor.shape), "shape": shape}, hint=hint
        )
    return tensor


def _debug(runtime: Runtime, what: str, value: object, axis: int | Sequence[int] | None) -> None:
    if runtime.num_workers == 1 or not debugging.is_on() or not runtime.can_exchange:
        return
    tensors = [_parts(leaf)[0] for leaf in keras.tree.flatten(value) if leaf is not None]
    shapes = debugging.signature(tensors)
    axes: Sequence[Any] = axis if isinstance(axis, (list, tuple)) else [axis]
    for _, shape in shapes:
        for one in axes:
            if one is not None and -len(shape) <= one < len(shape):
                shape[one] = None  # may differ
    debugging.check(runtime, what, shapes)


def _reduce_leaf(
    runtime: Runtime, op: ReduceOp, leaf: object, axis: int | Sequence[int] | None, by_own: ByOwn | None
) -> object:
    if leaf is None:
        return None
    check_components(runtime, leaf)
    if len(runtime.devices) > 1 and not isinstance(leaf, DistributedValues):
        if runtime.num_workers == 1:
            return _reduce_equal(op, leaf, axis)
        # `run` returns one number if the replicas of this worker return equal numbers. Other workers may have
        # different numbers, so every worker must take part in the sum.
        leaf = PerReplica([leaf] * len(runtime.devices))
    if by_own is not None and axis is None:
        return by_own(op, _summands(runtime, op, leaf))
    ops = keras.ops
    parts = [as_summand(op, part) for part in runtime.to_holder(_parts(leaf))]
    number: Any = runtime.num_replicas
    if axis is not None:
        axes = checked_axes(axis, len(parts[0].shape))
        lengths = [math.prod(ops.shape(part)[one] for one in axes) for part in parts]
        parts = [ops.sum(part, axis=axes) for part in parts]
        if op is ReduceOp.MEAN:
            # Every element has the same weight, even if replicas have different numbers of elements.
            local = ops.cast(sum(lengths), "float32")
            (number,) = runtime.sum_over_workers(runtime.to_holder([local]))
    _check_equal_shapes(parts)
    if by_own is not None:  # only strategies of one process accept a custom class
        total = by_own(ReduceOp.SUM, parts)
    else:
        (total,) = runtime.sum_over_workers([sum(parts[1:], parts[0])])
    if op is ReduceOp.SUM:
        return total
    return divide(total, number)


def checked_axes(axis: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Returns one or several axes of a tensor as non-negative numbers; see `checked_axis`."""
    axes = axis if isinstance(axis, (list, tuple)) and axis else (axis,)
    return tuple(checked_axis(one, rank) for one in axes)


def _check_equal_shapes(parts: Sequence[Tensor]) -> None:
    """Raises an error if shapes differ, because adding would broadcast the single row of a last batch."""
    shapes = [tuple(part.shape) for part in parts]
    if any(not _agree(shape, shapes[0]) for shape in shapes[1:]):
        raise InvalidArgumentError(
            "Cannot reduce the values: their shapes differ between the replicas.",
            received={"shapes": shapes},
            hint="If only the number of rows differs, also reduce along the rows:\n"
            'strategy.reduce("MEAN", value, axis=0)',
        )


def _agree(shape: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Returns whether two shapes may be equal. In a TensorFlow graph, some lengths are unknown."""
    return len(shape) == len(other) and all(
        a == b or a is None or b is None for a, b in zip(shape, other, strict=True)
    )


def _reduce_equal(op: ReduceOp, value: object, axis: int | Sequence[int] | None) -> object:
    """Reduces a value that is equal on all replicas of one worker. As in `tf.distribute`, only 0 can be summed."""
    if op is ReduceOp.SUM and not (isinstance(value, (int, float)) and value == 0):
        raise InvalidArgumentError(
            "Cannot sum the value over the replicas: it is not distributed.",
            received={"value": value},
            hint='Pass the result of `strategy.run`, or reduce with "MEAN".',
        )
    if axis is None and not isinstance(value, keras.Variable):
        return value
    tensor = keras.ops.convert_to_tensor(value)
    return tensor if axis is None else keras.ops.mean(tensor, axis=checked_axes(axis, len(tensor.shape)))


def gather(runtime: Runtime, value: object, axis: int) -> Any:
    """Concatenates the components of all replicas along an axis; see `Strategy.gather`."""
    require_cross_replica("gather")
    with runtime.engine_errors():
        _debug(runtime, f"Strategy.gather(axis={axis})", value, axis)
        return keras.tree.map_structure(lambda leaf: _gather_leaf(runtime, leaf, axis), value)


def _gather_leaf(runtime: Runtime, leaf: object, axis: int) -> object:
    if leaf is None:
        return None
    check_components(runtime, leaf)
    ops = keras.ops
    parts = runtime.to_holder(_parts(leaf))
    axis = checked_axis(axis, len(parts[0].shape))
    shapes = [tuple(part.shape) for part in parts]
    others = [shape[:axis] + (None,) + shape[axis + 1 :] for shape in shapes]
    for shape in others[1:]:
        if not _agree(shape, others[0]):
            raise InvalidArgumentError(
                "Cannot gather the values: their shapes differ along an axis other than `axis`.",
                received={"axis": axis, "shapes": shapes},
                hint="Gather along the axis that differs, or pad the values to equal lengths.",
            )
    parts = [ops.moveaxis(part, axis, 0) for part in parts]
    local = parts[0] if len(parts) == 1 else ops.concatenate(parts)
    return ops.moveaxis(runtime.gather_over_workers(local), 0, axis)


def _parts(leaf: object) -> Sequence[Tensor]:
    if isinstance(leaf, DistributedValues):
        return [keras.ops.convert_to_tensor(part) for part in leaf.values]
    return [keras.ops.convert_to_tensor(leaf)]


def check_components(runtime: Runtime, leaf: object) -> None:
    """Raises an error if a distributed value does not have one component per replica of this worker."""
    if isinstance(leaf, DistributedValues) and len(leaf.values) != len(runtime.devices):
        raise InvalidArgumentError(
            "A distributed value does not have one component per replica of this worker.",
            received={"components": len(leaf.values), "replicas": len(runtime.devices)},
            hint="Use a value that this strategy created.",
        )


def require_cross_replica(method: str) -> None:
    """Raises a `StrategyScopeError` inside a replica."""
    replica = current_replica()
    if replica is not None:
        inside = {"reduce": "all_reduce", "gather": "all_gather"}.get(method)
        raise StrategyScopeError(
            f"Cannot call `Strategy.{method}` inside a replica.",
            received={"replica": replica},
            hint=f"Call kdist.get_replica_context().{inside}(…) instead."
            if inside
            else "Call it outside of the function that you pass to `strategy.run`.",
        )
