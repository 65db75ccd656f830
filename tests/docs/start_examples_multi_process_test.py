"""Runs the examples of the first pages and of the page on clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.examples import Run, each_example, run_example, runs
from tests.docs.things import assert_same, model_with_and_without_kdist, new_model, rows
from tests.helpers.processes import strategy


def global_batch_0(example: Run) -> None:
    model = new_model()
    made = example(strategy=strategy(), model=model, **rows())
    plain = new_model(plain=True)
    plain.fit(*rows().values(), batch_size=made["batch_size"], epochs=5, verbose=0)
    assert made["batch_size"] == 128
    assert_same(plain, model)


def contexts_0(example: Run) -> None:
    import kdist

    seen = example(kdist=kdist, strategy=strategy())["seen"]
    assert seen[:2] == ["replica", "cross-replica"]
    assert set(seen[2:]) == {"replica"}


def index_0(example: Run) -> None:
    assert_same(*model_with_and_without_kdist(example))


@runs(replaced=("gpu:", "cpu:"))
def quickstart_1(example: Run) -> None:
    import kdist

    assert example(kdist=kdist)["strategy"].num_replicas_in_sync == 2


def cluster_0(example: Run) -> None:
    import sys
    import types
    from unittest import mock

    import kdist

    # The strategy would wait for host0 and host1.
    made = types.SimpleNamespace(
        cluster_resolver=kdist.cluster_resolver, MultiWorkerMirroredStrategy=lambda resolver: resolver
    )
    with mock.patch.dict(sys.modules, kdist=made):
        resolver = example()["strategy"]
    assert resolver.cluster_spec().as_dict() == {"worker": ["host0:2222", "host1:2222"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)


@pytest.mark.kills(examples_workers_train_alone="-index_0]")
@each_example(globals())
def test_example(backend: str, name: str, tmp_path: Path) -> None:
    run_example(globals(), backend, name, tmp_path)
