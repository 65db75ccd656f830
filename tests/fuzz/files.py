"""Targets for files that kdist opens: checkpoints, run logs, traces."""

from __future__ import annotations

import contextlib
import json
import os
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.mutate import change_bytes, change_value, dump
from tests.fuzz.target import Target
from tests.helpers.compare import assert_equal

# -- checkpoints -----------------------------------------------------------------------------------------------


def _index_bytes(text: bytes) -> bytes:
    """Returns an index with the right checksum, so that kdist reads its content."""
    from kdist.checkpoint.index import checksum_of

    body = text[1:]
    return b'{"format": "kdist.checkpoint", "version": 1, "crc32": "%08x",\n' % checksum_of(1, body) + body


def checkpoints(folder: str) -> list[Target]:
    import keras

    import kdist
    from kdist.checkpoint import checked_reading, index, layout, plain, state
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
    small = {**fields, "states": {}}  # without thousands of random numbers, which take most of the time
    files = {name: _content(os.path.join(path, name)) for name in os.listdir(path)}
    (shard,) = [name for name in files if name != layout.INDEX]

    def make_index(random: Random) -> bytes:
        if random.randrange(3) == 0:
            return change_bytes(random, whole, [whole])
        return _index_bytes(dump(random, change_value(random, small)))

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
        before, numbers = model.get_weights(), str(state.random_state())
        restored = kdist.Checkpoint(model=model, epoch=0)
        try:
            restored.restore(bad)
        except kdist.errors.KdistError:
            assert_equal(model.get_weights(), before)
            assert str(state.random_state()) == numbers
            raise

    saved = {**fields["values"], "states": fields["states"]}
    assert plain.decode(fields["values"]["pair"]) == (1, [b"x", {"a": None}])
    return [
        Target("index of a checkpoint", 18, make_index, parse, [whole, _index_bytes(json.dumps(fields).encode())]),
        Target("files of a checkpoint", 3, make_files, read_files, [files]),
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


# -- files that kdist wrote and reads back ---------------------------------------------------------------------


def records(folder: str) -> list[Target]:
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
        assert isinstance(found["kept"], list) and isinstance(found["last"], float)

    return [
        Target("run log and trace", 2, make, read, [{"worker-0.jsonl": lines(log)}]),
        Target(
            "kept checkpoints", 1, lambda random: dump(random, change_value(random, kept)), read_kept,
            [json.dumps(kept).encode()],
        ),
    ]  # fmt: skip
