"""Messages between workers, and the detection of workers that die, stop, fail or end."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

import pytest

from kdist.control import connections as connections_module
from kdist.control import loss_reasons
from kdist.control.channel import Channel
from kdist.control.connections import Connection, frame
from kdist.control.loss_reasons import Loss
from kdist.errors import WorkerLostError, WorkerTimeoutError
from tests.helpers.joining import channels, sockets


def within(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def die(channel: Channel) -> None:
    """Closes the sockets of a worker, as the kernel does for a killed process."""
    with channel._changed:
        for connection in channel._connections._all.values():
            connection.socket.shutdown(socket.SHUT_RDWR)


def gather(workers: list[Channel], messages: list[bytes]) -> list[list[bytes]]:
    begun = [worker.begin(message) for worker, message in zip(workers, messages, strict=True)]
    return [finish() for finish in begun]


# Messages -----------------------------------------------------------------------------------------------------


@pytest.mark.kills("channel_messages_of_the_chief_only", "channel_compressed_messages_not_read")
@pytest.mark.parametrize("count", [2, 3, 9, 12])
def test_all_workers_get_all_messages_in_order(count: int) -> None:
    with channels(count) as workers:
        for size in (0, 1, 1000):
            messages = [bytes([index]) * (size * (index + 1)) for index in range(count)]
            assert gather(workers, messages) == [messages] * count


@pytest.mark.kills("channel_sends_what_fits")
def test_long_messages_in_all_directions_at_once() -> None:
    with channels(3) as workers:
        messages = [os.urandom(size << 20) for size in (20, 3, 40)]
        assert gather(workers, messages) == [messages] * 3
        assert gather(workers, [b"a", b"b", b"c"])[1] == [b"a", b"b", b"c"]


@pytest.mark.kills("channel_turns_confused")
def test_a_worker_can_be_several_messages_ahead() -> None:
    with channels(2) as (chief, other):
        ahead = [other.begin(text) for text in (b"1", b"2", b"3")]
        assert chief.gather(b"one") == [b"one", b"1"]
        later = [chief.begin(text) for text in (b"two", b"three")]
        assert [finish() for finish in ahead] == [[b"one", b"1"], [b"two", b"2"], [b"three", b"3"]]
        assert [finish() for finish in later] == [[b"two", b"2"], [b"three", b"3"]]


@pytest.mark.kills("channel_names_a_worker_that_was_in_time")
@pytest.mark.parametrize("waiter", [0, 1])
def test_a_late_worker_is_named(waiter: int) -> None:
    with channels(3, 0.3) as workers:
        workers[1 - waiter].begin(b"in time")
        began = time.monotonic()
        with pytest.raises(WorkerTimeoutError, match=r"^worker 2 did not respond within 0.3 s") as raised:
            workers[waiter].gather(b"")
        assert 0.25 < time.monotonic() - began < 5
        assert "CommunicationOptions(timeout_seconds=" in str(raised.value)
        for worker in workers:
            worker.timeout_seconds = None
        workers[2].begin(b"late")
        messages = [b"x", b"y", b"z"]
        assert gather(workers, messages) == [messages] * 3, "the messages of the late turn are not mixed up"


# Losses -------------------------------------------------------------------------------------------------------


@pytest.mark.kills("channel_losses_not_relayed")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_that_dies_ends_the_messages_of_the_others(lost: int) -> None:
    with channels(3) as workers:
        began = [worker.begin(b"") for index, worker in enumerate(workers) if index != lost]
        die(workers[lost])
        start = time.monotonic()
        for finish in began:
            with pytest.raises(
                WorkerLostError, match=rf"The job lost worker {lost}: it died or is unreachable"
            ):
                finish()
        assert time.monotonic() - start < 3
        assert workers[2].died() == {lost: "it died or is unreachable"}


@pytest.mark.kills("channel_messages_of_a_lost_worker_discarded")
def test_the_last_message_of_a_worker_counts() -> None:
    with channels(3) as workers:
        early = [workers[index].begin(b"%d" % index) for index in (1, 0)]
        workers[1].close()  # it has ended normally
        within(lambda: 1 in workers[0].lost and 1 in workers[2].lost)
        assert workers[2].gather(b"2") == [b"0", b"1", b"2"]
        assert early[1]() == [b"0", b"1", b"2"]
        with pytest.raises(WorkerLostError, match="worker 1: it ended before the others"):
            workers[2].gather(b"")


@pytest.mark.kills("channel_waits_for_a_chief_that_left")
def test_a_chief_that_leaves_before_all_messages_came_ends_the_wait() -> None:
    with channels(3) as workers:
        workers[0].begin(b"0")
        waiting = workers[1].begin(b"1")
        workers[0].close()
        with pytest.raises(WorkerLostError, match="worker 0: it ended before the others"):
            waiting()


@pytest.mark.kills("channel_consequence_named")
def test_the_cause_is_named_and_not_the_workers_that_it_took_along() -> None:
    with channels(4) as workers:
        workers[1].leave(Loss(loss_reasons.LOST_ANOTHER, "it lost another worker"))
        within(lambda: 1 in workers[0].lost)
        workers[2].leave(Loss(loss_reasons.ENDED, "it ended before the others"))
        within(lambda: 2 in workers[0].lost)
        workers[3].leave(Loss(loss_reasons.HUNG, "it hung at step 3 of epoch 1"))
        within(lambda: 3 in workers[0].lost)
        assert workers[0].wait_for_loss(0) == {3: "it hung at step 3 of epoch 1"}
        with pytest.raises(WorkerLostError, match="worker 3: it hung at step 3 of epoch 1"):
            workers[0].gather(b"")


def test_the_error_of_a_worker_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with channels(2) as (chief, other):
        monkeypatch.setattr("sys.last_value", ValueError("no such file\nmore"), raising=False)
        other.leave()
        assert chief.wait_for_loss(10) == {1: "it failed: ValueError: no such file"}
        monkeypatch.setattr("sys.last_value", WorkerLostError("it lost one"), raising=False)
        assert loss_reasons.of_this_process().kind == loss_reasons.LOST_ANOTHER


def test_losses_are_reported_once_to_each_callback() -> None:
    with channels(2) as (chief, other):
        seen: list[tuple[int, bytes]] = []
        chief.on_loss(lambda index, loss: seen.append((index, loss.kind)))
        other.leave(Loss(loss_reasons.HUNG, "it hung"))
        die(other)
        within(lambda: seen)
        chief.on_loss(lambda index, loss: seen.append((index, b"later")))
        within(lambda: len(seen) == 2)
        time.sleep(0.1)
        assert seen == [(1, loss_reasons.HUNG), (1, b"later")]


@pytest.mark.kills("heartbeat_ignored")
def test_a_stopped_worker_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDIST_HEARTBEAT_TIMEOUT", "1")
    monkeypatch.setattr(connections_module, "is_stopped", lambda pid: pid == 77)
    with channels(3) as workers:
        time.sleep(0.6)
        assert not workers[0].lost, "all workers send heartbeats"
        stopped = workers[1]._connections
        monkeypatch.setattr(stopped, "_beat", lambda: None)
        workers[0]._connections._all[1].pid = 77
        began = time.monotonic()
        assert "SIGSTOP" in workers[2].wait_for_loss(10)[1]
        assert time.monotonic() - began < 2


def test_a_silent_worker_that_runs_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C call can hold the GIL."""
    monkeypatch.setenv("KDIST_HEARTBEAT_TIMEOUT", "1")
    with channels(2) as (chief, other):
        monkeypatch.setattr(other._connections, "_beat", lambda: None)
        assert chief.wait_for_loss(1.0) == {}


