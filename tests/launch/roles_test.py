"""The variables that the tasks of a job with roles receive."""

from __future__ import annotations

import json

import pytest

from kdist.cluster.roles import server_cluster
from kdist.launch.plan import plan_job
from tests.helpers.ports import neighboring_ports


def told(environ, *args, name="CUDA_VISIBLE_DEVICES", **kwargs):
    plan = plan_job(*args, environ=environ, **kwargs)
    plan.release_ports()
    return {task.name: task.environ.get(name) for task in plan.workers}


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("", ["", "", "", "", ""]),
        ("4", ["-1", "4", "4", "-1", "-1"]),  # too few, so the workers share it
        ("4,5", ["-1", "4", "5", "-1", "-1"]),
        ("4,5,6", ["6", "4", "5", "-1", "-1"]),
        ("4,5,6,7", ["6", "4", "5", "-1", "7"]),
    ],
)
def test_gpus_are_the_workers_first(gpus, expected):
    shares = told({"CUDA_VISIBLE_DEVICES": gpus}, 2, 1, True)
    assert list(shares) == ["chief", "worker 0", "worker 1", "ps 0", "evaluator"]
    assert list(shares.values()) == expected


@pytest.mark.kills("roles_evaluator_on_a_worker_s_gpu")
@pytest.mark.parametrize(
    ("num_workers", "gpus", "expected"),
    [
        (1, "4,5", ["4,5", "-1"]),  # a single worker gets all GPUs
        (2, "4,5", ["4", "5", "-1"]),
        (2, "4,5,6", ["4", "5", "6"]),
        (2, "4", ["4", "4", "-1"]),
    ],
)
def test_an_evaluator_takes_no_worker_s_gpu(num_workers, gpus, expected):
    assert list(told({"CUDA_VISIBLE_DEVICES": gpus}, num_workers, 0, True).values()) == expected


def test_every_task_finds_its_place_and_knows_the_secret():
    plan = plan_job(2, 2, True, backend="JAX", environ={"RANK": "3", "PATH": "p"}, extra={"MORE": "1"})
    plan.release_ports()
    assert plan.num_workers == 6
    for task in plan.workers:
        found = server_cluster(environ=task.environ)
        assert (found.task_type, found.task_id, found.name) == (task.role, task.index, task.full_name)
        assert (found.address or "") == task.address
        assert "RANK" not in task.environ and task.environ["PATH"] == "p" and task.environ["MORE"] == "1"
        assert task.environ["KERAS_BACKEND"] == "jax"
        assert task.helps == (task.role != "chief")
    secrets = {task.environ["KDIST_CLUSTER_TOKEN"] for task in plan.workers}
    assert len(secrets) == 1
    assert secrets.isdisjoint(told({}, 1, 1, name="KDIST_CLUSTER_TOKEN").values())
    for own in (
        {"environ": {"KDIST_CLUSTER_TOKEN": "own"}},
        {"environ": {}, "extra": {"KDIST_CLUSTER_TOKEN": "own"}},
    ):
        assert set(told(num_ps=1, local_workers=1, name="KDIST_CLUSTER_TOKEN", **own).values()) == {"own"}


@pytest.mark.kills("launch_secret_with_servers_only")
def test_workers_that_are_all_alike_share_a_secret_too():
    secrets = told({}, 2, 0, True, name="KDIST_CLUSTER_TOKEN")
    assert list(secrets) == ["worker 0", "worker 1", "evaluator"]
    assert len(set(secrets.values())) == 1
    assert len(bytes.fromhex(secrets["worker 0"])) == 16
    assert set(secrets.values()) != set(told({}, 2, 0, name="KDIST_CLUSTER_TOKEN").values()), "one per job"
    (own,) = set(told({"KDIST_CLUSTER_TOKEN": "own"}, 2, 0, name="KDIST_CLUSTER_TOKEN").values())
    assert own == "own"


def test_of_several_machines_the_first_has_the_evaluator():
    port = neighboring_ports(2)
    hosts = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    first = plan_job(1, 0, True, hosts=hosts, host_index=0, environ={})
    assert [task.name for task in first.workers] == ["worker 0", "evaluator"]
    config = json.loads(first.workers[1].environ["TF_CONFIG"])
    assert config == {"cluster": {"worker": hosts}, "task": {"type": "evaluator", "index": 0}}
    second = plan_job(1, 0, True, hosts=hosts, host_index=1, environ={})
    assert [task.name for task in second.workers] == ["worker 1"]
    assert "KDIST_CLUSTER_TOKEN" not in second.workers[0].environ, "the launchers cannot agree on one"
    kept = plan_job(1, hosts=hosts, host_index=1, environ={"KDIST_CLUSTER_TOKEN": "own"})
    assert kept.workers[0].environ["KDIST_CLUSTER_TOKEN"] == "own"
