"""Calls between the tasks of a job, over gRPC: a header of JSON, and arrays of bytes beside it.

gRPC (https://grpc.io) is what TensorFlow's own parameter servers talk over. It has the deadlines, the keep-alive and
the connecting anew; here is only how a call is written down.
"""

from __future__ import annotations

import hmac
import importlib
import itertools
import json
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kdist.arrays.memory import aligned_empty
from kdist.cluster.addresses import cannot_listen, split_address
from kdist.coordinator.threads import DaemonThreads
from kdist.errors import ClusterConfigError, InvalidArgumentError, KdistError, WorkerLostError

_CALL, _WATCH = "/kdist/call", "/kdist/watch"
_TOKEN = "kdist-token"
_CHUNK = 512 << 10  # of bytes in a message: what is copied while it is in the cache is copied faster
_LENGTH = struct.Struct("<I")
# A host that is gone without a word is noticed within some 15 s.
_CHANNEL = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
_SERVER = (
    ("grpc.so_reuseport", 0),  # else a second server on the same port is not told
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)

Message = tuple[Mapping[str, Any], Sequence[np.ndarray]]
Handler = Callable[[Mapping[str, Any], list[np.ndarray]], Message]


def grpc() -> Any:
    """Returns the package `grpc`, which is needed only for parameter servers."""
    try:
        return importlib.import_module("grpc")
    except ImportError as error:
        raise InvalidArgumentError(
            "Parameter servers on JAX and PyTorch talk over gRPC, and the package grpcio is not installed.",
            hint="pip install 'kdist[servers]'",
        ) from error


class CallFailed(KdistError):
    """A handler in another task has failed; the message is its error's."""


class PeerLost(WorkerLostError):
    """The other task cannot be reached, or has ended in the middle of a call."""