@pytest.mark.kills("channel_other_data_accepted")
@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n" * 2, b"kdc1l\0\0\0\1" + bytes(7) + b"\x03[1]", b"kdc1m\0\0\0\1" + b"\xff" * 8],
)
def test_a_connection_with_other_data_is_closed(data: bytes) -> None:
    ends = sockets(2)
    with ends[1][0]:
        chief = Channel(["worker 0", "worker 1"], 0, ends[0])
        ends[1][0].sendall(data)
        assert chief.wait_for_loss(10) == {1: "it died or is unreachable"}
        chief.close()


# Posts and waiting workers ------------------------------------------------------------------------------------


def test_posts_of_the_chief_reach_all_workers_and_others_the_chief() -> None:
    with channels(3) as workers:
        workers[0].post("a", "ünïcode")
        workers[1].post("b", "1")
        gather(workers, [b""] * 3)
        assert [worker.look_up("a") for worker in workers] == ["ünïcode"] * 3
        assert [worker.look_up("b") for worker in workers] == ["1", "1", None]
        assert workers[2].look_up("c") is None
        die(workers[0])
        within(lambda: 0 in workers[2].lost)
        assert workers[2].look_up("a") == "ünïcode"
        with pytest.raises(WorkerLostError, match="worker 0"):
            workers[2].look_up("c")


