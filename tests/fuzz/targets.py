"""Every parser of kdist that reads what somebody else may have written: good inputs, and how it is called.

The adapters are small: if a protocol changes, change its adapter and its good inputs here.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.fuzz.mutate import change_bytes, change_environ, change_value, dump


@dataclass
class Target:
    """A parser.

    Args:
        name: Its name in reports.
        share: Its part of all inputs.
        make: Makes an input.
        feed: Gives it to the parser, which may raise errors of kdist.
        good: Inputs that it must accept.
    """

    name: str
    share: float
    make: Callable[[Random], Any]
    feed: Callable[[Any], Any]
    good: Sequence[Any]


def all_targets(folder: str) -> list[Target]:
    """Returns the targets; they write into the folder."""
    makers = (_clusters, _meetings, _calls, _messages)
    found = [*_checkpoints(folder), *(target for make in makers for target in make()), *_records(folder)]
    total = sum(target.share for target in found)
    return [replace(target, share=target.share / total) for target in found]


# -- checkpoints -----------------------------------------------------------------------------------------------


def _index_bytes(text: bytes) -> bytes:
    """An index with the right checksum, so that what is inside is read."""
    from kdist.checkpoint.index import checksum_of

    body = text[1:]
    return b'{"format": "kdist.checkpoint", "version": 1, "crc32": "%08x",\n' % checksum_of(1, body) + body


def _checkpoints(folder: str) -> list[Target]:
    import keras

    import kdist
    from kdist.checkpoint import checked_reading, index, layout, plain
    from kdist.checkpoint.command import describe, find

    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    values = {
        "epoch": 3,
        "rate": 0.5,
        "pair": (1, [b"x", {"a": None}]),
        "table": np.arange(6.0).reshape(2, 3),
    }
    path = kdist.Checkpoint(model=model, **values).save(os.path.join(folder, "saved"), asynchronous=False)
    with open(os.path.join(path, layout.INDEX), "rb") as file:
        whole = file.read()
    fields = {k: v for k, v in json.loads(whole).items() if k not in ("format", "version", "crc32")}
    files = {name: _content(os.path.join(path, name)) for name in os.listdir(path)}
    (shard,) = [name for name in files if name != layout.INDEX]

    def make_index(random: Random) -> bytes:
        if random.randrange(3) == 0:
            return change_bytes(random, whole, [whole])
        return _index_bytes(dump(random, change_value(random, fields)))

    def parse(data: bytes) -> None:
        found = index.parse(data, "index.json")
        assert sum(t.num_bytes for t in found.tensors) <= sum(f.num_bytes for f in found.files)
        describe("a checkpoint", found)

    bad = os.path.join(folder, "bad", "ckpt-1")

    def make_files(random: Random) -> dict[str, bytes]:
        made = dict(files)
        if random.randrange(2):
            made[layout.INDEX] = make_index(random)
        if random.randrange(2):
            made[shard] = change_bytes(random, made[shard], list(files.values()))
        return made

    def read_files(made: dict[str, bytes]) -> None:
        os.makedirs(bad, exist_ok=True)
        for name, data in made.items():
            with open(os.path.join(bad, name), "wb") as file:
                file.write(data)
        with contextlib.suppress(kdist.errors.KdistError):
            checked_reading.verify(find(os.path.dirname(bad)))
        found = checked_reading.read_index(bad)
        arrays = checked_reading.read_tensors(bad, found, found.tensors)
        assert sum(array.nbytes for array in arrays.values()) <= sum(map(len, made.values()))

    def restore(data: bytes) -> None:
        read_files({layout.INDEX: data, shard: files[shard]})
        before = model.get_weights()
        restored = kdist.Checkpoint(model=model, epoch=0)
        try:
            restored.restore(bad)
        except kdist.errors.KdistError:
            for value, wanted in zip(model.get_weights(), before, strict=True):
                np.testing.assert_array_equal(value, wanted)
            raise

    saved = {**fields["values"], "states": fields["states"]}
    assert plain.decode(fields["values"]["pair"]) == (1, [b"x", {"a": None}])
    return [
        Target("index of a checkpoint", 26, make_index, parse, [whole, _index_bytes(json.dumps(fields).encode())]),
        Target("files of a checkpoint", 5, make_files, read_files, [files]),
        Target(
            "values of a checkpoint", 1,
            lambda random: _index_bytes(dump(random, {**fields, **_changed(random, saved)})), restore, [whole],
        ),
    ]  # fmt: skip


def _changed(random: Random, saved: dict[str, Any]) -> dict[str, Any]:
    changed = change_value(random, saved)
    if not isinstance(changed, dict):
        return {"values": changed}
    states = changed.pop("states", None)
    return {"values": changed, "states": states}


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


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


# -- how workers meet ------------------------------------------------------------------------------------------


class _Connection:
    """One end of a connection whose other end has said something and left."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def recv(self, size: int) -> bytes:
        data, self._data = self._data[:size], self._data[size:]
        return data

    def ignore(self, *_: Any) -> None:
        pass

    send = sendall = settimeout = setsockopt = close = ignore

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    getpeername = getsockname

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _meetings() -> list[Target]:
    from kdist.backends.torch import lifeline
    from kdist.cluster import discover, exchange

    environ = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    first, second = discover(environ=environ), discover(environ={**environ, "RANK": "1"})
    joins = {"worker": 1, "num_workers": 3, "address": "127.0.0.1:5"}
    replies = [
        {"addresses": ["a:1", "b:2", "c:3"]},
        {"missing": [2], "timeout": 3.0},
        {"problem": {"num_workers": 2, "worker": 1}},
    ]

    def admit(data: bytes) -> None:
        addresses = {0: "127.0.0.1:1"}
        if hasattr(exchange, "handshake"):  # a message whose proof was right
            with contextlib.suppress(ConnectionError):
                exchange._admit(_message(data), first, addresses)
        else:
            exchange._admit(bytearray(data), first, addresses, [])
        assert addresses.keys() <= {0, 1, 2}

    def report(data: bytes) -> None:
        connection: Any = _Connection(data + b"\n")
        if hasattr(exchange, "handshake"):
            link = SimpleNamespace(
                connection=connection, send=connection.send, receive=lambda *_: _message(data)
            )
            connection = link
        connect, exchange._connect = exchange._connect, lambda *_: connection
        try:
            exchange._report(second, 5.0, 1e12, lambda missing: None)
        finally:
            exchange._connect = connect

    def _message(data: bytes) -> Any:
        """What `Link.check` makes of bytes with the right proof."""
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionAbortedError("no message")
        return message

    beats = b"".join(struct.pack("!4scI", b"kdl1", kind, 1) for kind in (b"B", b"E", b"B", b"D"))

    def listen(data: bytes) -> None:
        line = lifeline.Lifeline.__new__(lifeline.Lifeline)
        vars(line).update(
            _index=0, _connections={1: _Connection(data), 2: _Connection(b"")}, _received={1: b"", 2: b""}, _losses={},
            _changed=_Condition(), _closing=False, _on_death=None, _heard={1: (0.0, 0)},
        )  # fmt: skip
        while line._read(1):
            pass
        assert line._losses.keys() <= {1, 2} and len(line._received[1]) < 4200

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
        *([reply] if hasattr(exchange, "handshake") else []),  # before, replies are not checked
        Target("address of a worker", 8, lambda random: some_json(random, [joins]), admit, [_json(joins)]),
        Target("lifeline", 7, lambda random: change_bytes(random, beats, [beats]), listen, [beats]),
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

    if not hasattr(rpc, "_most_bytes"):
        return []  # messages have no limits yet
    rpc._most_bytes = lambda: 64 << 20  # of a small machine
    return [Target("call of a parameter server", 12, make, read, [[call]])]


