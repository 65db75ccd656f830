"""Rules by primitive of JAX: which rows an operation needs, and whether its results are rows or parts of a sum.

Each rule gets the shapes of the global batch. It returns `None` if the operation needs whole arrays.

Source: https://docs.jax.dev/en/latest/jax.lax.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.random import threefry_2x32

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

    Params: TypeAlias = Mapping[str, Any]
    Shapes: TypeAlias = Sequence[tuple[int, ...]]
    Divisions: TypeAlias = Sequence[Any]

WHOLE = "whole"
"""The array is equal on all devices."""
SUM = "sum"
"""Each device has a part; the sum of the parts is the array."""


class NoRule(Exception):
    """A step that cannot run on rows; the message names the operation."""


class Value(NamedTuple):
    """An array on one device: `WHOLE`, a part of a `SUM`, or rows along the axis `division`, evenly divided."""

    array: jax.Array
    division: Any


class Plan(NamedTuple):
    """How an operation runs on rows.

    Args:
        output: The division of all results.
        inputs: For each input that is equal on all devices, the axis of its rows, or `None` to use all of it.
        params: Parameters of the primitive that differ from the global batch.
        is_first_only: Whether only the first device uses the first input, because the results are summed.
    """

    output: Any
    inputs: Sequence[int | None]
    params: dict[str, object] = {}  # noqa: RUF012 - never changed
    is_first_only: bool = False


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 ge gt imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma population_count
    pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt square stop_gradient sub tan tanh xor"""
) | {"floor"}
# Of a sum of parts, these operations return a sum of parts.
_LINEAR = _names(
    """broadcast_in_dim copy copy_p cumsum neg reduce_sum reduce_window_sum reshape rev slice split squeeze
    stop_gradient transpose"""
)
ADDITIVE = _names("add add_any concatenate sub")
_BILINEAR = _names("conv_general_dilated dot_general mul")
# Operations along axes in a parameter, which leave rows along other axes as they are.
_ALONG = {
    "concatenate": "dimension",
    "rev": "dimensions",
    "sort": "dimension",
    "split": "axis",
    "top_k": "axis",
}
_ALONG |= dict.fromkeys(["cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"], "axis")
_REDUCTIONS = _names("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_xor")
_WINDOWS = _names(
    """reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter_add"""
)


def is_linear(equation: JaxprEqn, divisions: Sequence[Any]) -> bool:
    """Returns whether an operation on parts of sums returns parts of sums."""
    name = equation.primitive.name
    others = [division for division in divisions if division is not SUM]
    if any(division is not WHOLE for division in others):
        return False
    if name in _LINEAR:
        return divisions[0] is SUM
    if name in ADDITIVE:
        return not others
    if name in _BILINEAR:
        return len(others) == 1
    if name in ("div", "dynamic_slice"):
        is_rounded = name == "div" and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.integer)
        return divisions[0] is SUM and divisions.count(SUM) == 1 and not is_rounded
    if name == "select_n":
        return divisions[0] is WHOLE and len(others) == 1
    if name == "pad":
        padding = getattr(equation.invars[1], "val", None)
        return divisions[0] is SUM and padding is not None and not np.any(padding)
    if name == "convert_element_type":  # rounds the sum, not its parts
        old, new = equation.invars[0].aval.dtype, equation.params["new_dtype"]
        return bool(jnp.issubdtype(old, jnp.floating) and jnp.promote_types(old, new) == new)
    return False


def plan(equation: JaxprEqn, divisions: Sequence[Any], number: int) -> Plan | None:
    """Returns how an operation runs on rows, or `None` if it needs whole arrays. See `Value` for the divisions."""
    name = equation.primitive.name
    shapes = [atom.aval.shape for atom in equation.invars]
    if name in ELEMENTWISE:
        return _same_axis(shapes, divisions)
    if name in _ALONG:
        along = equation.params[_ALONG[name]]
        found = _same_axis(shapes, divisions)
        return None if found is None or found.output in np.atleast_1d(along) else found
    rule = _RULES.get(name)
    if name in _REDUCTIONS:
        rule = _reduction
    elif name in _WINDOWS:
        rule = _window
    return None if rule is None else rule(equation.params, shapes, divisions, number)


