"""Clusters with parameter servers: valid clusters, and errors that name each mistake."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.cluster import ClusterSpec, SimpleClusterResolver, environment, survey
from kdist.cluster.roles import coordinator_cluster, describe, server_cluster
from kdist.cluster_resolver import UnionResolver
from kdist.errors import ClusterConfigError

CLUSTER = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["d:1"]}

hosts = st.from_regex(r"[a-z][a-z0-9.-]{0,9}", fullmatch=True)
addresses = st.builds("{}:{}".format, hosts, st.integers(1, 65535))
jobs = st.sampled_from(["chief", "worker", "ps", "evaluator", "master", "other"])
clusters = st.dictionaries(
    jobs, st.lists(addresses, max_size=3) | st.dictionaries(st.integers(0, 4), addresses, max_size=3)
)


def resolved(cluster, task_type=None, task_id=None):
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=task_type, task_id=task_id, rpc_layer="grpc")


def wrong(cluster, task_type=None, task_id=None, found=server_cluster):
    with pytest.raises(ClusterConfigError) as error:
        found(resolved(cluster, task_type, task_id))
    return str(error.value)


def test_each_task_finds_itself():
    found = server_cluster(resolved(CLUSTER, "ps", 0))
    assert (found.task_type, found.task_id, found.workers, found.servers) == (
        "ps",
        0,
        ("a:1", "b:1"),
        ("d:1",),
    )
    assert (found.name, found.address, found.rpc_layer) == ("ps 0 (d:1)", "d:1", "grpc")
    assert found.worker_names == ("worker 0 (a:1)", "worker 1 (b:1)") and found.server_names == (
        "ps 0 (d:1)",
    )
    assert server_cluster(resolved(CLUSTER, "worker", 1)).name == "worker 1 (b:1)"
    chief = coordinator_cluster(resolved(CLUSTER, "chief"))
    assert (chief.name, chief.address) == ("chief (c:1)", "c:1")
    evaluator = server_cluster(resolved(CLUSTER, "evaluator", 0))
    assert (evaluator.name, evaluator.address) == ("evaluator", None)
    assert server_cluster(resolved(CLUSTER | {"evaluator": ["e:1"]}, "evaluator", 0)).name == "evaluator"


def test_who_knows_no_task_coordinates():
    found = coordinator_cluster(resolved({"worker": ["a:1"], "ps": ["b:1"]}))
    assert (found.task_type, found.chief, found.name) == ("chief", None, "chief")
    several = UnionResolver(resolved({"worker": {0: "a:1"}}), resolved({"worker": {1: "b:1"}, "ps": ["d:1"]}))
    assert server_cluster(several).workers == ("a:1", "b:1")


def test_tf_config_is_what_is_asked():
    environ = {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}})}
    assert server_cluster(environ=environ).name == "worker 1 (b:1)"
    with pytest.raises(ClusterConfigError, match="has no worker, but"):
        server_cluster(environ={})
    with pytest.raises(ClusterConfigError, match="is not a ClusterResolver"):
        server_cluster(CLUSTER)


@pytest.mark.kills("addresses_that_two_tasks_share")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"worker": []}, "has no worker, but"),
        ({"ps": []}, "has no parameter server, a task of the job ps, but"),
        ({"chief": ["c:1", "c:2"]}, 'more than one task of the job "chief"'),
        ({"evaluator": ["e:1", "e:2"]}, 'more than one task of the job "evaluator"'),
        ({"master": ["m:1"]}, 'Remove the job "master"'),
        ({"servers": ["m:1"]}, "The job 'servers' is not one of chief, worker, ps, evaluator"),
        ({"ps": ["d:1", "a:1"]}, "worker 0 and ps 1 have the same address"),
        ({"ps": ["C:1"]}, "chief and ps 0 have the same address"),
        ({"worker": ["localhost:7"], "ps": ["127.0.0.1:7"]}, "worker 0 and ps 0 have the same address"),
        ({"ps": ["d"]}, "address of ps 0"),
        ({"ps": ["grpc://d:1"]}, "address of ps 0"),
        ({"worker": {1: "b:1"}}, "no address for worker 0"),
        ({"ps": {0: "d:1", 2: "f:1"}}, "no address for ps 1"),
    ],
)  # fmt: skip
def test_a_cluster_that_cannot_be_is_named(change, message):
    assert message in wrong(CLUSTER | change)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            ("worker", 2),
            "the indices of the job \"worker\": [0, 1].\nReceived: task_type='worker', task_id=2",
        ),
        (("ps", None), 'the indices of the job "ps": [0]'),
        (("ps", -1), "task_id=-1"),
        (("chief", 1), 'the job "chief": [0]'),
        (("trainer", 0), "`task_type` is not one of"),
    ],
)
def test_a_task_that_is_not_there_is_named(task, message):
    assert message in wrong(CLUSTER, *task)


def test_a_chief_that_the_cluster_does_not_have():
    assert "is not a job of the cluster" in wrong({"worker": ["a:1"], "ps": ["b:1"]}, "chief", 0)
    assert 'Rename the job to "chief"' in wrong({"master": ["m:1"], "worker": ["a:1"], "ps": ["b:1"]})


@pytest.mark.kills("a_worker_that_makes_a_strategy_with_servers")
@pytest.mark.parametrize(
    ("task", "hint"),
    [
        (("worker", 1), "kdist.Server(resolver.cluster_spec(), job_name="),
        (("ps", 0), "task_index=resolver.task_id).join()"),
        (("evaluator", 0), "kdist.SidecarEvaluator("),
    ],
)
def test_a_strategy_is_made_by_the_coordinator_alone(task, hint):
    message = wrong(CLUSTER, *task, found=coordinator_cluster)
    assert "not the chief" in message and hint in message
    assert f"this_task={server_cluster(resolved(CLUSTER, *task)).name!r}" in message


@given(clusters, st.none() | jobs, st.none() | st.integers(-1, 3))
def test_any_cluster_is_an_error_or_can_train(cluster, task_type, task_id):
    try:
        found = server_cluster(resolved(cluster, task_type, task_id))
    except ClusterConfigError:
        return
    spec = ClusterSpec(cluster)
    assert list(found.workers) == spec.job_tasks("worker") and list(found.servers) == spec.job_tasks("ps")
    assert found.workers and found.servers and not set(found.workers) & set(found.servers)
    assert found.task_type == (task_type or "chief")
    if found.task_type in ("worker", "ps"):
        assert spec.task_address(found.task_type, found.task_id) == found.address


@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
def test_every_right_cluster_is_taken(num_workers, num_servers, has_chief, data):
    everyone = [f"h:{port}" for port in range(1, 2 + num_workers + num_servers)]
    cluster = {"worker": everyone[1 : 1 + num_workers], "ps": everyone[1 + num_workers :]}
    cluster |= {"chief": everyone[:1]} if has_chief else {}
    job = data.draw(st.sampled_from([None, "evaluator", *cluster]))
    index = data.draw(st.integers(0, len(cluster.get(job, [0])) - 1))
    found = server_cluster(resolved(cluster, job, index))
    assert list(found.workers) == cluster["worker"] and list(found.servers) == cluster["ps"]
    assert (found.task_type, found.task_id) == (job or "chief", index)


def test_the_survey_tells_the_roles():
    def says(cluster, task):
        (report,) = survey({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
        assert report.won
        return report.says

    of = "1 chief, 2 workers, 1 parameter server"
    assert says(CLUSTER, {"type": "ps", "index": 0}) == f"ps 0 (d:1) of {of}"
    assert says(CLUSTER, {"type": "chief", "index": 0}) == f"chief (c:1) of {of}"
    assert says(CLUSTER, {"type": "evaluator", "index": 0}) == f"evaluator of {of}"
    assert says({"worker": ["a:1"]}, {"type": "evaluator", "index": 0}) == "evaluator of 1 worker"
    assert says({"worker": ["a:1"]}, {"type": "worker", "index": 0}) == "worker 0 (a:1) of 1"
    wrong = says({"worker": ["a:1"], "ps": []}, {"type": "worker", "index": 0})
    assert wrong.startswith("invalid: The cluster has no parameter server")
    assert describe(ClusterSpec({"worker": ["a:1"]}), "evaluator", 0) == "evaluator of 1 worker"


def test_the_token_is_read():
    assert environment.cluster_token({"KDIST_CLUSTER_TOKEN": " a "}) == "a"
    assert environment.cluster_token({"KDIST_CLUSTER_TOKEN": " "}) is None
    assert environment.cluster_token({}) is None
