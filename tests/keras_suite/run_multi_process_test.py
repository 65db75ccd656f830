"""The runner of Keras's tests continues after a test that hangs, ends its process or breaks pytest's report.

No framework is involved.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.keras_suite.run import run_tests

TESTS = """
import os, time, unittest

def test_a_passes():
    pass

def test_b_hangs():
    time.sleep(100)

def test_c_ends_the_process():
    os._exit(7)

def test_e_cannot_be_reported():
    import pytest
    pytest.TestReport.from_item_and_call = None

class TestD(unittest.TestCase):
    def test_says_why(self):
        raise ValueError("first line\\nlast line")

    def test_subtests(self):
        for number in range(3):
            with self.subTest(number=number):
                assert number != 1

    def test_skips(self):
        self.skipTest("no GPU")
"""


@pytest.mark.in_turn(6)
def test_a_test_that_hangs_or_dies_does_not_stop_the_others(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "pyproject.toml").write_text('[tool.pytest.ini_options]\npython_files = ["*_test.py"]\n')
    (tests / "one_test.py").write_text(TESTS)
    (tests / "two_test.py").write_text("import a_module_that_is_not_there\n")
    options = argparse.Namespace(only=[""], limit=5.0)

    found = run_tests("any", "jax", tests, options)

    outcomes = {test.rpartition(":")[2]: outcome.outcome for test, outcome in found.items()}
    assert outcomes == {
        "two_test.py": "not collected",
        "test_a_passes": "passed",
        "test_b_hangs": "died",
        "test_c_ends_the_process": "died",
        "test_e_cannot_be_reported": "died",
        "test_says_why": "failed",
        "test_subtests": "failed",
        "test_skips": "skipped",
    }
    lines = {test.rpartition(":")[2]: outcome.line for test, outcome in found.items()}
    assert "ended with status 7" in lines["test_c_ends_the_process"]
    assert lines["test_e_cannot_be_reported"].startswith("pytest failed: TypeError")
    assert lines["test_says_why"] == "ValueError: last line"
    assert lines["test_skips"] == "Skipped: no GPU"
    assert "a_module_that_is_not_there" in lines["two_test.py"]

    rest = run_tests("rest", "jax", tests, options, f"--but-passed-in={tmp_path / 'any.jsonl'}")
    assert set(found) - set(rest) == {"one_test.py::test_a_passes"}