@pytest.mark.kills("channel_waits_not_withdrawn")
def test_waiting_workers_are_known_to_all() -> None:
    with channels(3) as workers:
        workers[0].say("all_reduce at step 1")
        workers[1].say("all_reduce at step 2")
        within(lambda: workers[2].waiting() == {0: "all_reduce at step 1", 1: "all_reduce at step 2"})
        assert workers[1].waiting() == {0: "all_reduce at step 1"}
        workers[1].say(None)
        within(lambda: workers[0].waiting() == {})
        assert workers[2].waiting() == {0: "all_reduce at step 1"}


# The end ------------------------------------------------------------------------------------------------------


def test_the_last_messages_arrive_although_the_sender_closes() -> None:
    for _ in range(20):
        with channels(2) as (chief, other):
            begun = other.begin(b"x" * 300_000)
            chief.gather(b"y" * 300_000)
            chief.close()
            assert len(begun()[1]) == 300_000
            assert other.lost[0].kind == loss_reasons.ENDED


@pytest.mark.kills("channel_closes_before_all_is_sent")
def test_a_channel_sends_all_bytes_before_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "_FAREWELL", 0.05)
    ends = sockets(2)
    chief = Channel(["worker 0", "worker 1"], 0, ends[0])
    chief.post("key", "x" * 30_000_000)
    closing = threading.Thread(target=chief.close)
    closing.start()
    received = bytearray()
    with ends[1][0] as slow:
        while data := slow.recv(1 << 20):
            received += data
            time.sleep(0.02)
    closing.join(10)
    assert len(received) > 30_000_000 and loss_reasons.REASONS[loss_reasons.ENDED].encode() in received[-200:]


@pytest.mark.kills("channel_each_leave_relayed_alone")
def test_workers_that_leave_together_are_reported_together() -> None:
    count = 200
    ends = sockets(count)
    chief = Channel([f"worker {index}" for index in range(count)], 0, ends[0])
    begun = time.process_time()
    with chief._changed:  # the chief reads nothing until all have left
        for index in range(1, count):
            ends[index][0].sendall(frame(b"l", 0, json.dumps([[index, "E", "it ended", 0]]).encode()))
    within(lambda: len(chief.lost) == count - 1)
    chief.close()
    with ends[1][0] as other:
        received = bytearray()
        while data := other.recv(1 << 20):
            received += data
    for index in range(2, count):
        ends[index][0].close()
    assert received.count(b"kdc1l") < 20, "one frame per worker would take seconds for a thousand workers"
    assert time.process_time() - begun < 5


@pytest.mark.kills("channel_of_a_dead_worker_is_an_error")
def test_a_connection_that_ended_before_the_channel_began_is_a_loss() -> None:
    ends = sockets(3)
    ends[1][0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ends[1][0].close()  # with a reset, as for a killed process
    names = ["worker 0", "worker 1", "worker 2"]
    chief, other = Channel(names, 0, ends[0]), Channel(names, 2, ends[2])
    with pytest.raises(WorkerLostError, match="worker 1: it died"):
        other.gather(b"")
    for channel in (chief, other):
        channel.leave()
    for channel in (chief, other):
        channel.close()


@pytest.mark.kills("channel_thread_fails_in_silence")
def test_a_failure_of_the_thread_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError

    with channels(2) as (chief, other):
        waiting = other.begin(b"")
        monkeypatch.setattr(other._connections, "_beat", fail)
        with pytest.raises(WorkerLostError, match="worker 0"):
            waiting()
        assert chief.wait_for_loss(10)


@pytest.mark.kills("channel_long_message_is_silence")
def test_data_shows_that_a_worker_is_alive() -> None:
    ends = sockets(2)
    with ends[0][1] as sender:
        connection = Connection(ends[1][0], 15.0)
        connection.heard = 0.0
        sender.sendall(frame(b"a", 0, bytes(1000))[:500])
        within(lambda: connection.read() == [] and connection.heard > 0)
        connection.close()


@pytest.mark.kills("channel_slow_reader_unreachable")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports acknowledgments")
def test_a_worker_that_does_not_read_is_reachable() -> None:
    """A C call holds the GIL, and the buffers are full. Hosts that vanish are in `two_hosts_multi_process_test.py`."""
    ends = sockets(2)
    with ends[1][0]:
        connection = Connection(ends[0][1], 15.0)
        assert not connection.send(bytes(50_000_000))
        time.sleep(0.5)
        assert not connection.is_unreachable(0.2)
        connection.close()
