"""Runs the examples of the page on parameter servers one after the other, in all tasks of a cluster."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.clusters import Cluster, facts
from tests.docs.examples import example
from tests.helpers.processes import each_backend_in_twelve_turns, run_plain

STRATEGY = "strategy = kdist.ParameterServerStrategy(resolver)\nwith strategy.scope():"
SEED = "keras.utils.set_random_seed(1)\n"


def plain_losses(source: str) -> list[float]:
    """Runs a script in a plain process, and returns its losses."""
    names: dict[str, Any] = {}
    exec(source, names)
    losses: list[float] = names["model"].history.history["loss"]
    return losses


@each_backend_in_twelve_turns
def test_the_examples_of_parameter_servers(backend: str, tmp_path: Path) -> None:
    """`fit` runs its steps in order here, with the losses of one device. The loop uses any order."""
    fit, loop = example("parameter_servers_0"), example("parameter_servers_1")
    head, data = fit.split("\nx = ", 1)
    assert data.count(STRATEGY) == 1
    plain = f"import keras, numpy as np\nx = {data.replace(STRATEGY, SEED + 'if True:')}"
    expected = run_plain(backend, plain_losses, plain)
    in_turn = STRATEGY.replace("resolver)", "resolver, max_staleness=0)")
    fit = textwrap.indent(f"{head}\nx = {data.replace(STRATEGY, SEED + in_turn)}", "    ")
    loop = textwrap.indent(loop, "    ")
    tasks = Cluster(backend, tmp_path, server=fit)
    try:
        tasks.start()
        told = "tell(losses=model.history.history['loss'], steps=int(model.optimizer.iterations))"
        chief = tasks.coordinate(f"{fit}{loop}\n    {told}\n").finish()
    finally:
        tasks.close()
    (found,) = facts(chief)
    assert found["losses"] == pytest.approx(expected, rel=1e-4)
    assert found["steps"] == 5 * 16 + 100
    assert float(chief.stdout().splitlines()[-2]) < expected[-1]  # the loop trains the model further
