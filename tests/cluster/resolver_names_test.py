"""The `repr` of resolvers: the class, and the task if the resolver has it without network requests."""

from __future__ import annotations

import pytest

from kdist import cluster_resolver
from kdist.cluster import ClusterSpec, SimpleClusterResolver, TFConfigClusterResolver
from kdist.cluster_resolver import UnionResolver

TF_CONFIG = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'


def test_the_class_and_the_task():
    told = TFConfigClusterResolver(environ={"TF_CONFIG": TF_CONFIG})
    assert repr(told) == "<TFConfigClusterResolver: task worker 1>"
    assert repr(UnionResolver(told)) == "<UnionResolver: task worker 1>"
    told.task_type, told.task_id = "chief", 0
    assert repr(told) == "<TFConfigClusterResolver: task chief 0>"
    assert repr(SimpleClusterResolver(ClusterSpec({}))) == "<SimpleClusterResolver>"


def test_what_is_wrong_is_shown_and_not_raised():
    said = repr(TFConfigClusterResolver(environ={"TF_CONFIG": "{"}))
    assert said.startswith("<TFConfigClusterResolver: ") and "TF_CONFIG" in said


@pytest.mark.parametrize("name", ["GCEClusterResolver", "KubernetesClusterResolver", "TPUClusterResolver"])
def test_who_would_be_asked_over_the_network_is_not(name, monkeypatch):
    def connect(*args, **kwargs):
        raise AssertionError("The network was asked.")

    monkeypatch.setattr("socket.create_connection", connect)
    monkeypatch.setattr("urllib.request.urlopen", connect)
    kind = getattr(cluster_resolver, name)
    assert repr(kind.__new__(kind)).startswith(f"<{name}")
