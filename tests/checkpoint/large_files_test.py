"""Shards of more than 4 GiB, as sparse files: the tests write and read only the last bytes."""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest

from kdist.checkpoint.checked_reading import read_index, read_tensors
from kdist.checkpoint.index import File, Index, Piece, Tensor, dump
from kdist.checkpoint.shards import Span
from kdist.checkpoint.writing import Share, header_of

SHARD = "shard-00000-of-00001.safetensors"
LARGE = 5 << 30
LAST = np.arange(6, dtype="float32").reshape(2, 3)


@pytest.mark.kills("checkpoint_offsets_of_32_bits")
def test_a_tensor_behind_more_than_4_gib_is_written_and_read(tmp_path):
    large, last = Tensor("large", "uint8", (LARGE,)), Tensor("last", "float32", LAST.shape)
    share = Share([large, last], [Span(0, 0, LARGE), Span(1, 0, LAST.size)], 1, lambda: (), {}, {})
    header = header_of(share)
    offsets = [len(header) + begin for begin in share.offsets()]
    assert offsets == [len(header), len(header) + LARGE, len(header) + LARGE + LAST.nbytes]
    path = tmp_path / SHARD
    with open(path, "wb") as file:
        file.write(header)
        file.seek(offsets[1])
        file.write(LAST.tobytes())
    assert os.stat(path).st_blocks * 512 < 1 << 20  # the file is sparse

    # Other programs can read the file.
    from safetensors import safe_open

    with safe_open(path, "np") as opened:
        np.testing.assert_array_equal(opened.get_tensor("last"), LAST)

    piece = Piece(0, 0, LAST.size, offsets[1], zlib.crc32(LAST.tobytes()))
    index = Index(
        saved_at=1700000000.0,
        id="abc",
        number=1,
        saved_by={"num_workers": 1},
        workers=[0],
        parts={"last": {"kind": "value", "aliases": []}},
        tensors=[Tensor("last", "float32", LAST.shape, (piece,))],
        files=[File(SHARD, offsets[2], len(header), zlib.crc32(header))],
    )
    (tmp_path / "index.json").write_bytes(dump(index))
    found = read_index(str(tmp_path))
    np.testing.assert_array_equal(read_tensors(str(tmp_path), found, found.tensors)["last"], LAST)
