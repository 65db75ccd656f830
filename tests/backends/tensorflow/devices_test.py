"""A worker makes only some GPUs visible to TensorFlow. The GPUs of these tests are simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest

from kdist.cluster import discover
from kdist.errors import DeviceError
from tests.backends.where import in_worker

if in_worker:
    import tensorflow as tf

    from kdist.backends.tensorflow import devices


class Machine:
    """Simulates the necessary part of `tf.config`: callers can hide GPUs until TensorFlow has started."""

    def __init__(self, gpus: int) -> None:
        self.all = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(gpus)]
        self.visible = list(self.all)
        self.started = False

    def list_physical_devices(self, kind: str) -> list:
        return list(self.all) if kind == "GPU" else []

    def get_visible_devices(self, kind: str) -> list:
        return list(self.visible) if kind == "GPU" else []

    list_logical_devices = get_visible_devices

    def set_visible_devices(self, wanted: list, kind: str) -> None:
        assert not self.started and kind == "GPU"
        self.visible = list(wanted)

    def has_started(self) -> bool:
        return self.started

    @property
    def numbers(self) -> list[int]:
        return [int(gpu.name[-1]) for gpu in self.visible]


@contextlib.contextmanager
def machine(gpus: int) -> Iterator[Machine]:
    made = Machine(gpus)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices.tf, "config", made))
        stack.enter_context(mock.patch.object(devices, "_started", made.has_started))
        stack.enter_context(mock.patch.object(devices, "_named", ()))
        yield made


def _cluster(index: int):
    place = {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environ = place | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return discover(environ=environ)


@pytest.mark.kills("gpus_tensorflow_sees_all")
@pytest.mark.parametrize(("gpus", "numbers"), [(8, [4, 5, 6, 7]), (2, [1]), (1, [0]), (0, [])])
def test_a_worker_of_torchrun_shows_tensorflow_its_own_gpus(gpus: int, numbers: list[int]) -> None:
    with machine(gpus) as made:
        names = devices.devices_of_worker(_cluster(1), ())
        assert names == (tuple(f"gpu:{i}" for i in range(len(numbers))) or ("cpu:0",))
        assert made.numbers == numbers
        made.started = True  # by a strategy; the next strategy in the same program follows
        assert devices.devices_of_worker(_cluster(1), ()) == names and made.numbers == numbers


def test_what_the_user_has_hidden_stays_hidden() -> None:
    with machine(4) as made:
        made.set_visible_devices(made.all[2:], "GPU")
        assert devices.devices_of_worker(_cluster(1), ()) == ("gpu:0", "gpu:1")
        assert made.numbers == [2, 3]


@pytest.mark.kills("gpus_tensorflow_ignores_names")
def test_named_gpus_are_those_that_compute() -> None:
    with machine(4) as made:
        assert devices.devices_of_worker(_cluster(0), ("gpu:3", "gpu:1")) == ("gpu:0", "gpu:1")
        assert made.numbers == [3, 1]
        assert devices.devices_of_worker(_cluster(0), ("gpu:3", "gpu:1")) == ("gpu:0", "gpu:1")
        with pytest.raises(DeviceError, match="gpu:2"):
            devices.devices_of_worker(_cluster(0), ("gpu:2",))
        with pytest.raises(
            DeviceError, match="already chosen other GPUs"
        ):  # ambiguous: it could also be the first visible GPU
            devices.devices_of_worker(_cluster(0), ("gpu:0",))
    with machine(4) as made:
        made.started = True
        assert devices.devices_of_worker(_cluster(0), ("gpu:0", "gpu:1")) == ("gpu:0", "gpu:1")
        with pytest.raises(DeviceError, match="start of the program"):
            devices.devices_of_worker(_cluster(0), ("gpu:1",))


def test_cpus_are_left_alone() -> None:
    with machine(2) as made:
        assert devices.devices_of_worker(_cluster(0), ("cpu:0",)) == ("cpu:0",)
        assert made.numbers == [0, 1]
