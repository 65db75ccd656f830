"""The pytest plugin: its fixtures work in a user's tests, and cost nothing if the tests do not use them."""

from __future__ import annotations

import os
import tomllib

import pytest

from tests.docs.examples import example
from tests.helpers.environment import ROOT
from tests.helpers.scripts import run_python

MODULE = "kdist.testing.plugin"
TESTS = """
import os, threading

def pids(workers, number=2):
    return workers(number).run(os.getpid)

seen = []

def test_workers(kdist_workers):
    seen.extend(pids(kdist_workers))
    assert len(set(seen)) == 2

def test_workers_are_kept(kdist_workers):
    assert pids(kdist_workers) == seen
    assert len(pids(kdist_workers, 3)) == 3

def test_that_fails(kdist_workers):
    kdist_workers(2).run(lambda: 1 / 0)

def test_others_after_a_failure(kdist_workers):
    assert not {*pids(kdist_workers)} & {*seen}
    print("PIDS", *seen, *pids(kdist_workers), *pids(kdist_workers, 3))

def test_kept_workers_are_no_leak(kdist_no_leaks, kdist_workers):
    assert len(kdist_workers(2, env={"A": "b"}).run(os.getpid)) == 2

def test_that_leaks(kdist_no_leaks):
    threading.Thread(target=threading.Event().wait, args=(5,), name="forgotten", daemon=True).start()
"""


def run_pytest(folder, tests, **env):
    (folder / "user_test.py").write_text(tests, encoding="utf-8")
    # Loaded by name, because the entry points of the installed kdist may be outdated.
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | env
    command = ("-m", "pytest", "-p", MODULE, "-p", "no:cacheprovider", "-rA", "user_test.py")
    return run_python(*command, cwd=folder, timeout=150, code=None, **env)


@pytest.mark.kills("testing_failed_workers_are_kept")
def test_fixtures(tmp_path):
    done = run_pytest(tmp_path, TESTS)
    said = done.stdout + done.stderr
    assert "5 passed, 1 failed, 1 error" in said.replace("1 failed, 5 passed", "5 passed, 1 failed"), said
    assert "FAILED user_test.py::test_that_fails - kdist.testing.pool.WorkerFailure" in said
    assert "ERROR user_test.py::test_that_leaks" in said and "thread 'forgotten'" in said
    assert "ZeroDivisionError" in said
    (line,) = [line for line in said.splitlines() if line.startswith("PIDS ")]
    for pid in map(int, line.split()[1:]):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.in_turn(4)
def test_the_page_s_examples(tmp_path):
    blocks = [example(f"testing_{number}") for number in range(3)]
    done = run_pytest(tmp_path, "\n".join(blocks), KERAS_BACKEND="torch")
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_the_entry_point_is_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"kdist": MODULE}


def test_the_plugin_loads_nothing():
    code = f"""
import sys, pytest
before = set(sys.modules)
import {MODULE}
print(*sorted(set(sys.modules) - before))
"""
    done = run_python("-c", code, cwd=ROOT)
    heavy = ("keras", "numpy", "tensorflow", "jax", "torch", "kdist.launch", "kdist.cluster")
    assert MODULE in done.stdout.split()
    assert not [name for name in done.stdout.split() if name.startswith(heavy)], done.stdout
