from unittest import mock

import pytest

import kdist
from kdist.backends import get_backend
from kdist.cluster import discover, environment
from kdist.errors import DeviceError
from kdist.launch.plan import plan_job
from tests.backends.where import in_worker

if in_worker:
    import keras
    import torch
    from keras.src.backend.torch.core import get_device

    from kdist.backends.torch import devices


def _cluster(index, workers=2):
    environ = {"RANK": str(index), "WORLD_SIZE": str(workers), "LOCAL_RANK": str(index)}
    environ |= {"LOCAL_WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return discover(environ=environ)


def test_every_cpu_is_the_one_cpu():
    assert devices.require_devices(["/device:CPU:3", "cpu:0"]) == ("cpu:3", "cpu:0")
    assert devices.torch_device("cpu:3") == torch.device("cpu")
    assert devices.torch_device("gpu:1") == torch.device("cuda:1")


@pytest.mark.kills("torch_gpu_with_a_number")
def test_keras_recognizes_the_current_gpu():
    with mock.patch.object(torch.cuda, "current_device", return_value=1):
        for name, expected in (("gpu:1", "cuda"), ("gpu:0", "cuda:0"), ("cpu:1", "cpu")):
            with devices.keras_device(devices.torch_device(name)):
                assert get_device() == expected


def test_a_gpu_that_is_not_there_is_an_error_that_says_what_is():
    with mock.patch.object(torch.cuda, "device_count", return_value=0):
        with pytest.raises(DeviceError, match=r"(?s)gpu:0.*available devices: cpu:0"):
            devices.require_devices(["gpu:0"])
        assert devices.list_devices() == ("cpu:0",)


@pytest.mark.parametrize(
    ("gpus", "workers", "expected"),
    [
        (0, 2, [("cpu:0",), ("cpu:0",)]),
        (2, 2, [("gpu:0",), ("gpu:1",)]),
        (4, 2, [("gpu:0", "gpu:1"), ("gpu:2", "gpu:3")]),
        (1, 2, [("gpu:0",), ("gpu:0",)]),
        (2, 3, [("gpu:0",), ("gpu:1",), ("gpu:0",)]),
    ],
)
def test_workers_of_a_machine_share_its_gpus(gpus, workers, expected):
    with mock.patch.object(torch.cuda, "device_count", return_value=gpus):
        assert [devices.devices_of_worker(_cluster(i, workers)) for i in range(workers)] == expected


def test_a_worker_takes_all_gpus_that_the_launcher_gave_it():
    plan = plan_job(2, environ={"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
    plan.release_ports()
    for worker in plan.workers:
        with (
            environment.patched(**worker.environ),
            mock.patch.object(torch.cuda, "device_count", return_value=4),
        ):
            found = devices.devices_of_worker(discover())
        assert found == ("gpu:0", "gpu:1", "gpu:2", "gpu:3")


def test_the_scope_places_variables_and_random_state_travels():
    with kdist.MirroredStrategy(["cpu:1", "cpu:0"]).scope():
        assert keras.Variable([1.0]).value.device == torch.device("cpu")
    backend = get_backend()
    state = backend.random_state()
    first = torch.randperm(9)
    backend.set_random_state(state)
    assert torch.equal(torch.randperm(9), first)