class Peer:
    """Another task of the job, to call.

    Args:
        name: What it is called in messages: "ps 1 (host:port)".
        address: Its `host:port`.
        token: The secret of the job, if it has one.
        if_lost: Returns a hint, for when the task has ended.
    """

    def __init__(self, name: str, address: str, token: str | None, if_lost: Callable[[], str] = str) -> None:
        self.name = name
        self.if_lost = if_lost
        self.address = address
        self.sent = self.received = 0
        """How many bytes of arrays have gone there, and come from there."""
        self._metadata = ((_TOKEN, token),) if token else ()
        self._channel = grpc().insecure_channel(address, options=_CHANNEL)
        self._call = self._channel.stream_stream(_CALL)
        # The same for calls of one message, which need no thread to send them: in half of the time.
        self._brief = self._channel.unary_stream(_CALL)
        self._watch = self._channel.stream_stream(_WATCH)

    def __repr__(self) -> str:
        return self.name

    def is_there(self, timeout: float) -> bool:
        """Waits until the task listens; says whether it does."""
        ready = grpc().channel_ready_future(self._channel)
        try:
            ready.result(timeout)
        except grpc().FutureTimeoutError:
            ready.cancel()
            return False
        return True

    def call(
        self,
        method: str,
        header: Mapping[str, Any] | None = None,
        arrays: Sequence[np.ndarray] = (),
        timeout: float | None = None,
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Calls a method of the task; returns the header and the arrays of its answer.

        Raises:
            PeerLost: It cannot be reached, or has ended.
            CallFailed: The method has raised.
        """
        return self.begin(method, header, arrays, timeout)()

    def begin(
        self,
        method: str,
        header: Mapping[str, Any] | None = None,
        arrays: Sequence[np.ndarray] = (),
        timeout: float | None = None,
    ) -> Callable[[], tuple[dict[str, Any], list[np.ndarray]]]:
        """Begins a call; returns the function that waits for its answer, as `call` does."""
        messages = _written({"method": method} | dict(header or {}), arrays)
        first, second = next(messages), next(messages, None)
        self.sent += sum(array.nbytes for array in arrays)
        if second is None:
            answer = self._brief(first, metadata=self._metadata, timeout=timeout)
        else:
            sent = itertools.chain([first, second], messages)
            answer = self._call(sent, metadata=self._metadata, timeout=timeout)

        def wait() -> tuple[dict[str, Any], list[np.ndarray]]:
            try:
                found, parts = _read(answer)
            except grpc().RpcError as error:
                raise self._explained(error, method) from None
            if "failed" in found:
                raise CallFailed(f"{self.name}: {found['failed']}")
            self.received += sum(part.nbytes for part in parts)
            return found, parts

        return wait

    def watch(self, lost: Callable[[], None]) -> Callable[[], None]:
        """Has a function called, in a thread of gRPC's, once the task has ended.

        Returns:
            What stops watching. It must be kept: gRPC ends a call that nobody holds.
        """
        held = threading.Event()

        def hold() -> Iterator[bytes]:
            held.wait()
            yield from ()

        watching = self._watch(hold(), metadata=self._metadata)

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
        """Returns the error for when the task has ended."""
        return PeerLost(f"{self.name} has ended, or cannot be reached.", hint=self.if_lost())

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def _explained(self, error: Any, method: str) -> KdistError:
        code = grpc().StatusCode
        if error.code() is code.UNAUTHENTICATED:
            return ClusterConfigError(
                "All tasks of a job must have the same token.",
                received={"task": self.name},
                hint="Set KDIST_CLUSTER_TOKEN to the same value for all of them; `kdist run` does.",
            )
        if error.code() in (code.UNAVAILABLE, code.CANCELLED, code.DEADLINE_EXCEEDED):
            return self.lost()
        return CallFailed(f"{self.name} could not be asked for {method!r}: {error.details()}")


class Service:
    """What a task lets others call.

    Args:
        address: The `host:port` that the others know it by.
        handlers: The methods by name; each is called in a thread of its own.
        token: The secret that callers must have; `None` if anybody may call who reaches the port.
    """

    def __init__(self, address: str, handlers: Mapping[str, Handler], token: str | None) -> None:
        self._handlers = handlers
        self._token = token
        self._ends = threading.Event()
        module = grpc()
        self._server = module.server(DaemonThreads(f"kdist {address}"), options=_SERVER)
        generic = module.method_handlers_generic_handler(
            "kdist",
            {
                "call": module.stream_stream_rpc_method_handler(self._answer),
                "watch": module.stream_stream_rpc_method_handler(self._hold),
            },
        )
        self._server.add_generic_rpc_handlers((generic,))
        self._bind(address)
        self._server.start()

    def stop(self) -> None:
        """Ends the service. Calls that run are cut off."""
        self._ends.set()
        self._server.stop(0).wait()

    def wait(self) -> None:
        """Waits until the service has ended."""
        self._server.wait_for_termination()

    def _bind(self, address: str) -> None:
        host, port = split_address(address)
        bracketed = f"[{host}]" if ":" in host else host
        # The name that the others know may be one of a load balancer, which is no interface of this machine.
        for where in (f"{bracketed}:{port}", f"[::]:{port}"):
            try:
                if self._server.add_insecure_port(where):
                    return
            except RuntimeError:
                continue
        raise cannot_listen(address)

    def _is_known(self, context: Any) -> bool:
        if self._token is None:
            return True
        shown = dict(context.invocation_metadata()).get(_TOKEN, "")
        return hmac.compare_digest(shown.encode(), self._token.encode())

    def _answer(self, received: Iterable[bytes], context: Any) -> Iterator[bytes]:
        if not self._is_known(context):
            context.abort(grpc().StatusCode.UNAUTHENTICATED, "the token of the job is missing or another")
        header, arrays = _read(received)
        try:
            answer = self._handlers[header["method"]](header, arrays)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}, ()
        yield from _written(*answer)

    def _hold(self, received: Iterable[bytes], context: Any) -> Iterator[bytes]:
        if not self._is_known(context):
            context.abort(grpc().StatusCode.UNAUTHENTICATED, "the token of the job is missing or another")
        while not (self._ends.wait(0.5) or not context.is_active()):
            pass
        yield from ()


def _written(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Iterator[bytes]:
    """The messages of a call or an answer: the header and what is small in the first, the rest in pieces."""
    # A view of an array's bytes is not copied until it is sent. What lies in memory otherwise is.
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
    stream = iter(messages)
    first = next(stream, b"")
    (length,) = _LENGTH.unpack_from(first)
    end = _LENGTH.size + length
    header = json.loads(first[_LENGTH.size : end])
    arrays = [aligned_empty(shape, _dtype(name)) for name, shape in header.pop("arrays")]
    rest = itertools.chain([first[end:]], stream)
    pending = memoryview(b"")
    for array in arrays:
        target = array.reshape(-1).view(np.uint8).data
        filled = 0
        while filled < len(target):
            if not len(pending):
                pending = memoryview(next(rest))
                continue
            taken = min(len(target) - filled, len(pending))
            target[filled : filled + taken] = pending[:taken]
            filled, pending = filled + taken, pending[taken:]
    for _ in rest:  # the end of the stream, with its status
        pass
    return header, arrays


def _dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
