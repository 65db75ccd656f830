"""The ledger of the tests that `make test` skips: no shard failed, and each shard ran recently."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutation_score, rest, turn

OLD = rest.Entry(10, "abc", True, 1.0)
NEW = rest.Entry(90, "def", True, 1.0)


def test_the_ledger_is_green_and_young() -> None:
    assert rest.overdue(rest.read(), turn.turn()) == []
    assert {*rest.read()} <= {*rest.shards()}, "shards that do not exist any more"


def test_a_failure_and_an_old_result_are_found() -> None:
    failed = rest.Entry(90, "def", False, 1.0)
    assert rest.overdue({"a": OLD, "b": NEW, "c": failed}, 100) == ["c failed"]
    assert rest.overdue({"a": OLD, "b": NEW}, 161) == ["a did not run for 151 commits"]


def test_the_shard_that_waited_longest_comes_first() -> None:
    assert rest.oldest({"a": NEW, "b": OLD}, "abc", 0) == ["c", "b", "a"]
    assert {rest.oldest({}, "abc", now)[0] for now in range(3)} == {"a", "b", "c"}


@pytest.mark.parametrize("number", [1, 3, 8])
def test_the_parts_are_the_whole(number: int) -> None:
    items = [f"{group}-{i}" for group in "qwertzuiop" for i in range(3)]
    parts = [rest.part_of(items, f"{i}/{number}", lambda item: item[0]) for i in range(1, number + 1)]
    assert sorted(item for part in parts for item in part) == sorted(items)
    assert all({*item[0]} <= {i[0] for i in part} for part in parts for item in part)
    grown = rest.part_of(["one more", *items], f"1/{number}", lambda item: item[0])
    assert [item for item in grown if item in items] == parts[0]
    with pytest.raises(ValueError, match="9/8"):
        rest.part_of(items, "9/8")


def test_three_turns_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for commits in (100, 101, 102):
        monkeypatch.setattr(rest.turn, "turn", lambda commits=commits: commits)
        found += [rest.third_of(f"{i}/4") for i in range(1, 5)]
    assert sorted(found) == sorted(f"{i}/12" for i in range(1, 13))


def test_a_python_version_that_is_missing_is_a_failure() -> None:
    others = {name: command for name, command in rest.shards().items() if "nox" in command}
    assert {"versions Python 3.12", "versions Python 3.13"} <= {*others}
    assert all("--error-on-missing-interpreters" in command for command in others.values())


@pytest.mark.kills("score_of_a_module_without_files")
@pytest.mark.parametrize("package", rest.PACKAGES)
def test_a_mutation_score_is_about_one_package(package: str) -> None:
    assert mutation_score.files_of(package)
    assert all(name.startswith(f"kdist/{package}") for name in mutation_score.files_of(package))
    assert mutation_score.tests_of(package)


def test_a_mutation_score_of_no_package_is_an_error() -> None:
    with pytest.raises(ValueError, match="no package or module 'gone'"):
        mutation_score.files_of("gone")


def test_a_run_is_written_down_and_its_failure_is_printed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = "print('survived  a'); print('caught  b'); raise SystemExit(3)"
    monkeypatch.setattr(rest, "LEDGER", tmp_path / "ledger.json")
    monkeypatch.setattr(rest, "shards", lambda: {"good": ("-c", "print('fine')"), "bad": ("-c", failing)})
    rest.write({"good": OLD})
    monkeypatch.setattr("sys.argv", ["rest", "bad", "good"])
    assert rest.main() == 1
    assert capsys.readouterr().out.endswith("\n──── The last lines of bad, which failed ────\nsurvived  a\n")
    found = rest.read()
    assert (found["good"].passed, found["bad"].passed) == (True, False)
    assert found["good"].commits == found["bad"].commits == turn.turn()
