"""The examples of the page about measuring."""

from __future__ import annotations

import os
from pathlib import Path

from tests.docs.examples import Run, each_example, run_example
from tests.docs.things import new_model, rows


def measuring_0(example: Run) -> None:
    import kdist

    history = example(kdist=kdist, model=new_model(), **rows())["model"].history.history
    assert len(history["rows_per_second"]) == len(history["slowest_worker"]) == 3


def measuring_1(example: Run) -> None:
    import kdist
    from kdist.measuring.records import read_run

    example(kdist=kdist, model=new_model(), **rows())
    mine = read_run("runs/first").workers[int(os.environ["RANK"])]
    assert mine.totals.steps == 3 * 3 - 1


@each_example(globals())
def test_example(backend: str, name: str, tmp_path: Path) -> None:
    run_example(globals(), backend, name, tmp_path)
