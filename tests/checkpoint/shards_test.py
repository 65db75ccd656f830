"""Cutting tensors into shards, and the index, for any sizes and any bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.checkpoint.checked_reading import read_tensors
from kdist.checkpoint.index import DTYPES, File, Index, Piece, Tensor, checksum_of, dump, parse
from kdist.checkpoint.shards import Size, cut
from kdist.errors import CheckpointCorruptError, CheckpointError

sizes = st.lists(st.builds(Size, st.integers(0, 50), st.sampled_from([1, 2, 4, 8, 16])), max_size=12)


@pytest.mark.kills("checkpoint_elements_lost")
@given(sizes, st.integers(1, 9))
def test_every_element_is_in_one_shard_and_shards_are_equal(sizes, num_shards):
    shards = [cut(sizes, shard, num_shards) for shard in range(num_shards)]
    total = sum(size.elements * size.itemsize for size in sizes)
    elements = [(span.tensor, i) for spans in shards for span in spans for i in range(span.first, span.last)]
    assert elements == [(tensor, i) for tensor, size in enumerate(sizes) for i in range(size.elements)]
    largest = max((size.itemsize for size in sizes), default=1)
    for spans in shards:
        held = sum((span.last - span.first) * sizes[span.tensor].itemsize for span in spans)
        assert abs(held - total / num_shards) <= largest


def an_index(**changes):
    """Returns an index of two shards, with a tensor that crosses their boundary."""
    fields = {
        "saved_at": 1700000000.5,
        "id": "abc",
        "number": 12,
        "saved_by": {"num_workers": 2, "backend": "jax", "keras": "3", "kdist": "0"},
        "workers": [0, 1],
        "parts": {"w": {"kind": "layer", "aliases": []}},
        "tensors": [
            Tensor("w/0/kernel", "float32", (2, 3), (Piece(0, 0, 4, 80, 1), Piece(1, 4, 6, 80, 2**32 - 1))),
            Tensor("w/1/bias", "bfloat16", (), (Piece(1, 0, 1, 88, 7),)),
            Tensor("w/2/nothing", "int8", (0, 5)),
        ],
        "files": [
            File("shard-00000-of-00002.safetensors", 96, 80, 5),
            File("shard-00001-of-00002.safetensors", 90, 80, 6),
        ],
        "values": {"epoch": 3, "name": 'quoted "text"\n, {"crc32": "', "save_counter": 12},
        "states": {"data": [{"epoch": 1, "step": 2}]},
        "configs": {},
    }
    return Index(**{**fields, **changes})


@pytest.mark.kills("deleted_checkpoint_called_corrupt")
def test_a_checkpoint_that_is_deleted_during_the_read_is_not_called_corrupt(tmp_path):
    index = an_index()
    with pytest.raises(CheckpointCorruptError, match="The checkpoint was deleted while kdist read it"):
        read_tensors(str(tmp_path / "ckpt-1"), index, index.tensors)


def test_an_index_is_what_was_written():
    index = an_index()
    assert parse(dump(index), "index.json") == index
    assert json.loads(dump(index))["values"]["epoch"] == 3  # plain JSON for other programs
    assert index.num_bytes == 4 * 6 + 2


@pytest.mark.kills("checkpoint_index_not_verified")
@given(st.data())
def test_every_flipped_bit_of_an_index_is_noticed(data):
    good = dump(an_index())
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointCorruptError, match="index"):
        parse(bytes(bad), "index.json")


@given(st.data())
def test_an_index_that_is_cut_short_is_noticed(data):
    good = dump(an_index())
    with pytest.raises(CheckpointCorruptError):
        parse(good[: data.draw(st.integers(0, len(good) - 1))], "index.json")


@given(st.binary(max_size=300))
def test_any_bytes_are_an_index_or_an_error_of_kdist(body):
    head = b'{"format": "kdist.checkpoint", "version": 1, "crc32": "%08x",\n' % checksum_of(1, body)
    for data in (body, head + body):
        with pytest.raises(CheckpointCorruptError):
            parse(data, "index.json")


json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["pieces", "name"]), inner),
    max_leaves=6,
)


@given(st.sampled_from(["tensors", "files", "shape", "dtype", "pieces"]), json_values)
def test_an_index_with_other_fields_is_an_error_of_kdist(field, value):
    fields = json.loads(dump(an_index()).partition(b"\n")[2].join([b"{", b""]))
    target = fields if field in fields else fields["tensors"][0]
    if target[field] == value or (field == "tensors" and value == []):
        return
    target[field] = value
    body = json.dumps(fields).encode()[1:]
    head = b'{"format": "kdist.checkpoint", "version": 1, "crc32": "%08x",\n' % checksum_of(1, body)
    with pytest.raises(CheckpointCorruptError):
        parse(head + body, "index.json")


def test_an_index_of_another_version():
    with pytest.raises(
        CheckpointError, match=r"(?s)only reads format versions up to 2.*version=3.*pip install"
    ):
        parse(dump(an_index(), version=3), "index.json")


@pytest.mark.kills("checkpoint_axis_not_checked")
def test_another_axis_than_the_first_needs_version_2():
    tensors = an_index().tensors
    index = an_index(tensors=[replace(tensors[0], axis=1), *tensors[1:]])
    assert dump(index).startswith(b'{"format": "kdist.checkpoint", "version": 2,')
    assert parse(dump(index), "index.json") == index
    assert dump(an_index()).startswith(b'{"format": "kdist.checkpoint", "version": 1,')
    for axis in (2, -1, 1.0, "x"):
        other = an_index(tensors=[replace(tensors[0], axis=axis), *tensors[1:]])
        with pytest.raises(CheckpointCorruptError):
            parse(dump(other), "index.json")


def test_dtypes_are_those_of_numpy():
    from kdist.checkpoint.checked_reading import dtype_of

    for name, (itemsize, _) in DTYPES.items():
        assert dtype_of(name).itemsize == itemsize, name
