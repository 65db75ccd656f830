"""The same calls return the same types, dtypes and structures on kdist and on stock `tf.distribute`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.processes import each_backend, run, run_plain, strategy

_SAME_NAME = "chief"
_INTEGERS = ("uint8", "int32", "int64")


def _described(value):
    """Returns a value as plain data, so that tests can compare both libraries."""
    if type(value).__name__ == "PerReplica":
        return ["PerReplica", *map(_described, value.values)]
    if isinstance(value, dict):
        return {name: _described(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *map(_described, value)]
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return [type(value).__name__, value]
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    array = np.asarray(value)
    return [str(array.dtype), array.tolist()]


def _answers(s, distribute, convert):
    """Calls the API of a strategy with two replicas of one worker; `convert` makes a tensor."""
    counts = iter(range(100))
    context = distribute.get_replica_context

    def merged(merge_fn, *args):
        return s.run(lambda *values: context().merge_call(merge_fn, args=values), args=args)

    numbers = s.experimental_distribute_values_from_function(
        lambda c: convert([[1.0, 2.0 + c.replica_id_in_sync_group]], "float32")
    )
    small = {
        dtype: s.experimental_distribute_values_from_function(
            lambda c, dtype=dtype: convert([1, 2 + 3 * c.replica_id_in_sync_group], dtype)
        )
        for dtype in _INTEGERS
    }
    found = {
        "equal number": s.run(lambda: 7),
        "equal numbers": s.run(lambda: (7, 2.5, True, None, b"x", [_SAME_NAME])),
        "equal text": s.run(lambda: {"a": "text", "b": ()}),
        "a function": s.run(lambda: len) is len,
        "a number of the context": s.run(lambda: context().num_replicas_in_sync),
        "a tensor": s.run(lambda: convert(1.0, "float32")),
        "merged number": merged(lambda _: 5),
        "merged text": merged(lambda _: _SAME_NAME),
        "merged tensor": merged(lambda _: convert(5.0, "float32")),
        "merged structure": merged(lambda _: {"a": convert([1, 2], "int32"), "b": None, "c": (1,)}),
        "merged sum": merged(lambda there, x: there.reduce("SUM", x, axis=None), numbers),
        "merged components": merged(lambda _, x: x, numbers),
        "argument in the merge": merged(lambda _, x: type(x).__name__, 7),
        "values from a function": s.experimental_distribute_values_from_function(lambda _: 5),
        "mean of a number": s.reduce("MEAN", 7, axis=None),
        "local number": s.experimental_local_results(7),
        "local text": s.experimental_local_results(_SAME_NAME),
        "local none": s.experimental_local_results(None),
        "local values": s.experimental_local_results(numbers),
        "local dictionary": s.experimental_local_results({"a": numbers, "b": 7}),
        "local constants": s.experimental_local_results({"a": 7}),
        "local list": s.experimental_local_results([numbers, "x"]),
        "means": {
            f"{dtype} {axis}": s.reduce("MEAN", value, axis=axis)
            for dtype, value in small.items()
            for axis in (None, 0)
        },
        "sums": {dtype: s.reduce("SUM", value, axis=None) for dtype, value in small.items()},
        "mean in a replica": s.run(lambda x: context().all_reduce("MEAN", x), args=(small["int32"],)),
    }
    errors = {}
    for name, call in {
        "reduce without axis": lambda: s.reduce("SUM", numbers),
        "gather without axis": lambda: s.gather(numbers),
        "sum of a number": lambda: s.reduce("SUM", 7, axis=None),
        "no such operation": lambda: s.reduce("MAX", numbers, axis=None),
        "arguments not in a tuple": lambda: s.run(lambda x: x, args=1),
    }.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            errors[name] = "TypeError" if isinstance(error, TypeError) else "ValueError"
    different = _described(s.run(lambda: next(counts)))
    return _described(found), errors, different[0]


def in_stock_tensorflow():
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return _answers(tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]), tf.distribute, tf.constant)


def in_kdist():
    import keras

    import kdist

    return _answers(strategy(2), kdist, keras.ops.convert_to_tensor)


@pytest.mark.kills(
    jax_merged_tensor_is_one_per_replica="[jax]",
    mean_of_integers_in_floatx="[torch]",
    run_wraps_equal_numbers="[torch]",
)
@each_backend
def test_results_are_like_those_of_tf_distribute(backend):
    expected, errors, different = run_plain("tensorflow", in_stock_tensorflow)
    if backend == "jax":  # JAX uses float32 unless users set jax_enable_x64, and compiles one program
        expected = _without_64_bits(expected)
        different = "int"
    found, found_errors, found_different = run(backend, 1, in_kdist)[0]
    assert {name: value for name, value in found.items() if value != expected[name]} == {}
    assert found.keys() == expected.keys()
    assert (found_errors, found_different) == (errors, different)


def _without_64_bits(value):
    if isinstance(value, dict):
        return {name: _without_64_bits(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_64_bits(part) for part in value]
    return value.replace("64", "32") if value in ("float64", "int64") else value
