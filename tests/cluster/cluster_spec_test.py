"""`ClusterSpec` and the two general resolvers behave as `tf.distribute` documents it."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.cluster import ClusterSpec, SimpleClusterResolver
from kdist.cluster_resolver import UnionResolver
from kdist.errors import ClusterConfigError

SPEC = ClusterSpec({"chief": ["c:1"], "worker": {0: "a:1", 2: "b:1"}, "ps": []})

addresses = st.builds(
    "{}:{}".format, st.from_regex(r"[a-z][a-z0-9.-]{0,9}", fullmatch=True), st.integers(1, 65535)
)
jobs = st.dictionaries(
    st.sampled_from(["chief", "worker", "ps", "evaluator", "other"]),
    st.one_of(st.lists(addresses, max_size=5), st.dictionaries(st.integers(0, 50), addresses, max_size=5)),
    max_size=4,
)


def test_methods():
    assert SPEC.jobs == ["chief", "worker", "ps"]
    assert SPEC.num_tasks("worker") == 2
    assert SPEC.task_indices("worker") == [0, 2]
    assert SPEC.task_address("worker", 2) == "b:1"
    assert SPEC.job_tasks("worker") == ["a:1", None, "b:1"]
    assert SPEC.job_tasks("ps") == []
    assert SPEC.as_dict() == {"chief": ["c:1"], "worker": {0: "a:1", 2: "b:1"}, "ps": {}}
    assert bool(SPEC) and not ClusterSpec({})
    assert repr(ClusterSpec({"worker": ["a:1"]})) == "ClusterSpec({'worker': ['a:1']})"


def test_equality_with_other_specs_and_dictionaries():
    assert ClusterSpec(SPEC) == SPEC
    assert ClusterSpec({}) != SPEC
    assert ClusterSpec({"worker": ["a:1"]}) == {"worker": {0: "a:1"}}
    assert ClusterSpec({"worker": ["a:1"]}) != 3
    with pytest.raises(TypeError):
        hash(SPEC)


def test_copy_is_independent():
    copy = ClusterSpec(SPEC)
    copy.as_dict()["worker"][7] = "z:1"
    assert copy == SPEC


@given(jobs)
def test_as_dict_round_trips(cluster):
    spec = ClusterSpec(cluster)
    again = ClusterSpec(spec.as_dict())
    assert again == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    for job in spec.jobs:
        assert [spec.task_address(job, i) for i in spec.task_indices(job)] == [
            address for address in spec.job_tasks(job) if address is not None
        ]


@pytest.mark.parametrize("cluster", [None, 3, ["a:1"], {"worker": "a:1"}, {"worker": [1]}, {1: ["a:1"]}])
def test_wrong_types_are_type_errors(cluster):
    with pytest.raises(TypeError) as info:
        ClusterSpec(cluster)
    assert isinstance(info.value, ClusterConfigError)
    assert "Received" in str(info.value)


@pytest.mark.parametrize("index", [-1, "x", 1.5, None, True])
def test_wrong_indices(index):
    with pytest.raises(ClusterConfigError, match="index of job 'worker'"):
        ClusterSpec({"worker": {index: "a:1"}})


def test_unknown_job_and_task():
    for ask in (SPEC.num_tasks, SPEC.task_indices, SPEC.job_tasks):
        with pytest.raises(ValueError, match="nosuch"):
            ask("nosuch")
    with pytest.raises(ValueError, match="no task 1"):
        SPEC.task_address("worker", 1)


class _Foreign:
    """A fake `tf.train.ClusterSpec`."""

    def as_dict(self):
        return {"worker": ["a:1"]}


def test_foreign_spec_is_taken():
    assert ClusterSpec(_Foreign()) == {"worker": ["a:1"]}
    assert SimpleClusterResolver(_Foreign()).cluster_spec() == {"worker": ["a:1"]}


def test_simple_resolver():
    resolver = SimpleClusterResolver(
        SPEC,
        master="m:1",
        task_type="worker",
        task_id=2,
        environment="e",
        num_accelerators={"GPU": 3},
        rpc_layer="grpc",
    )
    assert resolver.master() == "grpc://m:1"
    assert resolver.master("chief", 0, "http") == "http://c:1"
    assert resolver.num_accelerators() == {"GPU": 3}
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 2, "e")
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "chief", 0, None
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("chief", 0, "m:1")
    assert SimpleClusterResolver(SPEC).num_accelerators() == {}
    for wrong in ({"worker": ["a:1"]}, None):
        with pytest.raises(TypeError, match="cluster_spec"):
            SimpleClusterResolver(wrong)
    with pytest.raises(TypeError, match="master"):
        SimpleClusterResolver(SPEC, master=3)


def _simple(cluster, **kwargs):
    return SimpleClusterResolver(ClusterSpec(cluster), **kwargs)


def test_union():
    first = _simple({"worker": ["a:1"]}, task_type="worker", task_id=3, rpc_layer="grpc", master="m:1")
    union = UnionResolver(first, _simple({"worker": ["b:1"], "ps": ["p:1"]}))
    assert union.cluster_spec() == {"worker": ["a:1", "b:1"], "ps": ["p:1"]}
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 3, "grpc")
    assert union.master() == "grpc://m:1"
    assert union.master("ps", 0) == "p:1"
    assert UnionResolver(first, task_id=0).task_id == 0  # an override of 0 is an override


def test_union_of_sparse_jobs():
    union = UnionResolver(_simple({"worker": ["a:1"]}), _simple({"worker": {5: "b:1"}}))
    assert union.cluster_spec() == {"worker": {0: "a:1", 5: "b:1"}}
    with pytest.raises(KeyError, match=r"indices described twice=\[0\]"):
        UnionResolver(_simple({"worker": ["a:1"]}), _simple({"worker": {0: "b:1", 3: "c:1"}})).cluster_spec()


def test_union_arguments():
    with pytest.raises(ValueError, match="at least one"):
        UnionResolver()
    with pytest.raises(TypeError, match="is not a ClusterResolver"):
        UnionResolver(SPEC)
    with pytest.raises(ValueError, match="keywords"):
        UnionResolver(_simple({}), nosuch=1)
