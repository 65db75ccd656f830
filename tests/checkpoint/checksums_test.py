"""Checksums equal zlib's with and without ISA-L, because checkpoints move between machines."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from kdist.checkpoint.index import crc32
from tests.helpers.scripts import run_python


@given(st.binary(), st.binary(), st.binary(max_size=3))
def test_sums_are_those_of_zlib(first, second, before):
    assert crc32(first + second) == zlib.crc32(first + second)
    assert crc32(memoryview(before + second)[len(before) :], crc32(first)) == zlib.crc32(first + second)


def test_without_isal():
    blocked = "import sys; sys.modules['isal'] = None"
    code = f"{blocked}; from kdist.checkpoint import index; print(index.crc32(b'kdist'))"
    assert int(run_python("-c", code).stdout) == zlib.crc32(b"kdist") == crc32(b"kdist")
