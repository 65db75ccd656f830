"""Lists every parser of kdist that reads input from outside the process, with good inputs and an adapter.

The adapters are small. If you change a protocol, change its adapter and its good inputs here.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections import deque
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tests.fuzz.files import checkpoints, records
from tests.fuzz.mutate import change_bytes, change_environ, change_value, dump
from tests.fuzz.target import Target


def all_targets(folder: str) -> list[Target]:
    """Returns the targets, which write into this directory."""
    makers = (_clusters, _meetings, _calls, _messages)
    found = [*checkpoints(folder), *(target for make in makers for target in make()), *records(folder)]
    total = sum(target.share for target in found)
    return [replace(target, share=target.share / total) for target in found]


# -- the environment -------------------------------------------------------------------------------------------


def _clusters() -> list[Target]:
    from kdist.cluster import discover, survey
    from kdist.cluster.discovery import alone_by_mistake
    from kdist.cluster.sources import SOURCES
    from kdist.cluster.tpu import TPUClusterResolver
    from tests.cluster import discovery_test, platforms_test, tpu_test

    good = [variables for variables, _ in platforms_test.PLATFORMS.values()]
    good += [variables for _, variables in discovery_test.IN_ORDER] + [tpu_test.GKE, tpu_test.COLAB]
    names = sorted(
        {name for variables in good for name in variables} | {n for one in SOURCES for n in one.variables}
    )
    chief = {
        "cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]},
        "task": {"type": "chief", "index": 0},
    }
    good.append({"TF_CONFIG": json.dumps({**chief, "rpc_layer": "grpc"})})

    def read(environ: dict[str, str]) -> None:
        survey(environ)
        found = discover(environ=environ)
        assert 0 <= found.worker_index < found.num_workers == len(found.addresses) <= 100_000
        alone_by_mistake(environ, found)

    def ask(attributes: dict[str, str]) -> None:
        discover(TPUClusterResolver(environ={}, fetch=tpu_test.server_of(attributes)))

    servers = [tpu_test.V4_32, tpu_test.V2_8, tpu_test.V6E_1]

    def change_metadata(random: Random) -> dict[str, str]:
        return change_environ(random, random.choice(servers), [*tpu_test.V4_32])

    return [
        Target(
            "environment", 22, lambda random: change_environ(random, random.choice(good), names), read, good
        ),
        Target("metadata server", 3, change_metadata, ask, servers),
    ]


# -- rendezvous of the workers ---------------------------------------------------------------------------------


class _Connection:
    """One end of a connection whose other end has sent some data and closed."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def recv(self, size: int) -> bytes:
        data, self._data = self._data[:size], self._data[size:]
        return data

    def ignore(self, *_: Any) -> None:
        pass

    sendall = settimeout = setsockopt = close = ignore

    def send(self, data: Any) -> int:
        return len(data)

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    getpeername = getsockname

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _meetings() -> list[Target]:
    from kdist.cluster import discover
    from kdist.control import rendezvous
    from kdist.control.channel import Channel
    from kdist.control.connections import Connection, Connections, frame
    from kdist.control.waiting import Waiting

    environ = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    first, second = discover(environ=environ), discover(environ={**environ, "RANK": "1"})
    joins = {"worker": 1, "num_workers": 3, "address": "127.0.0.1:5"}
    replies = [
        {"addresses": ["a:1", "b:2", "c:3"]},
        {"missing": [2]},
        {"problem": {"num_workers": 2, "worker": 1}},
    ]

    def admit(data: bytes) -> None:
        addresses = {0: "127.0.0.1:1"}
        with contextlib.suppress(ConnectionError):
            rendezvous._admit(_message(data), first, addresses)  # a message with a valid proof
        assert addresses.keys() <= {0, 1, 2}

    def report(data: bytes) -> None:
        connection: Any = _Connection(b"")
        link = SimpleNamespace(connection=connection, send=connection.send, receive=lambda *_: _message(data))
        with mock.patch.multiple(rendezvous, _connect=lambda *_: link, _own_address=lambda *_: "127.0.0.1:1"):
            rendezvous._report(second, [], Waiting(second.worker_names, 5.0), 1e12, True)

    def _message(data: bytes) -> Any:
        """Returns the result of `Link.check` for bytes with a valid proof."""
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionAbortedError("no message")
        return message

    state = b'["it hung", 3]'
    kinds = [
        (b"b", b""),
        (b"E", state),
        (b"m", b"data"),
        (b"p", b'["key", "text"]'),
        (b"w", b"a step"),
        (b"?", b""),
    ]
    frames = b"".join(frame(kind, 1, data) for kind, data in kinds)

    def opened(data: bytes) -> Connection:
        connection = Connection.__new__(Connection)
        vars(connection).update(
            socket=_Connection(data), heard=0.0, pid=0, is_open=True, _received=bytearray(), _unsent=deque()
        )
        return connection

    def listen(data: bytes) -> None:
        channel, connections = Channel.__new__(Channel), Connections.__new__(Connections)
        vars(connections).update(
            changed=_Condition(), _handler=channel, _all={1: opened(data), 2: opened(b"")}, _blocked=set()
        )
        vars(channel).update(
            names="abc", index=0, _connections=connections, _changed=connections.changed, _losses={}, _calls=[],
            _expecting={}, _arrived=[deque() for _ in range(3)], _delivered=[0] * 3, _num_complete=0, _waits={},
            _posts={}, _left=False,
        )  # fmt: skip
        while connections._read(1):
            pass
        assert channel._losses.keys() <= {1} and len(connections._all[1]._received) <= len(data)

    def some_json(random: Random, good: list[Any]) -> bytes:
        chosen = random.choice(good)
        text = json.dumps(chosen).encode()
        return (
            change_bytes(random, text, [text])
            if random.randrange(3) == 0
            else dump(random, change_value(random, chosen))
        )

    reply = Target(
        "list of addresses", 7, lambda random: some_json(random, replies), report, [b'{"addresses": ["a:1"]}']
    )
    return [
        reply,
        Target("address of a worker", 8, lambda random: some_json(random, [joins]), admit, [_json(joins)]),
        Target("channel", 12, lambda random: change_bytes(random, frames, [frames]), listen, [frames]),
    ]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


