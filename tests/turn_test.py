"""The mark `in_turn(number)`: each turn runs a part of the items of a test, and `number` turns run all items."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests import turn


@dataclass(frozen=True)
class Item:
    nodeid: str
    marks: dict[str, Any] = field(default_factory=dict)

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, mark: Any) -> None:
        self.marks[mark.name] = mark.mark


def items(path: str) -> Any:
    every_third = pytest.mark.in_turn(3).mark
    tests = [Item(f"{path}::test_each[{name}]", {"in_turn": every_third}) for name in "abcdef"]
    tests += [Item(f"{path}::test_other[{name}]", {"in_turn": every_third}) for name in "abc"]
    tests += [Item(f"{path}::test_alone", {"in_turn": every_third}), Item(f"{path}::test_always")]
    left_out = Item(f"{path}::test_each[g]", {"in_turn": every_third, "full": pytest.mark.full.mark})
    return [left_out, *tests]


def chosen(path: str, monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    monkeypatch.setattr(turn, "turn", lambda: number)
    made = items(path)
    turn.leave_out(made)
    return [item.nodeid.partition("::")[2] for item in made if not item.get_closest_marker("full")]


@pytest.mark.parametrize("path", ["tests/a_test.py", "tests/b_test.py", "tests/c_test.py"])
def test_three_turns_run_every_item_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [chosen(path, monkeypatch, number) for number in (7, 8, 9)]
    assert all("test_always" in names for names in turns)
    once = sorted(name for names in turns for name in names if name != "test_always")
    assert once == [
        "test_alone",
        *(f"test_each[{n}]" for n in "abcdef"),
        *(f"test_other[{n}]" for n in "abc"),
    ]


def test_the_tests_of_a_module_use_the_same_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        names = chosen("tests/a_test.py", monkeypatch, number)
        first = {name.partition("[")[2][:1] for name in names if name.startswith("test_other")}
        assert len(first) == 1
        assert {name.partition("[")[2][:1] for name in names if name.startswith("test_each")} >= first
