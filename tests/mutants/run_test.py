"""The mutants apply to this tree and have tests, and the harness distinguishes the results of their runs."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mutants import data, kills, run

TESTS = """
import time
import pytest
from kdist import answer, wait

@pytest.mark.kills("a_caught", "c_stale", "e_not_importable")
def test_answer():
    assert answer == 42

@pytest.mark.kills("b_survived", "f_hangs", "g_may_hang")
def test_other():
    time.sleep(wait)

@pytest.mark.full
@pytest.mark.kills(h_of_one_item="[right]", i_of_no_item="[left]", j_of_two_items=("[right]", "[wrong]"))
@pytest.mark.parametrize("expected", [42, 0], ids=["right", "wrong"])
def test_full(expected):
    assert answer == expected
"""
CONFTEST = """
pytest_plugins = ("tests.mutants.kills",)

def pytest_configure(config):
    config.addinivalue_line("markers", "full: left out")
"""
INI = "[tool.pytest.ini_options]\npython_files = ['*_test.py']\npythonpath = ['.']\ntestpaths = ['tests']\n"
INI += "addopts = '--strict-markers --import-mode=importlib -p no:kdist'\n"


def _entry(promise: str, old: str, new: str, more: str = "") -> str:
    return f'promise = "{promise}"\nfile = "kdist/__init__.py"\nold = "{old}"\nnew = "{new}"\n{more}\n'


WRONG = _entry("The answer is right.", "answer = 42", "answer = 41")
WAITING = _entry("The test ends.", "wait = 0", "wait = 60", "limit = 3")


def _tree(folder: Path, tests: str = TESTS, **entries: str) -> Path:
    for name, text in {
        "pyproject.toml": INI,
        "kdist/__init__.py": "answer = 42\nwait = 0\n",
        "tests/conftest.py": CONFTEST,
        "tests/one_test.py": tests,
        "tests/mutants/top.toml": "".join(f"[{name}]\n{entry}" for name, entry in entries.items()),
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copy(kills.__file__, folder / "tests/mutants/kills.py")
    return folder


# The mutants of kdist --------------------------------------------------------------------------------------------


def test_every_mutant_applies_to_this_tree() -> None:
    mutants, stale = data.read(run.ROOT), []
    assert len(mutants) >= 390
    for mutant in mutants:
        try:
            for file, text in data.changed(mutant, run.ROOT).items():
                if file.suffix == ".py":
                    ast.parse(text)
        except (ValueError, SyntaxError) as error:
            stale.append(f"{mutant.name}: {error}")
    assert not stale, "Adapt these mutants to the present code:\n" + "\n".join(stale)


def test_every_mutant_has_a_test_and_every_mark_a_mutant() -> None:
    mutants = {mutant.name for mutant in data.read(run.ROOT)}
    marks = kills.find(run.ROOT)
    assert mutants - {kill.mutant for kill in marks} == set(), "mutants without a test"
    assert [kill for kill in marks if kill.mutant not in mutants] == [], "marks without a mutant"


def test_every_text_of_a_mark_is_in_the_name_of_an_item(pytestconfig: pytest.Config) -> None:
    found = pytestconfig.stash.get(kills.UNMATCHED, None)
    if found is None:
        pytest.skip("pytest has not collected the whole suite")
    assert found == []


# The harness -----------------------------------------------------------------------------------------------------


@pytest.mark.kills("survivors_are_no_failure")
def test_each_result_has_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = _tree(
        tmp_path,
        a_caught=WRONG,
        b_survived=WRONG,
        c_stale=WRONG.replace("42", "43"),
        d_of_no_test=WRONG,
        e_not_importable=WRONG.replace("41", "1 +"),
        f_hangs=WAITING,
        g_may_hang=WAITING + "hang = true\n",
        h_of_one_item=WRONG,
        i_of_no_item=WRONG,
    )
    assert run.main(["--jobs", "2", "--no-baseline"], tree) == 1
    said = capsys.readouterr().out
    kinds = [line.split() for line in said.splitlines() if line.split()[:1] and line.split()[0] in run.KINDS]
    assert {words[-1]: words[0] for words in kinds} == {
        "a_caught": "caught",
        "b_survived": "survived",
        "c_stale": "stale",
        "d_of_no_test": "broken",
        "e_not_importable": "broken",
        "f_hangs": "broken",
        "g_may_hang": "caught",
        "h_of_one_item": "caught",
        "i_of_no_item": "broken",
    }
    assert said.splitlines()[-1] == "3 caught, 1 survived, 1 stale, 4 broken"
    assert (tree / "kdist/__init__.py").read_text(encoding="utf-8") == "answer = 42\nwait = 0\n"


def test_the_baseline_runs_the_tests_of_all_mutants_and_no_others(tmp_path: Path) -> None:
    # `test_full[wrong]` would fail.
    assert run.main(["--jobs", "1"], _tree(tmp_path, a_caught=WRONG, h_of_one_item=WRONG)) == 0


def test_no_mutant_runs_if_a_test_fails_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = _tree(tmp_path, a_caught=WRONG, j_of_two_items=WRONG)
    assert run.main(["--jobs", "1"], tree) == 1
    assert "No mutant ran" in capsys.readouterr().out


def test_names_and_parts_of_names_select_mutants(tmp_path: Path) -> None:
    tree = _tree(tmp_path, barrier=WRONG, barrier_late=WRONG, seed=WRONG)
    assert [m.name for m in run.find_mutants(tree)] == ["barrier", "barrier_late", "seed"]
    assert [m.name for m in run.find_mutants(tree, ["barrier"])] == ["barrier"]
    assert [m.name for m in run.find_mutants(tree, ["bar"])] == ["barrier", "barrier_late"]


def test_changed_files_select_mutants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = WRONG.replace("__init__", "other").replace("answer = 42", "x = 1")
    tests = "import pytest\n\n@pytest.mark.kills({})\ndef test_it(): ...\n"
    tree = _tree(tmp_path, tests.format('"a", "b"'), a=WRONG, b=other, c=other)
    (tree / "kdist/other.py").write_text("x = 1\n", encoding="utf-8")
    (tree / "tests/two_test.py").write_text(tests.format('"c"'), encoding="utf-8")

    def selected(*arguments: str) -> list[str]:
        assert run.main(["--list", "--changed", *arguments], tree) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines() if "The answer" in line]

    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], cwd=tree, check=True, timeout=20)
    subprocess.run([*git, "commit", "-qm", "y", "--allow-empty"], cwd=tree, check=True, timeout=20)
    assert selected() == []
    with open(tree / "tests/two_test.py", "a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert selected() == ["c"]
    subprocess.run([*git, "commit", "-qam", "z"], cwd=tree, check=True, timeout=20)
    (tree / "kdist/other.py").write_text("x = 1  # changed\n", encoding="utf-8")
    assert selected("HEAD") == ["b", "c"]
    (tree / "kdist/other.py").write_text("x = 1\n", encoding="utf-8")
    assert selected("HEAD") == []
    assert selected() == ["c"]
    (tree / "tests/new_test.py").write_text(tests.format('"a"'), encoding="utf-8")
    assert selected("HEAD") == ["a"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("promise", None),
        ("promise", "The answer"),
        ("old", None),
        ("old", ""),
        ("old", "x = 2"),
        ("limit", "3"),
        ("hang", 1),
        ("tests", "tests/one_test.py"),
        ("also", [{"file": "kdist/a.py", "old": "x"}]),
    ],
)
def test_an_entry_with_a_mistake_is_an_error(key: str, value: Any) -> None:
    entry = {"promise": "It works.", "file": "kdist/a.py", "old": "x = 1", "new": "x = 2"}
    assert data.parse("name", entry).promise == "It works."
    with pytest.raises(ValueError, match="name: "):
        data.parse("name", {k: v for k, v in (entry | {key: value}).items() if v is not None})


def test_an_entry_belongs_in_the_file_of_its_package(tmp_path: Path) -> None:
    tree = _tree(tmp_path, name=WRONG.replace("__init__", "backends/torch/core"))
    with pytest.raises(ValueError, match=r"name: belongs in backends_torch\.toml"):
        data.read(tree)


def test_several_changes_apply_together_and_old_is_unique(tmp_path: Path) -> None:
    tree = _tree(tmp_path)
    entry = {"promise": "It works.", "file": "kdist/__init__.py", "old": "42", "new": "41"}
    also = {"file": "kdist/__init__.py", "old": "wait = 0\n", "new": "wait = 1\nmore = 2\n"}
    data.apply(data.parse("name", entry | {"also": [also]}), tree)
    assert (tree / "kdist/__init__.py").read_text(encoding="utf-8") == "answer = 41\nwait = 1\nmore = 2\n"
    with pytest.raises(ValueError, match="occurs 2 times"):
        data.apply(data.parse("name", entry | {"old": "w"}), tree)


def test_a_mark_contains_literal_strings(tmp_path: Path) -> None:
    tree = _tree(tmp_path, "import pytest\n\n@pytest.mark.kills(NAME)\ndef test_it(): ...\n")
    with pytest.raises(ValueError, match=r"one_test\.py:3"):
        kills.find(tree)


def test_syntax_trees_and_items_give_the_same_marks(tmp_path: Path) -> None:
    texts = {kill.mutant: kill.texts for kill in kills.find(_tree(tmp_path))}
    assert texts["a_caught"] == ("",)
    assert texts["h_of_one_item"] == ("[right]",)
    assert texts["j_of_two_items"] == ("[right]", "[wrong]")


def test_texts_that_no_item_contains_are_found() -> None:
    mark = pytest.mark.kills("a", b="[torch]", c=("[torch]", "[jax]"), d="[jax]").mark
    items: list[Any] = [
        SimpleNamespace(
            name=f"test_it[{name}]", nodeid=f"x_test.py::test_it[{name}]", iter_markers=lambda _: [mark]
        )
        for name in ("torch", "tensorflow")
    ]
    assert kills.unmatched(items) == ["x_test.py::test_it: c='[jax]'", "x_test.py::test_it: d='[jax]'"]


def test_errors_of_fixtures_do_not_count() -> None:
    assert run.verdict(run.Ended(1, "1 error in 0.1s", 0.1), False) == "broken"
    assert run.verdict(run.Ended(1, "1 failed, 1 error in 0.1s", 0.1), False) == "caught"
    assert run.verdict(run.Ended(1, "10 failed in 0.1s", 0.1), False) == "caught"


def test_processes_from_a_copy_end_with_it(tmp_path: Path) -> None:
    tree = _tree(tmp_path)
    with run.copy_of(tree) as copy:
        run.check_import(copy)
        source = "import time; print('here', flush=True); time.sleep(60)"
        left = subprocess.Popen(
            [sys.executable, "-c", source], env={"PYTHONPATH": str(copy)}, stdout=subprocess.PIPE
        )
        assert left.stdout is not None
        left.stdout.readline()  # now its environment identifies it
    with left:
        assert left.wait(10) != 0
    assert not copy.exists()


def test_an_archive_is_copied_without_its_environment(tmp_path: Path) -> None:
    for name in ("kdist/x.py", ".ci/run", ".venv/bin/python", "kdist/__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(map(str, run.files_of(tmp_path))) == [".ci/run", "kdist/x.py"]


@pytest.mark.kills("mutants_run_with_compiled_tests_of_the_original")
def test_a_copy_has_no_tests_that_name_the_original(tmp_path: Path) -> None:
    tree = _tree(tmp_path)
    compiled = tree / "kdist" / "__pycache__"
    compiled.mkdir(exist_ok=True)
    for name in ("x.cpython-311.pyc", "x_test.cpython-311-pytest-9.1.1.pyc"):
        (compiled / name).touch()
    with run.copy_of(tree) as copy:
        found = {path.name for path in (copy / "kdist" / "__pycache__").iterdir()}
    assert "x.cpython-311.pyc" in found
    assert not any("pytest" in name for name in found)
