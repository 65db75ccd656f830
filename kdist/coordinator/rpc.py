"""Calls between the tasks of a job over gRPC, with a JSON header and the raw bytes of arrays.

TensorFlow's own parameter servers also use gRPC (https://grpc.io). It provides deadlines, keep-alive and
reconnection; this module defines only the messages. Both sides of a connection prove by TLS that they know
the secret of the job, before either side reads anything: see `tls.py`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kdist.arrays.memory import aligned_empty
from kdist.cluster import timeouts
from kdist.cluster.addresses import cannot_listen, is_loopback, split_address
from kdist.coordinator import tls
from kdist.coordinator.threads import DaemonThreads
from kdist.coordinator.tls import grpc
from kdist.errors import ClusterConfigError, KdistError, WorkerLostError

_CALL, _WATCH, _HELLO = "/kdist/call", "/kdist/watch", "/kdist/hello"
_CHUNK = 512 << 10  # bytes of arrays per message: copies are faster while the data is in the CPU cache
_LENGTH = struct.Struct("<I")
_MOST_HEADER = 16 << 20  # bytes, enough for the names, versions and shapes of about 300,000 variables
_MOST_CALLS = 4096  # concurrent calls, each with its own thread
_AGAIN = 0.02  # seconds between two attempts to connect
_SIZES = (
    ("grpc.max_receive_message_length", _LENGTH.size + _MOST_HEADER + _CHUNK),
    ("grpc.max_send_message_length", -1),
)
_CHANNEL = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The maximum duration of one attempt to connect, including the handshake.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.ssl_target_name_override", tls.NAME),
    *_SIZES,
)
_SERVER = (
    ("grpc.so_reuseport", 0),  # otherwise a second server on the same port gets no error
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.server_handshake_timeout_ms", 20_000),
    *_SIZES,
)

Message = tuple[Mapping[str, Any], Sequence[np.ndarray]]
Handler = Callable[[Mapping[str, Any], list[np.ndarray]], Message]


class CallFailed(KdistError):
    """A handler in another task failed, or the message of the other task is malformed."""


class PeerLost(WorkerLostError):
    """The other task is unreachable, or exited during a call."""


class Peer:
    """A connection to another task of the job. If the task is lost, `if_lost` returns the hint of the error.

    `session` is the name of the current run of the job. A task only answers the session that began last.
    """

    def __init__(
        self, name: str, address: str, secret: str, if_lost: Callable[[], str] = str, session: str = ""
    ) -> None:
        self.name, self.address, self.if_lost, self.session = name, address, if_lost, session
        self.sent = self.received = 0
        """The bytes of arrays sent to the task, and received from it."""
        options = (*_CHANNEL, *_keep_alive())
        self._channel = grpc().secure_channel(address, tls.client_credentials(secret), options=options)
        self._call = self._channel.stream_stream(_CALL)
        # For calls of a single message. They take half the time, because gRPC needs no thread to send them.
        self._brief = self._channel.unary_stream(_CALL)
        self._watch = self._channel.stream_stream(_WATCH)
        self._hello = self._channel.unary_unary(_HELLO)

    def __repr__(self) -> str:
        return self.name

    def is_there(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds until the task listens, and returns whether it does.

        Raises:
            ClusterConfigError: If the process that listens does not have the secret of the job.
        """
        # gRPC's `channel_ready_future` does not distinguish a foreign process from a task that is missing.
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._hello(b"", timeout=left)
                return True
            except grpc().RpcError as error:
                if isinstance(explained := self._explained(error, "hello"), ClusterConfigError):
                    raise explained from None
            except ValueError:  # the channel was closed in the meantime
                return False
            time.sleep(max(0.0, min(_AGAIN, deadline - time.monotonic())))
        return False

    def call(
        self,
        method: str,
        header: Mapping[str, Any] | None = None,
        arrays: Sequence[np.ndarray] = (),
        timeout: float | None = None,
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Calls a method of the task, and returns the header and the arrays of the answer.

        Raises:
            PeerLost: If the task is unreachable or has exited.
            CallFailed: If the method raises an error.
        """
        return self.begin(method, header, arrays, timeout)()

    def begin(
        self,
        method: str,
        header: Mapping[str, Any] | None = None,
        arrays: Sequence[np.ndarray] = (),
        timeout: float | None = None,
    ) -> Callable[[], tuple[dict[str, Any], list[np.ndarray]]]:
        """Starts a call, and returns a function that waits for the answer and returns it like `call`."""
        messages = _written({"method": method, "session": self.session, **(header or {})}, arrays)
        first, second = next(messages), next(messages, None)
        self.sent += sum(array.nbytes for array in arrays)
        if second is None:
            answer = self._brief(first, timeout=timeout)
        else:
            sent = itertools.chain([first, second], messages)
            answer = self._call(sent, timeout=timeout)

        def wait() -> tuple[dict[str, Any], list[np.ndarray]]:
            try:
                found, parts = _read(answer)
            except grpc().RpcError as error:
                raise self._explained(error, method) from None
            except CallFailed as error:
                answer.cancel()
                raise CallFailed(f"{self.name}: {error}") from None
            if "is_new" in found:  # the process that began the session has exited
                raise self.lost()
            if "failed" in found:
                raise CallFailed(f"{self.name}: {found['failed']}")
            self.received += sum(part.nbytes for part in parts)
            return found, parts

        return wait

    def watch(self, lost: Callable[[], None]) -> Callable[[], None]:
        """Registers a function that gRPC calls in one of its threads when the task has ended.

        Returns a function that stops the watch. Keep it, because gRPC ends calls without references.
        """
        held = threading.Event()

        def hold() -> Iterator[bytes]:
            held.wait()
            yield from ()

        watching = self._watch(hold())

        def ended() -> None:
            if not held.is_set():
                held.set()
                lost()

        if not watching.add_callback(ended):
            ended()

        def stop() -> None:
            held.set()
            watching.cancel()

        return stop

    def lost(self) -> PeerLost:
        """Returns the error that reports the task as lost."""
        return PeerLost(f"{self.name} has exited or is unreachable.", hint=self.if_lost())

    def close(self) -> None:
        self._channel.close()

    def _explained(self, error: Any, method: str) -> KdistError:
        code = grpc().StatusCode
        if "SSL_ERROR_SSL" in (error.details() or ""):  # gRPC's details of a failed handshake
            return ClusterConfigError(
                f"{self.name} failed to authenticate with the secret of this job. Nothing was sent to it.",
                hint="Set KDIST_CLUSTER_TOKEN to the same value for all tasks, as `kdist run` does. If the values are "
                "equal, find the process that uses the port:\n"
                f"ss -ltnp 'sport = :{split_address(self.address)[1]}'",
            )
        if error.code() in (code.UNAVAILABLE, code.CANCELLED, code.DEADLINE_EXCEEDED):
            return self.lost()
        return CallFailed(
            f"Calling {method!r} on {self.name} failed: {error.details()}",
            hint="Read the log of that task, and restart the job.",
        )


def _keep_alive() -> tuple[tuple[str, int], ...]:
    """Returns the options that detect stopped processes, and hosts that disappear without closing connections."""
    third = round(timeouts.heartbeat_timeout() * 1000 / 3)
    return (
        ("grpc.keepalive_time_ms", third),
        ("grpc.keepalive_timeout_ms", 2 * third),
        # 60 s by default, also if the keep-alive timeout is shorter.
        ("grpc.http2.ping_timeout_ms", 2 * third),
    )


class Service:
    """A server for calls from other tasks, which need the secret.

    `handler_of` returns the function that answers the call with a header. Each call runs in its own thread.
    """

    def __init__(self, address: str, handler_of: Callable[[Mapping[str, Any]], Handler], secret: str) -> None:
        self._handler_of = handler_of
        module = grpc()
        self._server = module.server(
            DaemonThreads(f"kdist {address}"), options=_SERVER, maximum_concurrent_rpcs=_MOST_CALLS
        )
        generic = module.method_handlers_generic_handler(
            "kdist",
            {
                "call": module.stream_stream_rpc_method_handler(self._answer),
                "watch": module.stream_stream_rpc_method_handler(self._hold),
                "hello": module.unary_unary_rpc_method_handler(lambda message, context: b""),
            },
        )
        self._server.add_generic_rpc_handlers((generic,))
        self._bind(address, tls.server_credentials(secret))
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def wait(self) -> None:
        self._server.wait_for_termination()

    def _bind(self, address: str, credentials: Any) -> None:
        host, port = split_address(address)
        bracketed = f"[{host}]" if ":" in host else host
        # The address can belong to a load balancer instead of an interface of this machine.
        everywhere = [] if is_loopback(host) else [f"[::]:{port}"]
        for where in (f"{bracketed}:{port}", *everywhere):
            try:
                if self._server.add_secure_port(where, credentials):
                    return
            except RuntimeError:
                continue
        raise cannot_listen(address)

    def _answer(self, received: Iterable[bytes], context: Any) -> Iterator[bytes]:
        try:
            header, arrays = _read(received)
            answer = self._handler_of(header)(header, arrays)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}, ()
        yield from _written(*answer)

    def _hold(self, received: Iterable[bytes], context: Any) -> Iterator[bytes]:
        while context.is_active():
            time.sleep(0.5)
        yield from ()


def _written(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Iterator[bytes]:
    """Yields the messages of a call or an answer. Large arrays follow the header in chunks."""
    # These are views of contiguous arrays, which are copied when they are sent. Others are copied here.
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    kinds = [[array.dtype.name, list(array.shape)] for array in arrays]
    text = json.dumps({**header, "arrays": kinds}).encode()
    begin = _LENGTH.pack(len(text)) + text
    if sum(part.size for part in flat) <= _CHUNK:
        yield b"".join([begin, *(part.tobytes() for part in flat)])
        return
    yield begin
    for part in flat:
        for start in range(0, part.size, _CHUNK):
            yield part[start : start + _CHUNK].tobytes()


def _read(messages: Iterable[bytes]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Reads the messages of `_written`. Allocates memory for an array only when its data arrives.

    Raises:
        CallFailed: If the messages are malformed, or the arrays exceed the memory of this machine.
    """
    stream = iter(messages)
    first = next(stream, b"")
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(first)[0]
        header = json.loads(first[_LENGTH.size : end])
        kinds = [(_shape(shape), _dtype(name)) for name, shape in header.pop("arrays")]
    except (struct.error, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _malformed(f"its header is invalid, {type(error).__name__}") from None
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
    if sum(sizes) > _most_bytes():
        raise _malformed(f"its arrays have {sum(sizes)} bytes, more than the memory of this machine")
    rest = filter(None, itertools.chain([first[end:]], stream))
    pending = memoryview(b"")
    arrays = []
    for (shape, dtype), size in zip(kinds, sizes, strict=True):
        filled, target = 0, memoryview(b"")
        array = aligned_empty(shape, dtype) if size == 0 else None
        while filled < size:
            if not len(pending) and not len(pending := memoryview(next(rest, b""))):
                raise _malformed("its arrays are incomplete")
            if array is None:
                array = aligned_empty(shape, dtype)
                target = array.reshape(-1).view(np.uint8).data
            taken = min(size - filled, len(pending))
            target[filled : filled + taken] = pending[:taken]
            filled, pending = filled + taken, pending[taken:]
        arrays.append(array)
    if len(pending) or next(rest, b""):  # `next` also receives the final status of the stream
        raise _malformed("it contains extra bytes after its arrays")
    return header, arrays  # type: ignore[return-value]


def _malformed(reason: str) -> CallFailed:
    return CallFailed(
        f"Received a malformed message from another task ({reason}).",
        hint="Install the same version of kdist for all tasks.",
    )


def _most_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _shape(sizes: Any) -> tuple[int, ...]:
    is_shape = len(sizes) <= 32 and all(type(size) is int and size >= 0 for size in sizes)
    if not is_shape or math.prod(size or 1 for size in sizes) >= 1 << 48:
        raise ValueError(sizes)
    return tuple(sizes)


def _dtype(name: str) -> np.dtype:
    if not str.isidentifier(name):  # `np.dtype` parses more than names
        raise ValueError(name)
    try:
        dtype = np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, name))
    # Bytes from another task must never be interpreted as pointers.
    if dtype.name != name or dtype.kind not in "biufcV" or dtype.hasobject:
        raise ValueError(name)
    return dtype
