"""Each worker gets its GPUs of a machine only from the launcher's environment and the number of GPUs."""

from __future__ import annotations

import os

import pytest

from kdist.cluster import discover, environment, may_have_gpus, own_gpus, visible_gpus
from kdist.cluster_resolver import SlurmClusterResolver
from kdist.launch.plan import plan_job

WORKERS = 4


def _slurm(index, **more):
    step = {"SLURM_PROCID": str(index), "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n1"}
    return step | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_ID": "0"} | more


def _torchrun(index):
    numbers = {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    return numbers | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def _mpi(index):
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    counts = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    return dict.fromkeys(names, str(index)) | counts | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


LAUNCHERS = {"Slurm": _slurm, "torchrun": _torchrun, "MPI": _mpi}


def _assigned(environs, gpus):
    """Returns the GPUs of each worker, by their numbers on a machine with `gpus` GPUs."""
    found = []
    for environ in environs:
        names = [str(i) for i in range(gpus)]
        if "CUDA_VISIBLE_DEVICES" in environ:
            names = visible_gpus(environ)
        found.append([int(names[i]) for i in own_gpus(discover(environ=environ), len(names), environ)])
    return found


@pytest.mark.kills("gpus_of_slurm_all_in_each_worker")
@pytest.mark.parametrize("launcher", [*LAUNCHERS, "kdist run"])
@pytest.mark.parametrize("visible", ["unset", "all", "one"])
@pytest.mark.parametrize("gpus", [8, 4, 2, 0])
def test_workers_of_a_machine_share_its_gpus(launcher, visible, gpus):
    names = {"unset": None, "all": ",".join(map(str, range(gpus))), "one": "0" if gpus else ""}[visible]
    told = {} if names is None else {"CUDA_VISIBLE_DEVICES": names}
    if launcher == "kdist run":
        if names is None:
            told = {
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))
            }  # this machine has no device files
        plan = plan_job(WORKERS, environ=told)
        plan.release_ports()
        environs = [worker.environ for worker in plan.workers]
    else:
        environs = [LAUNCHERS[launcher](index) | told for index in range(WORKERS)]
    one = [[0]] * WORKERS if gpus else [[]] * WORKERS
    shared = {8: [[0, 1], [2, 3], [4, 5], [6, 7]], 4: [[0], [1], [2], [3]], 2: [[0], [1], [0], [1]]}
    assert _assigned(environs, gpus) == (one if visible == "one" or not gpus else shared[gpus])


@pytest.mark.kills("gpus_of_a_bound_task_shared_again")
def test_gpus_that_the_launcher_gave_each_worker_are_its_own():
    apart = ["0,1", "2,3", "4,5", "6,7"]
    everything = [[0, 1], [2, 3], [4, 5], [6, 7]]
    bound = [
        {"SLURM_GPUS_PER_TASK": "2"},
        {"SLURM_NTASKS_PER_GPU": "1"},
        {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"},
        {"SLURM_GPU_BIND": "verbose,per_task:2"},
    ]
    for more in bound:
        steps = [_slurm(i, CUDA_VISIBLE_DEVICES=gpus, **more) for i, gpus in enumerate(apart)]
        assert _assigned(steps, 8) == everything, more
    # Under `ConstrainDevices`, each task counts its own GPUs from 0.
    assert _assigned([_slurm(i, CUDA_VISIBLE_DEVICES="0,1", **bound[0]) for i in range(4)], 8) == [[0, 1]] * 4
    loose = [_slurm(i, CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_GPU_BIND="none") for i in range(4)]
    assert _assigned(loose, 4) == [[0], [1], [2], [3]]
    config = '{"cluster": {"worker": ["a:1", "a:2"]}, "task": {"type": "worker", "index": %d}}'
    by_hand = [{"TF_CONFIG": config % i} for i in range(2)]
    assert _assigned(by_hand, 4) == [[0, 1], [2, 3]]
    assert _assigned([by_hand[i] | {"CUDA_VISIBLE_DEVICES": apart[i]} for i in range(2)], 4) == everything[:2]


def test_a_resolver_that_narrows_the_gpus_narrows_them_once():
    with environment.patched(**_slurm(3, CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")):
        cluster = discover(SlurmClusterResolver())
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
        assert own_gpus(cluster, 2) == range(2)


def test_workers_of_several_machines_count_their_own_machine_only():
    step = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    assert _assigned([_slurm(i, **step) for i in range(4)], 4) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert own_gpus(None, 3) == own_gpus(discover(environ={}), 3) == range(3)


def test_a_machine_without_gpus_is_known_as_one(monkeypatch):
    from kdist.cluster import gpus

    assert not may_have_gpus({"CUDA_VISIBLE_DEVICES": ""}) and may_have_gpus({"CUDA_VISIBLE_DEVICES": "1"})
    monkeypatch.setattr(gpus, "_DEVICE_FILES", ("/no/such/*",))
    monkeypatch.setattr(gpus.sys, "platform", "linux")
    assert not may_have_gpus({})
    monkeypatch.setattr(gpus, "_DEVICE_FILES", ("/dev/nul*",))
    assert may_have_gpus({})
