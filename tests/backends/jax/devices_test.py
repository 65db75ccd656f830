"""Devices, and the state of the generator that shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kdist
from kdist.backends import get_backend
from kdist.cluster import discover, environment
from kdist.errors import DeviceError
from tests.backends.where import in_worker

if in_worker:
    import jax

    from kdist.backends.jax import meeting


def test_logical_cpus_are_there() -> None:
    assert get_backend().list_devices("cpu") == ("cpu:0", "cpu:1", "cpu:2")
    assert get_backend().require_devices(["/job:localhost/device:CPU:2"]) == ("cpu:2",)


def test_too_late_for_more() -> None:
    jax.devices()
    with pytest.raises(DeviceError, match="before JAX has computed anything"):
        kdist.MirroredStrategy([f"cpu:{i}" for i in range(9)])


def test_missing_device_names_the_others() -> None:
    with pytest.raises(DeviceError, match=r"gpu:0.*cpu:0, cpu:1, cpu:2"):
        kdist.OneDeviceStrategy("gpu:0")


def test_each_worker_opens_its_own_gpus_alone() -> None:
    def opened(devices: Sequence[str] = (), **environ: str) -> list[Any]:
        found = []
        for index in range(2):
            place = {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            told = place | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TF_CONFIG": None} | environ
            with environment.patched(**told):
                found.append(meeting._local_gpus(discover(), devices))
        return found

    assert opened(CUDA_VISIBLE_DEVICES="4,5,6,7") == [[0, 1], [2, 3]]
    assert opened(CUDA_VISIBLE_DEVICES="4") == [None, None], "all that it sees"
    assert opened(CUDA_VISIBLE_DEVICES="") == [None, None]
    assert opened(["gpu:1"], CUDA_VISIBLE_DEVICES="4,5,6,7") == [None, None]


def test_random_state_travels() -> None:
    backend = get_backend()
    np.random.seed(1)
    np.random.randn(3)  # leaves a Gaussian waiting
    state = backend.random_state()
    first = (np.random.randn(), np.random.permutation(20))
    np.random.seed(2)
    backend.set_random_state(state)
    second = (np.random.randn(), np.random.permutation(20))
    assert first[0] == second[0]
    assert (first[1] == second[1]).all()
