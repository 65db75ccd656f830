"""Messages can be as long as the memory allows."""

from __future__ import annotations

import pytest

from tests.helpers.processes import each_backend, run, strategy


def in_worker_gather_large(size):
    """Returns the lengths and the last bytes of a long message and of a short message."""
    runtime = strategy().runtime
    data = bytes(size) + b"end" if runtime.worker_index else b"short"
    return [(len(received), received[-3:]) for received in runtime.group.all_gather_bytes(data)]


@pytest.mark.full
@each_backend
def test_a_message_of_a_hundred_megabytes_is_sent(backend):
    size = 150 << 20
    assert run(backend, 2, in_worker_gather_large, size) == [[(5, b"ort"), (size + 3, b"end")]] * 2
