"""Devices, and the state of the generator that shuffles rows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import kdist
from kdist.backends import get_backend
from kdist.cluster import discover, environment
from kdist.errors import DeviceError
from kdist.topology import Sharded, Topology
from tests.backends.where import in_worker

if in_worker:
    import jax

    from kdist.backends.jax import backend as jax_backend
    from kdist.backends.jax import devices as jax_devices
    from kdist.backends.jax import rendezvous


def test_logical_cpus_are_there() -> None:
    assert get_backend().list_devices("cpu") == ("cpu:0", "cpu:1", "cpu:2")
    assert get_backend().require_devices(["/job:localhost/device:CPU:2"]) == ("cpu:2",)


def test_too_late_for_more() -> None:
    jax.devices()
    with pytest.raises(DeviceError, match="JAX has already started"):
        kdist.MirroredStrategy([f"cpu:{i}" for i in range(9)])


def test_missing_device_names_the_others() -> None:
    with pytest.raises(DeviceError, match=r"(?s)gpu:0.*cpu:0, cpu:1, cpu:2"):
        kdist.OneDeviceStrategy("gpu:0")


@pytest.mark.kills("gpus_jax_opens_all")
def test_each_worker_opens_its_own_gpus_alone() -> None:
    def opened(devices: Sequence[str] = (), **environ: str) -> list[Any]:
        found = []
        for index in range(2):
            place = {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            told = place | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TF_CONFIG": None} | environ
            with environment.patched(**told):
                found.append(rendezvous._local_gpus(discover(), devices))
        return found

    assert opened(CUDA_VISIBLE_DEVICES="4,5,6,7") == [[0, 1], [2, 3]]
    assert opened(CUDA_VISIBLE_DEVICES="4") == [None, None], "all that it sees"
    assert opened(CUDA_VISIBLE_DEVICES="") == [None, None]
    assert opened(["gpu:1"], CUDA_VISIBLE_DEVICES="4,5,6,7") == [None, None]


def test_random_state_travels() -> None:
    backend = get_backend()
    np.random.seed(1)
    np.random.randn(3)  # caches one more Gaussian number
    state = backend.random_state()
    first = (np.random.randn(), np.random.permutation(20))
    np.random.seed(2)
    backend.set_random_state(state)
    second = (np.random.randn(), np.random.permutation(20))
    assert first[0] == second[0]
    assert (first[1] == second[1]).all()


class Core:
    """Describes a TPU core with JAX's attributes."""

    platform = "tpu"
    core_on_chip = 0
    process_index = 0
    slice_index = 0

    def __init__(self, kind: str, index: int, coords: tuple[int, int, int]) -> None:
        self.device_kind = kind
        self.id = index
        self.coords = coords


def _cores(kind: str, width: int, depth: int, first: tuple[int, int, int] = (0, 0, 0)) -> list[Core]:
    """Returns a host's cores in JAX's order: x varies fastest."""
    places = [(first[0] + x, first[1] + y, first[2]) for y in range(depth) for x in range(width)]
    return [Core(kind, index, place) for index, place in enumerate(places)]


def _runtime_devices(monkeypatch: pytest.MonkeyPatch, cores: list[Core], topology: Topology) -> list[Core]:
    """Returns the cores in the order of a strategy's mesh."""
    created: list[Topology] = []
    monkeypatch.setattr(jax_devices, "local_devices", lambda kind: cores if kind == "tpu" else [])
    monkeypatch.setattr(jax_backend.workers, "join", lambda devices, cluster, options: None)
    monkeypatch.setattr(jax_backend, "JaxRuntime", lambda topology, group: created.append(topology))
    get_backend().create_runtime(topology)
    return [cores[int(name.removeprefix("tpu:"))] for name in created[0].devices]


def _hops(one: Core, other: Core) -> int:
    return sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))


def _is_ring(cores: list[Core]) -> bool:
    return all(_hops(one, other) == 1 for one, other in zip(cores, [*cores[1:], cores[0]], strict=True))


@pytest.mark.kills("tpu_cores_by_number")
def test_the_mesh_follows_the_links_between_tpu_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = _cores("TPU v5 lite", 4, 2)
    assert not _is_ring(cores)
    ordered = _runtime_devices(monkeypatch, cores, Topology(()))
    assert _is_ring(ordered) and set(ordered) == set(cores)


def test_each_group_of_an_axis_is_a_block_of_linked_tpu_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def layout(path: str, shape: tuple[int, ...], lengths: Mapping[str, int]) -> tuple[None, ...]:
        return (None,) * len(shape)

    cores = _cores("TPU v5 lite", 4, 2)
    storage = Sharded({"batch": 2, "model": 4}, "batch", layout)
    ordered = _runtime_devices(monkeypatch, cores, Topology((), storage=storage))
    for group in (ordered[:4], ordered[4:]):
        assert all(_hops(one, other) == 1 for one, other in itertools.pairwise(group))
    # The cores of the second host of a v4 slice do not begin at the origin.
    cores = _cores("TPU v4", 2, 2, (0, 0, 1))
    storage = Sharded({"batch": 2, "model": 2}, "batch", layout)
    ordered = _runtime_devices(monkeypatch, cores, Topology((), storage=storage))
    assert set(ordered) == set(cores)
    assert [_hops(*ordered[:2]), _hops(*ordered[2:])] == [1, 1]


def test_named_tpu_cores_and_those_of_unknown_places_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = _cores("TPU v5 lite", 4, 2)
    names = tuple(f"tpu:{i}" for i in (5, 0, 3))
    assert [core.id for core in _runtime_devices(monkeypatch, cores, Topology(names))] == [5, 0, 3]
    holed = _cores("TPU v4", 3, 2)[1:]
    assert _runtime_devices(monkeypatch, holed, Topology(())) == holed
