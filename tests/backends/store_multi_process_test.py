"""The key-value store of each engine: it stores any bytes for all workers, and waits only on request."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.helpers.processes import run, strategy

DATA = b"\0\xff" + bytes(range(256)) * 3


def in_worker_share() -> Any:
    """Stores data on the chief, and reads them on both workers; returns the data that each worker read."""
    runtime = strategy().runtime
    store, number = runtime.group.store, int(runtime.group.all_gather_bytes(str(time.time_ns()).encode())[0])
    names = [f"test/{number}/{name}" for name in ("bytes", "late", "nothing")]
    if runtime.worker_index == 0:
        store.set(names[0], DATA)
        runtime.group.post(f"{names[0]}/text", "ünïcode")
    runtime.group.all_gather_bytes(b"")
    found = [store.get(names[0]) == DATA, runtime.group.look_up(f"{names[0]}/text")]
    runtime.group.all_gather_bytes(b"")
    if runtime.worker_index == 0:
        time.sleep(0.5)
        store.set(names[1], b"")
        store.delete(names[0])
        runtime.group.all_gather_bytes(b"")
        began = time.monotonic()
    else:
        began = time.monotonic()
        found.append(store.get(names[1], 60.0))
        runtime.group.all_gather_bytes(b"")
    found += [
        store.get(names[0]),
        store.get(names[2]),
        runtime.group.look_up(names[2]),
        store.get(names[2], 1.0),
    ]
    return found, time.monotonic() - began < 30


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(f"pool-{name}"))
        for name in ("tensorflow", "jax", "torch")
    ],
)
def test_what_one_worker_leaves_all_can_read(backend: str) -> None:
    (chief, in_time), (other, also_in_time) = run(backend, 2, in_worker_share)
    assert chief == [True, "ünïcode", None, None, None, None]
    assert other == [True, "ünïcode", b"", None, None, None, None]
    assert in_time and also_in_time
