"""The comparison of Keras's tests with and without a scope is right, on results written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.keras_suite.comparison import BEGUN, Comparison, Known, Outcome, read_known, read_results, report

PASSED, SKIPPED, FAILED = Outcome("passed"), Outcome("skipped", "no GPU"), Outcome("failed", "ValueError: 7")
KNOWN = """\
# What a comment says is nobody's reason.
TensorFlow: a first reason.
    tensorflow trainers/trainer_test.py::Test::test_a
    jax trainers/trainer_test.py::Test::test_b (0, 'x y')

A second reason.
    torch saving/saving_test.py::test_c
"""


def compare(plain: dict[str, Outcome], scoped: dict[str, Outcome], *known: str) -> Comparison:
    return Comparison("jax", plain, scoped, {test: Known("jax", test, "a reason") for test in known})


@pytest.mark.parametrize(
    "after", [FAILED, SKIPPED, Outcome("died"), None], ids=["failed", "skipped", "died", "missing"]
)
def test_lost_is_what_passes_plainly_alone(after: Outcome | None) -> None:
    scoped = {"kept": PASSED, "broken": FAILED} | ({"lost": after} if after else {})
    found = compare({"kept": PASSED, "lost": PASSED, "broken": FAILED, "not run": SKIPPED}, scoped)
    assert list(found.lost) == ["lost"]
    assert list(found.new) == ["lost"]


def test_what_passes_in_the_scope_alone_is_not_lost() -> None:
    assert not compare({"broken": FAILED, "not run": SKIPPED}, {"broken": PASSED, "not run": PASSED}).lost


def test_known_failures_are_lost_but_not_new() -> None:
    plain = dict.fromkeys(["old", "fresh", "better", "skipped"], PASSED) | {"skipped": SKIPPED}
    scoped = {"old": FAILED, "fresh": FAILED, "better": PASSED, "skipped": SKIPPED}
    found = compare(plain, scoped, "old", "better", "skipped", "renamed")
    assert set(found.lost) == {"old", "fresh"}
    assert set(found.new) == {"fresh"}
    assert found.fixed == ["better"]
    assert found.gone == ["skipped", "renamed"]


def test_the_report_counts_and_names_with_the_error() -> None:
    plain = {
        "kept": Outcome("passed", "", 60.0),
        "fresh": PASSED,
        "s": SKIPPED,
        "f": FAILED,
        "better": PASSED,
    }
    scoped = {
        "kept": Outcome("passed", "", 90.0),
        "fresh": FAILED,
        "s": SKIPPED,
        "f": FAILED,
        "better": PASSED,
    }
    lines = report([compare(plain, scoped, "better")]).splitlines()
    assert lines[1].split() == ["jax", "3", "1", "1", "1", "1", "1.0", "1.5"]
    assert lines[3:6] == ["jax, new (1):", "  fresh", "      failed: ValueError: 7"]
    assert lines[7:] == ["jax, known, but passes now: take it off the list (1):", "  better"]


def test_the_list_of_known_failures_has_a_reason_for_each() -> None:
    assert read_known(KNOWN) == [
        Known("tensorflow", "trainers/trainer_test.py::Test::test_a", "TensorFlow: a first reason."),
        Known("jax", "trainers/trainer_test.py::Test::test_b (0, 'x y')", "TensorFlow: a first reason."),
        Known("torch", "saving/saving_test.py::test_c", "A second reason."),
    ]


@pytest.mark.parametrize("text", ["    jax a_test.py::test_a", "A reason.\n    jax"])
def test_a_known_failure_needs_a_reason_and_a_test(text: str) -> None:
    with pytest.raises(ValueError, match="below a line with a reason"):
        read_known(text)


def test_the_checked_in_list_can_be_read() -> None:
    known = read_known(Path(__file__).with_name("known.txt").read_text(encoding="utf-8"))
    assert len({(each.backend, each.test) for each in known}) == len(known)
    assert {each.backend for each in known} <= {"jax", "torch", "tensorflow"}


def test_the_last_line_of_a_test_counts(tmp_path: Path) -> None:
    """A test that began but did not end was running when the process died."""
    entries = [("a", BEGUN, ""), ("a", "failed", "ValueError: 7"), ("b", BEGUN, "")]
    path = tmp_path / "results"
    assert read_results(path) == {}
    lines = (json.dumps({"test": t, "outcome": o, "line": line, "seconds": 0.5}) for t, o, line in entries)
    path.write_text("\n".join(lines))
    assert read_results(path) == {"a": Outcome("failed", "ValueError: 7", 0.5), "b": Outcome(BEGUN, "", 0.5)}
