"""Splitting of rows over replicas, packing of tensors, and the names of devices.

`kdist.backends.replica` imports Keras, so its tests run in a worker process.
"""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.backends.device_names import count_of_kind, missing_device, short_name, too_late
from kdist.errors import DeviceError
from tests.helpers.processes import each_backend, run

# One call checks all splits, because a call to a worker takes longer than a split.
SPLITS = [(rows, replicas) for rows in range(1, 68) for replicas in range(1, 18)]


def _splits():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    from kdist.arrays.splitting import split_rows
    from kdist.backends.replica import shares_of

    def parts(num_rows, num_replicas, equally):
        split = split_rows(num_rows, num_replicas, equally)
        return [(slice(*rows), share) for rows, share in zip(split, shares_of(split), strict=True)]

    @settings(max_examples=300, deadline=None, database=None)
    @given(st.integers(1, 10**7), st.integers(1, 600), st.booleans())
    def holds(num_rows, num_replicas, equally):
        check_split(num_rows, num_replicas, equally, parts(num_rows, num_replicas, equally))

    holds()
    for (num_rows, num_replicas), equally in itertools.product(SPLITS, (False, True)):
        check_split(num_rows, num_replicas, equally, parts(num_rows, num_replicas, equally))
    return [[(rows.start, rows.stop, share.share) for rows, share in parts(n, 3, False)] for n in (32, 2)]


def check_split(num_rows, num_replicas, equally, parts):
    assert len(parts) == num_replicas
    assert math.isclose(sum(share.share for _, share in parts), 1.0, rel_tol=1e-12)
    sizes = [rows.stop - rows.start for rows, _ in parts]
    if num_rows < num_replicas or (
        equally and num_rows % num_replicas
    ):  # every replica has all rows, but only one counts in sums
        assert all((rows.start, rows.stop) == (0, num_rows) for rows, _ in parts)
        assert [share.counts for _, share in parts] == [1.0] + [0.0] * (num_replicas - 1)
        assert {share.scalar_weight for _, share in parts} == {1.0}
        return
    # Each row exactly once, in order.
    assert parts[0][0].start == 0 and parts[-1][0].stop == num_rows
    assert all(left.stop == right.start for (left, _), (right, _) in itertools.pairwise(parts))
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True) and min(sizes) >= 1
    for size, (_, share) in zip(sizes, parts, strict=True):
        assert share.share == size / num_rows == share.scalar_weight
        assert share.counts == 1.0


@pytest.mark.kills("rows_dropped")
def test_split_rows():
    thirty_two, two = run("torch", 1, _splits)[0]
    assert thirty_two == [(0, 11, 11 / 32), (11, 22, 11 / 32), (22, 32, 10 / 32)]
    assert two == [(0, 2, 1 / 3)] * 3


def _pack_and_unpack():
    import keras
    import numpy as np

    from kdist.backends.replica import packed

    calls = []

    def double(tensors):
        calls.append([(keras.backend.standardize_dtype(t.dtype), tuple(t.shape)) for t in tensors])
        return [t * 2 for t in tensors]

    arrays = [
        np.arange(6, dtype="float32").reshape(2, 3),
        np.array(5, dtype="int32"),
        np.array(1.5, dtype="float32"),
        np.zeros((0, 4), dtype="float32"),
        np.arange(4, dtype="int32").reshape(2, 1, 2),
        np.ones((1, 2), dtype="float16"),
    ]
    results = packed(double, [keras.ops.convert_to_tensor(a) for a in arrays], keras.ops.concatenate)
    for before, after in zip(arrays, results, strict=True):
        after = keras.ops.convert_to_numpy(after)
        assert after.dtype == before.dtype and after.shape == before.shape
        np.testing.assert_array_equal(after, before * 2)
    assert packed(double, [], keras.ops.concatenate) == []
    return calls


@each_backend
def test_packed_sends_one_flat_tensor_a_dtype(backend):
    calls = run(backend, 1, _pack_and_unpack)[0]
    assert calls[0] == [("float32", (7,)), ("int32", (5,)), ("float16", (2,))]


PREFIXES = ("", "/", "/device:", "device:", "/job:localhost/device:", "/job:worker/replica:0/task:3/device:")


@given(
    prefix=st.sampled_from(PREFIXES),
    kind=st.sampled_from(["cpu", "gpu", "tpu", "CPU", "Gpu", "cuda"]),
    index=st.integers(0, 999),
)
def test_device_names_of_the_field(prefix, kind, index):
    expected = kind.lower().replace("cuda", "gpu")
    assert short_name(f"{prefix}{kind}:{index}") == f"{expected}:{index}"
    assert short_name(f"{prefix}{kind}") == f"{expected}:0"
    assert short_name(short_name(f"{prefix}{kind}:{index}")) == f"{expected}:{index}"


@pytest.mark.parametrize(
    "name", ["", "cpu:", "cpu:-1", "xpu:0", "cpu:0:1", "0", "cpu 0", "gpu:one", "my cpu:0"]
)
def test_other_names_are_errors(name):
    with pytest.raises(DeviceError, match=r"kind \(cpu, gpu, tpu\) and an index") as info:
        short_name(name)
    assert repr(name) in str(info.value)


def test_count_of_kind():
    assert count_of_kind(["cpu:0", "cpu:3", "gpu:7"], "cpu") == 4
    assert count_of_kind(["gpu:7"], "cpu") == 0


def test_messages_name_what_is_needed():
    assert "gpu:1" in str(missing_device("gpu:1", ["cpu:0"])) and "cpu:0" in str(
        missing_device("gpu:1", ["cpu:0"])
    )
    assert "none" in str(missing_device("gpu:1", []))
    late = str(too_late("JAX", 3, "jax.config.update(...)"))
    assert "JAX" in late and "cpu_devices_needed=3" in late and "jax.config.update(...)" in late
