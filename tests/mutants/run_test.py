"""The mutants: every patch applies to the tree as it is, and the harness tells one kind of end from another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import run

PATCHES = sorted((run.ROOT / run.PATCHES).glob("*.patch"))
TESTS = """
import time
from kdist import answer, wait

def test_answer():
    assert answer == 42

def test_other():
    time.sleep(wait)
"""
PATCH = """promise: {name} is as it was.
tests: tests/one_test.py{more}

--- a/kdist/__init__.py
+++ b/kdist/__init__.py
@@ -1,2 +1,2 @@
{diff}
"""
RIGHT = "-answer = 42\n+answer = 41\n wait = 0"
WAITING = " answer = 42\n-wait = 0\n+wait = 60"


def test_every_mutant_applies_to_this_tree() -> None:
    problems = {path.name: run.apply(path, run.ROOT, check=True) for path in PATCHES}
    stale = {name: problem for name, problem in problems.items() if problem is not None}
    assert not stale, f"These patches are stale: make them anew for the code as it is now. {stale}"


def test_make_test_runs_what_must_notice_each_mutant() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "--full", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=run.ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    mutants = {path.name: run.read_mutant(path) for path in PATCHES}
    assert {name for name, mutant in mutants.items() if not mutant.promise.endswith(".")} == set()
    words = [
        (name, word) for name, mutant in mutants.items() for word in mutant.tests if word.startswith("tests/")
    ]
    assert [pair for pair in words if f"\n{pair[1]}" not in f"\n{done.stdout}"] == []


def test_there_are_mutants() -> None:
    assert len(PATCHES) >= 120


def _tree(folder: Path, **patches: str) -> Path:
    for name, text in {
        "pyproject.toml": "[tool.pytest.ini_options]\npython_files = ['*_test.py']\naddopts = '-p no:kdist'\n",
        "kdist/__init__.py": "answer = 42\nwait = 0\n",
        "tests/one_test.py": TESTS,
        **{f"tests/mutants/{name}.patch": text for name, text in patches.items()},
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def _patch(name: str, diff: str, more: str = "") -> str:
    return PATCH.format(name=name, diff=diff, more=more)


def test_each_kind_of_end_has_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = _tree(
        tmp_path,
        a_caught=_patch("The answer", RIGHT),
        b_survived=_patch("The answer", RIGHT, "::test_other"),
        c_stale=_patch("The answer", RIGHT.replace("42", "43")),
        d_no_such_test=_patch("The answer", RIGHT, "::test_none"),
        e_not_importable=_patch("The answer", "-answer = 42\n wait = 0\n+1 +"),
        f_hangs=_patch("The end", WAITING, "\nlimit: 3"),
        g_may_hang=_patch("The end", WAITING, "\nlimit: 3\nhang: yes"),
    )
    assert run.main(["--jobs", "2", "--no-baseline"], tree) == 1
    said = capsys.readouterr().out
    kinds = [line.split() for line in said.splitlines() if line.split()[:1] and line.split()[0] in run.KINDS]
    assert {words[-1]: words[0] for words in kinds} == {
        "a_caught": "caught",
        "b_survived": "survived",
        "c_stale": "stale",
        "d_no_such_test": "broken",
        "e_not_importable": "broken",
        "f_hangs": "broken",
        "g_may_hang": "caught",
    }
    assert said.splitlines()[-1] == "2 caught, 1 survived, 1 stale, 3 broken"
    assert (tree / "kdist/__init__.py").read_text(encoding="utf-8") == "answer = 42\nwait = 0\n"


def test_all_caught_is_success(tmp_path: Path) -> None:
    tree = _tree(tmp_path, right=_patch("The answer", RIGHT, "::test_answer"))
    assert run.main(["--jobs", "1"], tree) == 0


def test_red_tests_say_nothing_about_mutants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = _tree(tmp_path, right=_patch("The answer", RIGHT))
    with open(tree / "tests/one_test.py", "a", encoding="utf-8") as file:
        file.write("\ndef test_red():\n    assert answer == 0\n")
    assert run.main(["--jobs", "1"], tree) == 1
    assert "no mutant was run" in capsys.readouterr().out


def test_only_those_that_are_named(tmp_path: Path) -> None:
    text = _patch("The answer", RIGHT)
    tree = _tree(tmp_path, barrier=text, barrier_late=text, seed=text)
    assert [m.name for m in run.find_mutants(tree)] == ["barrier", "barrier_late", "seed"]
    assert [m.name for m in run.find_mutants(tree, ["barrier"])] == ["barrier"]
    assert [m.name for m in run.find_mutants(tree, ["bar"])] == ["barrier", "barrier_late"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("promise:", "promises:"),
        ("tests: tests/one_test.py", "tests: "),
        ("--- a/", "--- "),
        ("promise: The answer is as it was.", "limit: 3"),
    ],
)
def test_a_head_that_lacks_something_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "wrong.patch"
    path.write_text(_patch("The answer", RIGHT).replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=r"wrong\.patch"):
        run.read_mutant(path)


def test_errors_of_fixtures_do_not_count() -> None:
    assert run.verdict(run.Ended(1, "1 error in 0.1s", 0.1), False) == "broken"
    assert run.verdict(run.Ended(1, "1 failed, 1 error in 0.1s", 0.1), False) == "caught"
    assert run.verdict(run.Ended(1, "10 failed in 0.1s", 0.1), False) == "caught"


def test_what_runs_on_is_ended_with_its_copy(tmp_path: Path) -> None:
    tree = _tree(tmp_path)
    with run.copy_of(tree) as copy:
        run.check_import(copy)
        source = "import time; print('here', flush=True); time.sleep(60)"
        left = subprocess.Popen(
            [sys.executable, "-c", source], env={"PYTHONPATH": str(copy)}, stdout=subprocess.PIPE
        )
        assert left.stdout is not None
        left.stdout.readline()  # before, it is not known by its environment
    with left:
        assert left.wait(10) != 0
    assert not copy.exists()