class _Condition:
    def __enter__(self) -> _Condition:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        pass


# -- calls of parameter servers --------------------------------------------------------------------------------


def _calls() -> list[Target]:
    from kdist.coordinator import rpc

    arrays = [np.arange(6, dtype="float32").reshape(2, 3), np.zeros((0, 4), "int64"), np.ones((), "uint8")]
    call = b"".join(rpc._written({"method": "update", "step": 3}, arrays))
    length = struct.unpack_from("<I", call)[0]
    header, rest = json.loads(call[4 : 4 + length]), call[4 + length :]

    def make(random: Random) -> list[bytes]:
        if random.randrange(3):
            text = dump(random, change_value(random, header))
            data = struct.pack("<I", len(text)) + text + rest
        else:
            data = change_bytes(random, call, [call])
        cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((0, 0, 1, 3))))
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    def read(messages: list[bytes]) -> None:
        _, found = rpc._read(messages)
        assert sum(array.nbytes for array in found) <= sum(map(len, messages))

    rpc._most_bytes = lambda: 64 << 20  # as on a small machine
    return [Target("call of a parameter server", 17, make, read, [[call]])]


# -- messages of other workers ---------------------------------------------------------------------------------


def _messages() -> list[Target]:
    from kdist.arrays.row_exchange import decode, encode

    batches = [
        encode({"x": np.arange(6, dtype="float32").reshape(2, 3), "y": (np.zeros((0, 2), "int64"), None, 3)}),
        encode([np.array(["a", "bc"], object), np.array([b"x"], object)]),
    ]

    def make(random: Random) -> bytes:
        good = random.choice(batches)
        if random.randrange(3) == 0:
            return change_bytes(random, good, batches)
        head, _, body = good.partition(b"\n")
        return dump(random, change_value(random, json.loads(head))) + b"\n" + body

    return [Target("batch of another worker", 6, make, decode, batches)]
