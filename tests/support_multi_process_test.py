"""Strategy × backend × capability: each works or raises a clear error. A page of the docs is generated from this."""

from __future__ import annotations

import json

import pytest

from kdist import unsupported
from tests.contract import support
from tests.helpers.environment import ROOT
from tests.helpers.processes import BACKENDS, full_unless, run
from tests.turn import turn


def _cells():
    for index, name in enumerate(support.STRATEGIES):
        for place, backend in enumerate(BACKENDS):
            # `make test` runs each strategy on one backend per turn, and all gaps, because they take no time.
            today = place == (index + turn()) % 3
            is_pair = today or unsupported.find(name.rpartition(".")[2], backend, "create") is not None
            marks = [*full_unless(is_pair), pytest.mark.xdist_group(f"pool-{backend}")]
            yield pytest.param(name, backend, id=f"{name}-{backend}", marks=marks)


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(("name", "backend"), _cells())
def test_all_capabilities(name, backend, tmp_path, record_property):
    results, *others = run(backend, support.STRATEGIES[name], support.run_all, name, str(tmp_path))
    record_property("support", [f"{name}-{backend}", results])
    assert all(other == results for other in others)
    wrong = {capability: said for capability, said in results.items() if said not in ("passed", "gap")}
    assert not wrong, "\n".join(f"{capability}: {said}" for capability, said in wrong.items())


def test_the_page_says_what_was_found():
    results = json.loads((ROOT / "docs" / "support.json").read_text(encoding="utf-8"))
    assert set(results) == {f"{name}-{backend}" for name in support.STRATEGIES for backend in BACKENDS}
    assert {said for found in results.values() for said in found.values()} <= {"passed", "gap"}
    page = support.page(results)
    assert (ROOT / "docs" / "support.md").read_text(encoding="utf-8") == page, "run `make table`"


def test_the_page_shows_what_failed():
    results = json.loads((ROOT / "docs" / "support.json").read_text(encoding="utf-8"))
    results["MirroredStrategy-jax"]["fit"] = "AssertionError: other numbers"
    page = support.page(results)
    table = page.partition("\n`fit` on arrays:\n\n")[2].partition("\n\n")[0]
    assert "| `MirroredStrategy` | ✓ | ✗ | ✓ |" in table
    gap = unsupported.find("TPUStrategy", "torch", "create")
    assert f"{gap.reason} {gap.remedy}" in page
