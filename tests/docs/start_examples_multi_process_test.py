"""The examples of the first pages, and of those about clusters and failures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.docs.examples import Run, each_example, run_example, runs
from tests.docs.things import assert_same, losses_of, new_model, rows
from tests.environment import ROOT
from tests.processes import run, run_plain, strategy


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
    losses = losses_of(example(**rows())["model"])
    assert len(losses) == 5 and losses[-1] < losses[0]


def quickstart_0(example: Run) -> None:
    import keras

    model = new_model()
    example(model=model, **rows())
    assert len(losses_of(model)) == 5
    assert_same(model, keras.models.load_model("model.keras"))


@runs(replaced=("gpu:", "cpu:"))
def quickstart_1(example: Run) -> None:
    import kdist

    assert example(kdist=kdist)["strategy"].num_replicas_in_sync == 2


def cluster_0(example: Run) -> None:
    import types

    import kdist

    # The strategy would wait for host0 and host1.
    made = types.SimpleNamespace(
        cluster_resolver=kdist.cluster_resolver, MultiWorkerMirroredStrategy=lambda resolver: resolver
    )
    resolver = example(kdist=made)["strategy"]
    assert resolver.cluster_spec().as_dict() == {"worker": ["host0:2222", "host1:2222"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)


def failures_0(example: Run) -> None:
    from kdist import faults

    assert example()["faults"] is faults  # nothing is injected: the point does nothing


@each_example(globals())
def test_example(backend: str, name: str, tmp_path: Path) -> None:
    run_example(globals(), backend, name, tmp_path)


def trained(source: str) -> tuple[Any, dict[str, list[float]]]:
    """In a worker: what a script of the quickstart trains."""
    import keras

    keras.utils.set_random_seed(3)
    x = rows()["x"]
    y = (x[:, 0] > 0).astype("int32")
    names: dict[str, Any] = {"load_data": lambda: ((x, y), (x[:50], y[:50]))}
    exec(source, names)
    return names["model"].get_weights(), names["model"].history.history


@pytest.mark.xdist_group("pool-torch")
def test_both_sides_of_the_quickstarts_diff_train_the_same() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    before, after = (
        "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(other)) for other in "+-"
    )
    weights, history = run_plain("torch", trained, before)
    for shared_weights, shared_history in run("torch", 2, trained, after):
        assert shared_history == {name: pytest.approx(values, rel=1e-4) for name, values in history.items()}
        for one, two in zip(weights, shared_weights, strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)
