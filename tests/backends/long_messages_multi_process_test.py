"""Workers send messages in pieces if an engine cannot send them at once."""

from __future__ import annotations

import pytest

from tests.helpers.processes import each_backend, run, strategy

PIECE = 1000
# Bytes of worker 0 and worker 1: pieces that are exactly full, and a worker that finishes first.
SIZES = [(0, 3 * PIECE + 500), (PIECE, PIECE - 1), (2 * PIECE + 1, PIECE), (2 * PIECE, 0), (7, 8)]


def message(worker, size):
    return bytes((worker + 3 * i) % 251 for i in range(size))


def in_worker_gather(sizes):
    from kdist.backends import workers

    runtime = strategy().runtime
    whole, workers._PIECE = workers._PIECE, PIECE
    engine, sent = runtime.group._gather_pieces, []
    runtime.group._gather_pieces = lambda data: sent.append(len(data)) or engine(data)
    try:
        me = runtime.worker_index
        return [runtime.group.all_gather_bytes(message(me, each[me])) for each in sizes], sent
    finally:
        workers._PIECE = whole
        del runtime.group._gather_pieces


@pytest.mark.kills(messages_of_one_piece="[torch]")
@each_backend
def test_long_messages_travel_in_pieces(backend):
    expected = [[message(worker, size) for worker, size in enumerate(each)] for each in SIZES]
    rounds = [max(1, *(-(-size // PIECE) for size in each)) for each in SIZES]
    for received, sent in run(backend, 2, in_worker_gather, SIZES):
        assert received == expected
        assert len(sent) == sum(rounds) and max(sent) <= PIECE + 1


def in_worker_gather_large(size):
    """Returns the lengths and the last bytes of a long message in several pieces and of a short message."""
    runtime = strategy().runtime
    data = bytes(size) + b"end" if runtime.worker_index else b"short"
    return [(len(received), received[-3:]) for received in runtime.group.all_gather_bytes(data)]


@pytest.mark.full
@each_backend
def test_a_message_of_more_than_a_piece_is_sent(backend):
    size = 150 << 20  # a piece has 64 MiB
    assert run(backend, 2, in_worker_gather_large, size) == [[(5, b"ort"), (size + 3, b"end")]] * 2
