"""The page on security is right about the addresses that processes listen on, and about pickles."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests.helpers.environment import ROOT
from tests.helpers.layers import FILES
from tests.helpers.processes import BACKENDS, run

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def listening() -> list[str]:
    """Returns the addresses that this worker listens on, in the kernel's notation."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor))
        except OSError:  # the descriptor of this listing, closed by now
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in inodes:
                found.append(columns[1].partition(":")[0])
    return found


@pytest.mark.in_turn(3)
@pytest.mark.kills(docs_chief_listens_everywhere="[torch]")
@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=pytest.mark.xdist_group(f"pool-{b}")) for b in BACKENDS]
)
def test_workers_of_one_machine_listen_where_the_page_says(backend: str) -> None:
    for worker, addresses in enumerate(run(backend, 2, listening)):
        # With gloo and TensorFlow, every worker listens. With JAX and PyTorch, at least the chief does.
        assert addresses or worker, "the chief listens"
        everywhere = [address for address in addresses if address not in LOOPBACK]
        assert bool(everywhere) == (backend == "tensorflow"), everywhere


@pytest.mark.kills("docs_pickles_read_elsewhere")
def test_the_page_names_all_that_read_pickles() -> None:
    readers = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                "pickle.load",
                "pickle.loads",
                "pickle.Unpickler",
                "cloudpickle.load",
                "cloudpickle.loads",
                "cloudpickle().loads",
                "torch.load",
            }:
                readers.add(str(path.relative_to(ROOT)))
    named = {f"kdist/{name}" for name in _files_in(PAGE)}
    assert readers == named


def _files_in(page: str) -> list[str]:
    table = page[page.index("## What is unpickled") : page.index("Nothing else is pickled")]
    return [part.removeprefix("kdist/") for part in table.split("`") if part.endswith(".py")]
