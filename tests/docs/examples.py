"""Collects the Python examples of the pages, and runs them for the test files.

The function `input_3(example)` tests the fourth example of docs/input.md. `how_to_slurm_0` tests the first
example of docs/how-to/slurm.md. Each function runs in the workers. It calls `example` with the names that the
page defines earlier, and checks the names that the example leaves. A test file ends with

    @each_example(globals())
    def test_example(backend: str, name: str, tmp_path: Path) -> None:
        run_example(globals(), backend, name, tmp_path)

Each example runs on one backend: the backend of its tab, or the backend in `runs`. Other examples use each
backend in turn. `make test` runs a part of the examples per turn.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.helpers.environment import ROOT
from tests.helpers.processes import BACKENDS, run
from tests.turn import turn

F = TypeVar("F", bound=Callable[..., Any])
Names = dict[str, Any]
Run = Callable[..., Names]  # runs an example with the given names, and returns the names that it leaves

# Other test files run these examples.
ELSEWHERE = {
    "loops_0": "loops_test.py",
    "quickstart_0": "quickstart_multi_process_test.py",
    "launcher_0": "launcher_examples_multi_process_test.py",
    "launcher_1": "launch/ray_multi_process_test.py",
    "parameter_servers_0": "parameter_servers_multi_process_test.py",
    "parameter_servers_1": "parameter_servers_multi_process_test.py",
    **{f"testing_{number}": "testing/plugin_multi_process_test.py" for number in range(3)},
    "how_to_notebooks_1": "how_to_examples_multi_process_test.py",
    "how_to_ray_0": "launch/ray_multi_process_test.py",
    "cluster_1": "tpu_strategy_multi_process_test.py, without TPUs",
}
_TABS = {"TensorFlow": "tensorflow", "JAX": "jax", "PyTorch": "torch"}
_PARTS = re.compile(
    r'^ *=== "(?P<tab>[^"]+)"|^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```|^(?P<heading>#)',
    re.MULTILINE | re.DOTALL,
)


def examples_of(page: str) -> list[tuple[str, str | None]]:
    """Returns the Python examples of a page, each with the backend of its tab, or `None` outside of tabs."""
    found, tab = [], None
    for part in _PARTS.finditer(page):
        if part["tab"] or part["heading"]:
            tab = part["tab"]
        else:
            found.append((textwrap.dedent(part["code"]), _TABS.get(tab or "") if part["indent"] else None))
    return found


def _all() -> dict[str, tuple[str, str | None]]:
    docs = ROOT / "docs"
    return {
        f"{re.sub('[^a-z0-9]', '_', str(page.relative_to(docs).with_suffix('')).lower())}_{number}": example
        for page in sorted(docs.rglob("*.md"))
        for number, example in enumerate(examples_of(page.read_text(encoding="utf-8")))
    }


EXAMPLES = _all()


def example(name: str) -> str:
    """Returns the source of an example, for example "quickstart_0", as printed on its page."""
    return EXAMPLES[name][0]


def runs(*, on: str | None = None, replaced: tuple[str, str] | None = None) -> Callable[[F], F]:
    """Sets how an example runs, if it cannot run unchanged on any backend.

    Args:
        on: The backend that it needs.
        replaced: A part of the source that needs GPUs or takes too long, and its replacement in the test.
    """

    def decorate(function: F) -> F:
        vars(function).update(on=on, replaced=replaced)
        return function

    return decorate


def each_example(names: Names) -> Callable[[F], F]:
    """Parametrizes a file's test with the names of its examples, each with a backend."""
    mine = [name for name in names if name in EXAMPLES]
    order = list(EXAMPLES)
    cases = []
    for name in mine:
        today = BACKENDS[(order.index(name) + turn()) % len(BACKENDS)]
        cases.append((getattr(names[name], "on", None) or EXAMPLES[name][1] or today, name))
    each = pytest.mark.parametrize(
        ("backend", "name"),
        [pytest.param(*case, marks=pytest.mark.xdist_group(f"pool-{case[0]}")) for case in cases],
    )
    return lambda test: pytest.mark.in_turn(4)(each(test))


def run_example(names: Names, backend: str, name: str, folder: Path) -> None:
    """Runs an example in two workers, or in one if its strategy uses a single process."""
    source = example(name)
    if replaced := getattr(names[name], "replaced", None):
        assert replaced[0] in source
        source = source.replace(*replaced)
    num_workers = 1 if 'Strategy(["' in source else 2
    done = run(backend, num_workers, _in_worker, names["__name__"], name, source, str(folder))
    assert done == ["done"] * num_workers


def _in_worker(module: str, name: str, source: str, folder: str) -> str:
    path = Path(folder) / f"example-{os.environ['RANK']}.py"
    path.write_text(source, encoding="utf-8")
    check = getattr(importlib.import_module(module), name)
    before = os.getcwd()
    os.chdir(folder)
    try:
        check(lambda **given: runpy.run_path(str(path), given))
    finally:
        os.chdir(before)
    return "done"
