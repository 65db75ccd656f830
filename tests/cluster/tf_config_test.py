"""`TF_CONFIG`: each wrong field gives an error that names the field."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdist.cluster import TFConfigClusterResolver, discover
from kdist.errors import ClusterConfigError

WORKERS = ["h0:2222", "h1:2222"]


def config(cluster=None, task=None, **more):
    good = {"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": 0}}
    if cluster is not None:
        good["cluster"] = cluster
    if task is not None:
        good["task"] = task
    return json.dumps({**good, **more})


WRONG = {
    "not JSON": ("{", "is not JSON"),
    "JSON cut short": (config()[:-1], "is not JSON"),
    "a Python dictionary": ("{'cluster': {}}", "is not JSON"),
    "a list": ("[]", "JSON object"),
    "a number": ("3", "JSON object"),
    "deep nesting": ("[" * 100_000, "JSON"),
    "cluster is a list": (config(cluster=["h0:1"]), r'\["cluster"\]'),
    "cluster is text": (config(cluster="h0:1"), r'\["cluster"\]'),
    "unknown job": (config(cluster={"workers": WORKERS}), r'\["cluster"\]\["workers"\]'),
    "cluster in another case": (
        json.dumps({"Cluster": {"worker": WORKERS}}),
        r'\["Cluster"\] is not a field',
    ),
    "jobs without cluster": (json.dumps({"worker": WORKERS}), r'\["worker"\] .* \["cluster"\] is missing'),
    "job is text": (config(cluster={"worker": "h0:1,h1:1"}), r'\["cluster"\]\["worker"\]'),
    "job is null": (config(cluster={"worker": None}), r'\["cluster"\]\["worker"\]'),
    "address is a number": (config(cluster={"worker": ["h0:1", 2]}), r'\["worker"\]\[1\]'),
    "address without port": (config(cluster={"worker": ["h0:1", "h1"]}), r'\["worker"\]\[1\]'),
    "address without host": (config(cluster={"worker": [":1", "h1:1"]}), r'\["worker"\]\[0\]'),
    "address with protocol": (config(cluster={"worker": ["grpc://h0:1"]}), "contains a protocol"),
    "port is text": (config(cluster={"worker": ["h0:http", "h1:1"]}), "port number"),
    "port zero": (config(cluster={"worker": ["h0:0", "h1:1"]}), "between 1 and 65535"),
    "port too large": (config(cluster={"worker": ["h0:65536", "h1:1"]}), "between 1 and 65535"),
    "negative port": (config(cluster={"worker": ["h0:-1", "h1:1"]}), "port number"),
    "address twice": (config(cluster={"worker": ["h0:1", "h0:1"]}), "is the same address as"),
    "address twice over jobs": (config(cluster={"worker": WORKERS, "ps": ["h0:2222"]}), r'\["ps"\]\[0\]'),
    "sparse index is text": (config(cluster={"worker": {"x": "h0:1"}}), "non-negative integer"),
    "sparse index is negative": (config(cluster={"worker": {"-1": "h0:1"}}), "non-negative integer"),
    "sparse with a gap": (
        config(cluster={"worker": {"0": "h0:1", "2": "h2:1"}}),
        r"no address for the workers \[1\]",
    ),
    "two chiefs": (config(cluster={"chief": WORKERS}), "more than one task"),
    "only servers": (config(cluster={"ps": WORKERS}), '"chief" or "worker"'),
    "no worker in the job": (config(cluster={"worker": []}), '"chief" or "worker"'),
    "no task": (
        json.dumps({"cluster": {"worker": WORKERS}}),
        "task type or the task index of this process is missing",
    ),
    "task is a list": (config(task=["worker", 0]), r'\["task"\]'),
    "task without type": (
        config(task={"index": 0}),
        "task type or the task index of this process is missing",
    ),
    "task without index": (
        config(task={"type": "worker"}),
        "task type or the task index of this process is missing",
    ),
    "unknown type": (config(task={"type": "boss", "index": 0}), r'\["task"\]\["type"\]'),
    "type is a number": (config(task={"type": 1, "index": 0}), r'\["task"\]\["type"\]'),
    "type not in cluster": (
        config(task={"type": "chief", "index": 0}),
        "is not one of the jobs of the cluster",
    ),
    "index is text": (config(task={"type": "worker", "index": "one"}), r'\["task"\]\["index"\]'),
    "index is a fraction": (config(task={"type": "worker", "index": 0.5}), "is not an integer"),
    "index is true": (config(task={"type": "worker", "index": True}), "is not an integer"),
    "index is a list": (config(task={"type": "worker", "index": [0]}), "is not an integer"),
    "index is negative": (config(task={"type": "worker", "index": -1}), "is negative"),
    "index out of range": (config(task={"type": "worker", "index": 2}), r'\["task"\]\["index"\]'),
    "rpc_layer is a number": (config(rpc_layer=3), "rpc_layer"),
    "parameter server": (
        config({"worker": WORKERS, "ps": ["p:1"]}, {"type": "ps", "index": 0}),
        "parameter server",
    ),
}


@pytest.mark.kills(cluster_at_another_place_ignored="[jobs without cluster]")
@pytest.mark.parametrize("case", WRONG)
def test_each_wrong_field_is_named(case):
    text, message = WRONG[case]
    start = time.monotonic()
    with pytest.raises(ClusterConfigError, match=message) as info:
        discover(environ={"TF_CONFIG": text})
    assert time.monotonic() - start < 1
    assert len(str(info.value)) < 2000
    assert "TF_CONFIG" in str(info.value)


@pytest.mark.parametrize(
    "text", ["{}", '{"cluster": {}}', '{"cluster": null}', '{"task": {"type": "worker", "index": 0}}']
)
def test_no_cluster_is_a_single_worker(text):
    cluster = discover(environ={"TF_CONFIG": text})
    assert (cluster.num_workers, cluster.coordinator, cluster.source) == (1, None, "TF_CONFIG")


@pytest.mark.parametrize("text", ["", "  \n"])
def test_blank_is_as_unset(text):
    assert discover(environ={"TF_CONFIG": text}).source == "default"


@pytest.mark.kills("cluster_chief_not_first", "cluster_index_off_by_one")
def test_chief_comes_first():
    text = config({"worker": WORKERS, "chief": ["c:1"], "ps": ["p:1"]}, {"type": "worker", "index": 1})
    cluster = discover(environ={"TF_CONFIG": text})
    assert cluster.addresses == ("c:1", "h0:2222", "h1:2222")
    assert (cluster.num_workers, cluster.worker_index, cluster.coordinator) == (3, 2, "c:1")
    assert not cluster.is_chief
    assert cluster.worker_names[2] == "worker 2 (h1:2222)"
    chief = discover(
        environ={"TF_CONFIG": config({"worker": WORKERS, "chief": ["c:1"]}, {"type": "chief", "index": 0})}
    )
    assert chief.is_chief and chief.task_type == "chief"


def test_evaluator_is_on_its_own():
    cluster = discover(environ={"TF_CONFIG": config(task={"type": "evaluator", "index": 0})})
    assert (cluster.num_workers, cluster.worker_index, cluster.task_type) == (1, 0, "evaluator")


def test_what_operators_write():
    # Kubeflow adds "environment", some operators write the index as text, and sparse jobs have text keys.
    text = config(
        {"worker": {"0": "h0:1", "1": "h1:1"}}, {"type": "worker", "index": "1"}, environment="cloud"
    )
    cluster = discover(environ={"TF_CONFIG": text})
    assert (cluster.worker_index, cluster.num_workers) == (1, 2)
    numbered_from_one = config({"chief": ["c:1"], "worker": {"1": "h1:1"}}, {"type": "worker", "index": 1})
    assert discover(environ={"TF_CONFIG": numbered_from_one}).worker_index == 1


def test_local_workers_are_counted_by_host():
    text = config({"worker": ["h0:1", "h0:2", "h1:1", "h1:2"]}, {"type": "worker", "index": 3})
    cluster = discover(environ={"TF_CONFIG": text})
    assert (cluster.local_rank, cluster.local_workers) == (1, 2)


def test_resolver_and_its_overrides():
    environ = {"TF_CONFIG": config(task={"type": "worker", "index": 1}, rpc_layer="grpc")}
    resolver = TFConfigClusterResolver(environ=environ)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.master() == "grpc://h1:2222"
    assert resolver.master("worker", 0, "http") == "http://h0:2222"
    resolver.task_id, resolver.rpc_layer = 0, "x"
    assert resolver.master() == "x://h0:2222"
    environ["TF_CONFIG"] = "{}"
    assert resolver.cluster_spec() == {} and resolver.master() == ""  # read again each time
    assert TFConfigClusterResolver("worker", 1, "r", "e", environ={}).environment == "e"
    master = TFConfigClusterResolver(environ={"TF_CONFIG": config(session_master="m:9")})
    assert master.master() == "m:9"


def test_override_makes_up_for_a_missing_task():
    environ = {"TF_CONFIG": json.dumps({"cluster": {"worker": WORKERS}})}
    cluster = discover(TFConfigClusterResolver("worker", 1, environ=environ))
    assert cluster.worker_index == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(WORKERS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["worker", "chief", "ps", "type", "index", "0", "1", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(json_values, json_values)
def test_anything_else_is_an_error_or_a_cluster(cluster, task):
    try:
        found = discover(environ={"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
    except ClusterConfigError:
        return
    assert 0 <= found.worker_index < found.num_workers == len(found.addresses)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_is_an_error_or_a_cluster(text):
    try:
        discover(environ={"TF_CONFIG": text})
    except ClusterConfigError:
        pass
