"""The examples of the page of parameter servers, one after the other, as all tasks of a cluster run them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from tests.coordinator.clusters import Cluster
from tests.docs.examples import example
from tests.processes import each_backend


@each_backend
def test_the_examples_of_parameter_servers(backend: str, tmp_path: Path) -> None:
    fit, loop = (textwrap.indent(example(f"parameter_servers_{number}"), "    ") for number in range(2))
    tasks = Cluster(backend, tmp_path, server=fit)
    try:
        tasks.start()
        chief = tasks.coordinate(f"{fit}{loop}\n    print(model.history.history['loss'])\n")
        assert chief.wait() == 0, chief.stderr()
    finally:
        tasks.close()
    fitted = json.loads(chief.stdout().splitlines()[-1])
    assert len(fitted) == 5 and fitted[-1] < fitted[0]
    assert float(chief.stdout().splitlines()[-2]) < fitted[-1]