# -- messages of other workers ---------------------------------------------------------------------------------


def _messages() -> list[Target]:
    from kdist.arrays.gathering import decode, encode

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


# -- what kdist wrote and reads back ---------------------------------------------------------------------------


def _records(folder: str) -> list[Target]:
    from kdist.checkpoint import manager
    from kdist.measuring import run_report

    totals = {
        "elapsed": 2.0,
        "steps": 4,
        "rows": 64,
        "seconds": {"step": 1.0, "input": 0.2},
        "compiles": False,
    }
    log = [
        {
            "start": 1.0,
            "host": "a",
            "num_workers": 1,
            "backend": "jax",
            "devices": ["cpu:0", "cpu:1"],
            "exchanges_in_programs": True,
        },
        *({"epoch": 1, "step": n, "logs": {"loss": 0.5}, "epoch_end": n == 8, **totals} for n in (4, 8)),
    ]
    step = {"name": "train", "cat": "step", "ph": "X", "dur": 8.0, "pid": 0, "tid": 0, "args": {"rows": 4}}
    events = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "worker 0"}},
        *({**step, "ts": 10.0 * n} for n in range(4)),
    ]
    run = os.path.join(folder, "run")
    os.makedirs(run)

    def lines(items: Any) -> bytes:
        return (
            b"".join(json.dumps(item).encode() + b"\n" for item in items) if isinstance(items, list) else b"{"
        )

    def make(random: Random) -> dict[str, bytes]:
        made = {
            "worker-0.jsonl": lines(log),
            "worker-0.json": b"[\n" + lines(events).replace(b"}\n", b"},\n"),
        }
        name, items = random.choice((("worker-0.jsonl", log), ("worker-0.json", events)))
        if random.randrange(2):
            made[name] = change_bytes(random, made[name], [*made.values()])
        else:
            made[name] = lines(change_value(random, items)) + dump(random, items[0])
        return made

    def read(made: dict[str, bytes]) -> None:
        for name, data in made.items():
            with open(os.path.join(run, name), "wb") as file:
                file.write(data)
        run_report.read_report(run)

    kept = {"last": 1.0, "kept": [1, 2]}

    def read_kept(data: bytes) -> None:
        with open(os.path.join(run, ".ckpt.kept.json"), "wb") as file:
            file.write(data)
        one = manager.CheckpointManager.__new__(manager.CheckpointManager)
        vars(one).update(_directory=run, _name="ckpt", _made=1.0)
        found = one._read_kept()
        assert 3 not in found["kept"] and found["last"] + 1.0 is not None

    return [
        Target("run log and trace", 2, make, read, [{"worker-0.jsonl": lines(log)}]),
        Target(
            "kept checkpoints", 1, lambda random: dump(random, change_value(random, kept)), read_kept,
            [json.dumps(kept).encode()],
        ),
    ]  # fmt: skip