def _same_axis(shapes: Shapes, divisions: Sequence[Any]) -> Plan | None:
    """Rows of all inputs along the same axis; dimensions of size 1 are repeated."""
    axes = {division for division in divisions if division is not WHOLE}
    if len(axes) > 1:
        return None
    (axis,) = axes
    return Plan(axis, [axis if len(shape) > axis and shape[axis] > 1 else None for shape in shapes])


def _reduction(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    axes, axis = params["axes"], divisions[0]
    return None if axis in axes else Plan(axis - sum(other < axis for other in axes), [None])


def _sum(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    return _reduction(params, shapes, divisions, number) or Plan(SUM, [None])


def _window(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    found = _same_axis(shapes, divisions)
    if found is None:
        return None
    axis, neutral = found.output, {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0)}
    neutral |= {"base_dilation": 1, "window_dilation": 1}
    is_single = all(params[name][axis] == value for name, value in neutral.items() if name in params)
    return found if is_single else None


def _broadcast(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    axis = params["broadcast_dimensions"][divisions[0]]
    return Plan(axis, [None], {"shape": _local(params["shape"], axis, number)})


def _reshape(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    """Rows stay together if as many elements are before their axis in both shapes."""
    old, new, axis = shapes[0], params["new_sizes"], divisions[0]
    before = math.prod(old[:axis])
    for i, size in enumerate(new):
        if math.prod(new[:i]) == before and size > 1:
            return Plan(i, [None], {"new_sizes": _local(new, i, number)}) if size % number == 0 else None
    return None


def _transpose(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    return Plan(params["permutation"].index(divisions[0]), [None])


def _squeeze(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    axis = divisions[0]
    return Plan(axis - sum(other < axis for other in params["dimensions"]), [None])


def _slice(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    axis, limits, strides = divisions[0], params["limit_indices"], params["strides"]
    if params["start_indices"][axis] or limits[axis] < shapes[0][axis] or (strides and strides[axis] > 1):
        return None
    return Plan(axis, [None], {"limit_indices": _local(limits, axis, number)})


def _dynamic_slice(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    axis, sizes = divisions[0], params["slice_sizes"]
    if axis is WHOLE or sizes[axis] < shapes[0][axis] or set(divisions[1:]) - {WHOLE}:
        return None
    return Plan(axis, [None] * len(shapes), {"slice_sizes": _local(sizes, axis, number)})


def _dynamic_update(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    found = _same_axis(shapes[:2], divisions[:2]) if set(divisions[:2]) - {WHOLE} else None
    if found is None or set(divisions[2:]) - {WHOLE}:
        return None
    axis = found.output
    is_full = shapes[0][axis] == shapes[1][axis]
    return Plan(axis, [axis, axis] + [None] * (len(shapes) - 2)) if is_full else None


def _pad(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    axis = divisions[0]
    return Plan(axis, [None, None]) if params["padding_config"][axis] == (0, 0, 0) else None


def _dot(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    (contracted, batched) = params["dimension_numbers"]
    for side in (0, 1):
        axis = divisions[side]
        if axis is WHOLE:
            continue
        other = divisions[1 - side]
        for pairs, is_sum in ((contracted, True), (batched, False)):
            if axis in pairs[side]:
                place = list(pairs[side]).index(axis)
                match = pairs[1 - side][place]
                if other not in (WHOLE, match):
                    return None
                return Plan(SUM if is_sum else place, [match, axis] if side else [axis, match])
        if other is not WHOLE:
            return None
        free = [i for i in range(len(shapes[side])) if i not in {*contracted[side], *batched[side]}]
        before = len(shapes[0]) - len(contracted[0]) if side else len(batched[0])
        return Plan(before + free.index(axis), [None, None])
    return None


def _convolution(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    numbers = params["dimension_numbers"]
    is_plain = params["feature_group_count"] == params["batch_group_count"] == 1
    if divisions == [numbers.lhs_spec[0], WHOLE] and params["batch_group_count"] == 1:
        return Plan(numbers.out_spec[0], [None, None])
    # The gradient of the filters: a convolution whose input channels are the rows.
    channels = [numbers.lhs_spec[1], numbers.rhs_spec[1]]
    matches = all(d in (WHOLE, channel) for d, channel in zip(divisions, channels, strict=True))
    return Plan(SUM, channels) if is_plain and matches else None


def _gather(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    numbers, (operand, indices) = params["dimension_numbers"], divisions
    rank = len(numbers.offset_dims) + len(shapes[1]) - 1
    batch = [i for i in range(rank) if i not in numbers.offset_dims]
    if operand is WHOLE and indices in numbers.start_indices_batching_dims:
        operand = numbers.operand_batching_dims[numbers.start_indices_batching_dims.index(indices)]
    elif operand is WHOLE:
        return Plan(batch[indices], [None, None]) if indices < len(shapes[1]) - 1 else None
    if operand in numbers.operand_batching_dims:
        match = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand)]
        return Plan(batch[match], [operand, match]) if indices in (WHOLE, match) else None
    sizes = params["slice_sizes"]
    is_full = sizes[operand] == shapes[0][operand] and operand not in numbers.start_index_map
    if indices is not WHOLE or not is_full or operand in numbers.collapsed_slice_dims:
        return None
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(len(shapes[0])) if i not in removed]
    output = numbers.offset_dims[kept.index(operand)]
    return Plan(output, [None, None], {"slice_sizes": _local(sizes, operand, number)})


def _scatter_add(params: Params, shapes: Shapes, divisions: Divisions, number: int) -> Plan | None:
    numbers, (operand, indices, updates) = params["dimension_numbers"], divisions
    scattered = [i for i in range(len(shapes[2])) if i not in numbers.update_window_dims]
    pairs = {place: scattered[place] for place in range(len(shapes[1]) - 1)}
    place = indices if indices is not WHOLE else next((p for p, u in pairs.items() if u == updates), None)
    if place not in pairs or updates not in (WHOLE, pairs[place]):
        return None
    cut = [None, place, pairs[place]]
    if place in numbers.scatter_indices_batching_dims:
        match = numbers.operand_batching_dims[numbers.scatter_indices_batching_dims.index(place)]
        return Plan(match, [match, *cut[1:]]) if operand in (WHOLE, match) else None
    return Plan(SUM, cut, is_first_only=True) if operand is WHOLE else None


def _local(shape: Sequence[int], axis: int, number: int) -> tuple[int, ...]:
    return tuple(size // number if i == axis else size for i, size in enumerate(shape))


_RULES: dict[str, Callable[[Params, Shapes, Divisions, int], Plan | None]] = {
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "gather": _gather,
    "pad": _pad,
    "reduce_sum": _sum,
    "reshape": _reshape,
    "scatter-add": _scatter_add,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
}


def carry_of_scan(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the indices of the first input of a loop's carry, and of the first input after it."""
    if "num_consts" in params:
        return params["num_consts"], params["num_consts"] + params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()  # since JAX 0.11
    return len(constants), len(constants) + len(carry)


def can_draw_rows(equation: JaxprEqn) -> bool:
    """Returns whether `draw_rows` can draw a part of an operation's random bits."""
    if equation.primitive.name != "random_bits" or equation.params["bit_width"] != 32:
        return False
    is_counter = equation.invars[0].aval.shape == () and "fry" in str(equation.invars[0].aval.dtype)
    return (
        is_counter and jax.config.jax_threefry_partitionable and math.prod(equation.params["shape"]) < 2**32
    )


def draw_rows(equation: JaxprEqn, key: jax.Array, start: jax.Array, number: int) -> jax.Array:
    """Returns some rows of an operation's random bits. The bits of an element depend only on its index.

    Source: `jax_threefry_partitionable`, https://docs.jax.dev/en/latest/jep/9263-typed-keys.html
    """
    shape = equation.params["shape"]
    size = math.prod(shape[1:])
    low = jnp.arange(number * size, dtype=np.uint32) + start.astype(np.uint32) * np.uint32(size)
    keys = jax.random.key_data(key)
    count = low.size
    bits = threefry_2x32(keys, jnp.concatenate([jnp.zeros_like(low), low]))
    return (bits[:count] ^ bits[count:]).reshape(number, *shape[1:])


def bind(equation: JaxprEqn, arrays: Sequence[jax.Array], **changed: object) -> list[jax.Array]:
    """Runs the primitive of an equation, with some other parameters."""
    # The step was traced outside `shard_map`, where another mesh applies.
    changed |= {name: None for name in ("sharding", "out_sharding") if name in equation.params}
    params = equation.primitive.get_bind_params(equation.params | changed)
    found = equation.primitive.bind(*arrays, **params)
    return list(found) if equation.primitive.multiple_results else [found]
