"""Slurm's short forms for hosts and tasks, and the cluster of a job step."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdist.cluster import discover, environment
from kdist.cluster.slurm import expand_hostlist, expand_tasks_per_node
from kdist.cluster_resolver import SlurmClusterResolver
from kdist.errors import ClusterConfigError

STEP = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[9-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.kills("slurm_zeros_lost")
@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("a-b.c_d", ["a-b.c_d"]),
    ],
)
def test_hostlist(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "n1,",
        ",n1",
        "n[",
        "n]",
        "n[]",
        "n[1",
        "n[1-]",
        "n[-1]",
        "n[2-1]",
        "n[a]",
        "n[0-999999999]",
        "a b",
    ],
)
def test_bad_hostlist(text):
    with pytest.raises(ClusterConfigError, match="host list"):
        expand_hostlist(text)


names = st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True)
ranges = st.lists(
    st.integers(0, 50).flatmap(lambda low: st.tuples(st.just(low), st.integers(low, low + 5))), max_size=3
)


@given(st.lists(st.tuples(names, ranges), min_size=1, max_size=4))
def test_hostlist_property(parts):
    written, expected = [], []
    for name, spans in parts:
        if spans:
            written.append(f"{name}[{','.join(str(a) if a == b else f'{a}-{b}' for a, b in spans)}]")
            expected += [f"{name}{i:0{len(str(a))}d}" for a, b in spans for i in range(a, b + 1)]
        else:
            written.append(name)
            expected.append(name)
    assert expand_hostlist(",".join(written)) == expected


@settings(max_examples=300)
@given(st.text(alphabet="n1-9[],x ( )", max_size=20))
def test_any_text_is_an_error_or_hosts(text):
    for expand in (expand_hostlist, expand_tasks_per_node):
        try:
            assert expand(text)
        except ClusterConfigError:
            pass


def test_tasks_per_node():
    assert expand_tasks_per_node("3(x2),2,1") == [3, 3, 2, 1]
    for text in ("", "x", "2(x)", "2(y3)", "-1", "2(x999999)"):
        with pytest.raises(ClusterConfigError, match="tasks per node"):
            expand_tasks_per_node(text)


@pytest.mark.kills("slurm_nodes_sorted")
def test_cluster_follows_the_order_of_the_nodes():
    resolver = SlurmClusterResolver(environ=STEP)
    # Sorting the names, as TensorFlow does, would put n10 before n9 and give every task a wrong address.
    assert resolver.cluster_spec() == {"worker": ["n9:8888", "n9:8889", "n10:8888", "n10:8889"]}
    assert resolver.get_task_info() == ("worker", 2)
    assert resolver.master() == "grpc://n10:8888"
    assert resolver.num_accelerators() == {"GPU": 0}


def test_jobs_are_filled_in_alphabetical_order():
    resolver = SlurmClusterResolver(jobs={"worker": 3, "ps": 1}, port_base=5, environ=STEP)
    assert resolver.cluster_spec() == {"ps": ["n9:5"], "worker": ["n9:6", "n10:5", "n10:6"]}
    assert resolver.get_task_info() == ("worker", 1)
    assert SlurmClusterResolver(tasks_per_node=2, environ=STEP).cluster_spec().num_tasks("worker") == 4
    by_host = SlurmClusterResolver(tasks_per_node={"a": 3, "b": 1}, environ=STEP)
    assert by_host.cluster_spec().task_address("worker", 3) == "b:8888"


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"]
)
def test_missing_variables_are_named(name):
    environ = {key: value for key, value in STEP.items() if key != name}
    with pytest.raises(RuntimeError, match=name):
        SlurmClusterResolver(environ=environ)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID"),
        ({"SLURM_STEP_NUM_TASKS": "-4"}, "SLURM_STEP_NUM_TASKS"),
        ({"SLURM_STEP_NUM_TASKS": "5"}, "have 5 tasks, but Slurm assigned 4"),
        ({"SLURM_STEP_NODELIST": "n[9-"}, "host list"),
        ({"SLURM_STEP_NODELIST": "n9"}, "one number per host"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "tasks per node"),
        ({"SLURM_NODEID": "0"}, "node by node"),
    ],
)
def test_wrong_variables(change, message):
    with pytest.raises(ClusterConfigError, match=message):
        discover(environ={**STEP, **change})


def test_gpus_are_shared_out_in_the_own_environment_only():
    own = {**STEP, "SLURM_PROCID": "3", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    with environment.patched(**own):
        resolver = SlurmClusterResolver()
        assert resolver.num_accelerators() == {"GPU": 2}
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
        SlurmClusterResolver(auto_set_gpu=False, environ=own).cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    with pytest.raises(RuntimeError, match="gpus_per_task"):
        SlurmClusterResolver(gpus_per_node=1, gpus_per_task=1, environ=STEP)


def test_discovery_needs_a_step_of_several_tasks():
    assert discover(environ={**STEP, "SLURM_JOB_ID": "7"}).source == "Slurm"
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-4]"}
    assert discover(environ=batch).source == "default"
    assert discover(environ={**STEP, "SLURM_STEP_NUM_TASKS": "1"}).source == "default"


def test_discovered_cluster():
    cluster = discover(environ={**STEP, "SLURM_JOB_ID": "7"})
    assert (cluster.num_workers, cluster.worker_index) == (4, 2)
    assert (cluster.local_rank, cluster.local_workers) == (0, 2)
    other_job = discover(environ={**STEP, "SLURM_JOB_ID": "8"})
    assert cluster.coordinator.startswith("n9:") and cluster.coordinator != other_job.coordinator
