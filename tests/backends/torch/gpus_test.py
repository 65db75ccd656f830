"""Calls of PyTorch's GPU functions, on a machine without GPUs: mocks replace these functions."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import kdist
from kdist.backends import get_backend
from kdist.backends import threads as helper_threads
from kdist.cluster import discover, environment, interfaces
from kdist.experimental import CommunicationOptions
from tests.backends.where import in_worker

if in_worker:
    import keras
    import torch
    import torch.distributed as dist

    from kdist.backends.threads import ReplicaThreads
    from kdist.backends.torch import devices, functions, workers
    from kdist.backends.torch.core import TorchCore


def _cluster(coordinator="127.0.0.1"):
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return discover(environ=environ | {"MASTER_ADDR": coordinator, "MASTER_PORT": "29500"})


class Joined(Exception):
    """Ends the join instead of creating the process group."""


def joining(coordinator="127.0.0.1", timeout_seconds=None, nccl=True, **environ):
    """Returns the arguments of `init_process_group` on a worker with two GPUs, and the environment then."""
    seen = {}

    def init(backend, **arguments):
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        seen.update(arguments, backend=backend, **{name: environment.get(name) for name in names})
        raise Joined

    told = {"NCCL_SOCKET_IFNAME": None, "NCCL_COMM_ID": None, "KDIST_HANG_TIMEOUT": None} | environ
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment.patched(**told))
        stack.enter_context(mock.patch.object(workers, "open_store", return_value=(None, nccl)))
        stack.enter_context(mock.patch.object(workers.dist, "init_process_group", init))
        stack.enter_context(mock.patch.object(interfaces, "interface_towards", return_value="eth7"))
        set_device = stack.enter_context(mock.patch.object(torch.cuda, "set_device"))
        options = CommunicationOptions(timeout_seconds=timeout_seconds)
        with pytest.raises(Joined):
            channel = (), mock.Mock()
            workers._join(_cluster(coordinator), ("gpu:1", "gpu:2"), options, lambda address: channel, 5.0)
    set_device.assert_called_once_with(torch.device("cuda:1"))
    return seen


def test_nccl_is_told_its_device():
    assert joining()["backend"] == "cpu:gloo,cuda:nccl" and joining()["device_id"] == torch.device("cuda:1")
    assert joining(nccl=False)["backend"] == "gloo" and joining(nccl=False)["device_id"] is None


@pytest.mark.kills("torch_engine_runs_out_of_time_first")
def test_kdist_notices_a_hang_before_the_engine_runs_out_of_time():
    for seconds in (1, 600, 3600, 86400):
        allowed = joining(KDIST_HANG_TIMEOUT=seconds)["timeout"].total_seconds()
        assert allowed >= seconds + 600, "NCCL's own limit, 600 s, would end the process without a word"
    assert joining(timeout_seconds=33)["timeout"].total_seconds() == 33, "the user's own limit stands"


@pytest.mark.kills("nccl_interface_of_the_user_overruled")
def test_nccl_takes_the_interface_that_leads_to_the_others(tmp_path):
    assert joining("10.0.0.1")["NCCL_SOCKET_IFNAME"] == "=eth7"
    assert joining("127.0.0.1")["NCCL_SOCKET_IFNAME"] is None, "one machine"
    assert joining("10.0.0.1", nccl=False)["NCCL_SOCKET_IFNAME"] is None
    assert joining("10.0.0.1", NCCL_SOCKET_IFNAME="ib0")["NCCL_SOCKET_IFNAME"] == "ib0"
    assert joining("10.0.0.1", NCCL_COMM_ID="10.0.0.1:99")["NCCL_SOCKET_IFNAME"] is None
    (conf := tmp_path / "nccl.conf").write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=^docker0\n")
    assert joining("10.0.0.1", NCCL_CONF_FILE=conf)["NCCL_SOCKET_IFNAME"] is None


@pytest.mark.kills("torch_group_known_by_its_name")
@pytest.mark.parametrize(
    ("cpu", "gpu", "nccl", "makes_a_group"),
    [
        ("gloo", "nccl", True, False),
        (None, "nccl", True, True),
        ("gloo", None, False, False),
        ("mpi", "gloo", False, False),
    ],
)
def test_a_group_of_the_user_s_is_known_by_what_carries_its_tensors(cpu, gpu, nccl, makes_a_group):
    backends = {"cpu": cpu and Nccl([], cpu), "cuda": gpu and Nccl([], gpu)}

    def backend_of(device):
        if backends[device.type] is None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return backends[device.type]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(workers, "compare_devices"))
        stack.enter_context(mock.patch.object(workers, "describe_devices"))
        joined = stack.enter_context(mock.patch.object(workers, "JoinedWorkers"))
        for name, value in (("get_rank", 0), ("get_world_size", 2), ("get_backend", "undefined")):
            stack.enter_context(mock.patch.object(workers.dist, name, return_value=value))
        made = stack.enter_context(mock.patch.object(workers.dist, "new_group"))
        group = mock.Mock(_get_backend=backend_of)
        c10d = workers.dist.distributed_c10d
        stack.enter_context(mock.patch.object(c10d, "_get_default_group", return_value=group))
        set_device = stack.enter_context(mock.patch.object(torch.cuda, "set_device"))
        workers._adopt(_cluster(), ("gpu:1",), lambda address: ((), mock.Mock()))
    set_device.assert_called_once_with(torch.device("cuda:1"))
    assert joined.call_args.args[2] is nccl and made.called is makes_a_group
    assert joined.call_args.kwargs["cpu_group"] is (made.return_value if makes_a_group else None)


# Threads --------------------------------------------------------------------------------------------------------


class Cuda:
    """Keeps the current device of each thread, as CUDA does."""

    def __init__(self):
        self._kept = threading.local()

    def current_device(self):
        return getattr(self._kept, "index", 0)

    def set_device(self, index):
        self._kept.index = index

    @contextlib.contextmanager
    def device(self, index):
        before = self.current_device()
        self.set_device(index)
        yield
        self.set_device(before)

    def current_stream(self, device):
        return device

    def stream(self, stream):
        return self.device(stream.index)

    @contextlib.contextmanager
    def installed(self):
        with contextlib.ExitStack() as stack:
            for name in ("current_device", "device", "current_stream", "stream"):
                stack.enter_context(mock.patch.object(torch.cuda, name, getattr(self, name)))
            stack.enter_context(mock.patch.object(torch.cuda, "is_initialized", return_value=True))
            yield self


def in_replicas(body, *names):
    """Calls a function in replicas on devices that need not exist."""
    runtime = SimpleNamespace(
        devices=names,
        torch_devices=[devices.torch_device(name) for name in names],
        copies=[],
        copies_of=[None] * len(names),
        replica_ids=range(len(names)),
        num_replicas=len(names),
        group=workers.Workers(),
        storage=None,
        threads=ReplicaThreads(names),
    )
    return functions.in_replicas(runtime, mock.Mock(), body)


@pytest.mark.kills("torch_replica_on_the_current_gpu_of_the_caller")
def test_the_device_of_a_replica_is_current_in_its_thread():
    with Cuda().installed() as cuda:
        cuda.set_device(3)
        found = in_replicas(lambda replica, index: cuda.current_device(), "gpu:2", "gpu:0", "gpu:1")
        assert found == [2, 0, 1] and cuda.current_device() == 3
        assert in_replicas(lambda replica, index: cuda.current_device(), "gpu:1") == [1]


@pytest.mark.kills("torch_helper_threads_on_the_first_gpu")
def test_helper_threads_use_the_current_device_of_the_thread_that_starts_them():
    found = []
    with Cuda().installed() as cuda:
        cuda.set_device(5)
        get_backend()
        thread = helper_threads.helper("a test", lambda: found.append(cuda.current_device()))
        thread.start()
        thread.join(10.0)
    assert found == [5]


@pytest.mark.kills("torch_autocast_of_the_first_replica_alone")
def test_autocast_and_inference_mode_reach_every_replica():
    def body(replica, index):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return product.dtype, torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    cpus = ("cpu:0", "cpu:1", "cpu:2")
    assert in_replicas(body, *cpus) == [(torch.float32, False, False)] * 3
    with torch.autocast("cpu", torch.bfloat16):
        assert in_replicas(body, *cpus) == [(torch.bfloat16, False, True)] * 3
    with torch.inference_mode():
        assert in_replicas(body, *cpus) == [(torch.float32, True, False)] * 3
    assert in_replicas(body, *cpus) == [(torch.float32, False, False)] * 3


# Random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.kills("torch_random_state_without_gpus")
def test_the_random_state_has_that_of_each_gpu():
    generators = {}
    backend = get_backend()
    gpus = [torch.device("cuda:1"), torch.device("cuda:3")]

    def get(gpu):
        return generators[gpu].clone()

    def set_(state, gpu):
        generators[gpu] = state.clone()

    def fill(*numbers):
        generators.update(
            {
                gpu: torch.full((16,), number, dtype=torch.uint8)
                for gpu, number in zip(gpus, numbers, strict=True)
            }
        )

    with (
        mock.patch.object(torch.cuda, "get_rng_state", get),
        mock.patch.object(torch.cuda, "set_rng_state", set_),
        mock.patch.object(backend, "_gpus", gpus),
    ):
        fill(7, 9)
        saved = backend.random_state()
        first = torch.rand(3)
        fill(1, 2)
        backend.set_random_state(saved)
        assert torch.equal(torch.rand(3), first)
        assert [generators[gpu].tolist() for gpu in gpus] == [[7] * 16, [9] * 16]
        with mock.patch.object(backend, "_gpus", []):
            of_cpus = backend.random_state()
        fill(1, 2)
        backend.set_random_state(of_cpus)  # a checkpoint from CPUs, or from an older kdist
        assert [generators[gpu].tolist() for gpu in gpus] == [[1] * 16, [2] * 16]
        with mock.patch.object(backend, "_gpus", gpus[1:]):
            backend.set_random_state(saved)  # a worker with one GPU restores the state of two GPUs
        assert generators[gpus[1]].tolist() == [7] * 16


# A lost worker --------------------------------------------------------------------------------------------------


class Nccl:
    """Simulates the backend of a process group, and records its aborts."""

    def __init__(self, log, name="nccl"):
        self._log, self._name = log, name

    def name(self):
        return self._name

    def abort(self):
        self._log.append(self)

    def _group_start(self):
        self._log.append("start")

    def _group_end(self):
        self._log.append("end")


@pytest.mark.kills("torch_abort_of_one_group")
def test_the_groups_of_a_mesh_are_aborted_too():
    log: list = []
    made = [Nccl(log), Nccl(log, "gloo"), Nccl(log)]
    groups = [mock.Mock(_get_backend=lambda device, b=backend: b) for backend in made]
    groups.append(mock.Mock(_get_backend=mock.Mock(side_effect=RuntimeError("No backend type"))))
    world = SimpleNamespace(pg_map=dict.fromkeys(groups))
    with (
        mock.patch.object(dist.distributed_c10d, "_world", world),
        mock.patch.object(devices.time, "sleep"),
    ):
        devices.abort_nccl()
    assert log == ["start", made[2], made[0], "end"]


@pytest.mark.kills("torch_optimizer_on_the_device_of_the_replica")
def test_the_optimizer_computes_on_the_device_of_the_variables():
    """The optimizer must use the device of the variables, which can differ from the replica's device."""
    places = []

    @contextlib.contextmanager
    def on_holder(self):
        places.append("enter")
        yield
        places.append("exit")

    strategy = kdist.experimental.CentralStorageStrategy(["cpu:1"], "cpu:0")
    with mock.patch.object(TorchCore, "on_holder", on_holder):
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(lambda: places.append("apply") or 0.1), "mse")
        places.clear()
        model.train_on_batch(np.ones((4, 2)), np.ones((4, 1)))
    assert [*dict.fromkeys(places)] == ["enter", "apply", "exit"]
