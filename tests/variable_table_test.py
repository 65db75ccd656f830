"""A `VariableTable` deletes an entry with its variable, and never returns it for a different variable."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from kdist.backends import variable_table
from kdist.backends.variable_table import VariableTable


class Variable:
    """A fake of a Keras variable: it compares by value and is not hashable."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return [True, False]


def test_an_entry_goes_with_its_variable():
    table: VariableTable[str] = VariableTable()
    first, second = Variable(), Variable()
    table[first], table[second] = "first", "second"
    table[first] = "changed"
    assert (table.get(first), table.get(second), len(table)) == ("changed", "second", 2)
    del first
    gc.collect()
    assert len(table) == 1
    ((variable, value),) = table.items()
    assert variable is second
    assert value == "second"
    table.pop(second)
    table.pop(second)
    assert table.get(second) is None


@pytest.mark.kills("variable_of_an_old_id_known")
def test_an_id_that_is_used_again_finds_nothing(monkeypatch: pytest.MonkeyPatch):
    # All variables have the same id. The end of the first variable must not delete the entry of the second.
    monkeypatch.setattr(variable_table, "id", lambda variable: 7, raising=False)
    table: VariableTable[str] = VariableTable()
    first, second = Variable(), Variable()
    table[first] = "first"
    assert table.get(second) is None
    table[second] = "second"
    assert table.get(first) is None
    del first
    gc.collect()
    assert table.get(second) == "second"


def test_the_table_itself_may_go_first():
    table: VariableTable[str] = VariableTable()
    variable = Variable()
    table[variable] = "value"
    del table
    gc.collect()
    del variable
