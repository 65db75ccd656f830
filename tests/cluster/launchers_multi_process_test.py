"""Two workers train with the variables of torchrun, Slurm, MPI, Keras or an Indexed Job.

The tests set the variables as the launchers do, so they do not need the launchers. The expected weights are
computed by hand.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kdist.cluster import discover, free_ports
from tests.helpers import by_hand
from tests.helpers.scripts import Script

EPOCHS = 3
SCRIPT = f"""
import kdist
from tests.helpers import by_hand

strategy = kdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    # Only the chief begins where the computation by hand does.
    model = by_hand.model(is_true=strategy.runtime.worker_index == 0)
by_hand.fit(model, {EPOCHS})
print("WORKER", strategy.runtime.worker_index, "OF", strategy.num_replicas_in_sync)
print(by_hand.show(model), flush=True)
"""
Variables = dict[str, str]


def torchrun(rank: int, port: int) -> Variables:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ROLE_RANK": str(rank), "ROLE_NAME": "default",
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def slurm(rank: int, job: int) -> Variables:
    return {
        "SLURM_JOB_ID": str(job), "SLURM_JOBID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEPID": "0",
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
    }  # fmt: skip


def open_mpi(rank: int, job: int) -> Variables:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": str(rank), "OMPI_UNIVERSE_SIZE": "2",
        "PMIX_RANK": str(rank), "PMIX_NAMESPACE": f"prterun-node-{job}@1",
    }  # fmt: skip


def pmi(rank: int, job: int) -> Variables:
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": "2", "PMI_FD": "7", "PMI_JOBID": str(job),
        "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2",
    }  # fmt: skip


def keras(rank: int, port: int) -> Variables:
    return {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"127.0.0.1:{port}",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
        "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
    }


def indexed_job(rank: int, port: int) -> Variables:
    return {
        "JOB_COMPLETION_INDEX": str(rank),
        "KDIST_NUM_WORKERS": "2",
        "KDIST_COORDINATOR_ADDRESS": f"localhost:{port}",
    }


# Each launcher runs once. Each backend runs with a launcher that sets only the chief's address, and once more.
# The backend's own tests include real torchrun with PyTorch.
JOBS = [
    ("torchrun", torchrun, "tensorflow"),
    ("torchrun", torchrun, "jax"),
    ("Slurm", slurm, "tensorflow"),
    ("MPI", open_mpi, "jax"),
    ("MPI", pmi, "torch"),
    ("KERAS_DISTRIBUTION", keras, "torch"),
    ("Indexed Job", indexed_job, "tensorflow"),
]


@contextlib.contextmanager
def agent(listens: bool) -> Iterator[int]:
    """Yields a port, at which it listens like torchrun's agent if `listens` is true; else a free port."""
    if not listens:
        yield free_ports(1)[0]
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def job_number(variables: Callable[[int, int], Variables]) -> int:
    """Returns a job number from which kdist derives free ports."""
    for number in itertools.count(os.getpid()):
        found = discover(environ=variables(0, number)).coordinator
        port = int(str(found).rpartition(":")[2])
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for next_to in range(3):
                stack.enter_context(socket.create_server(("127.0.0.1", port + next_to)))
            return number
    raise AssertionError("unreachable")


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    ("source", "variables", "backend"), JOBS, ids=[f"{made.__name__}-{backend}" for _, made, backend in JOBS]
)
def test_workers_of_any_launcher_train_as_one_device(
    source: str, variables: Callable[[int, int], Variables], backend: str, tmp_path: Path
) -> None:
    with agent(variables is torchrun) as port, contextlib.ExitStack() as cleanup:
        number = port if variables in (torchrun, keras, indexed_job) else job_number(variables)
        assert discover(environ=variables(1, number)).source == source
        started: list[Script] = []
        for rank in (1, 0):  # the first worker to start is not the chief
            env = {"KERAS_BACKEND": backend, "KDIST_JOIN_TIMEOUT": "180"} | variables(rank, number)
            started.insert(0, cleanup.enter_context(Script(tmp_path, f"worker{rank}", SCRIPT, env)))
        for rank, script in enumerate(started):
            assert f"WORKER {rank} OF 2" in script.finish(240).stdout()
    for script in started:
        (found,) = by_hand.shown(script.stdout())
        np.testing.assert_allclose(found, by_hand.weights(EPOCHS), rtol=1e-5, atol=1e-6)
