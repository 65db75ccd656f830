"""`VariableTable`: maps live variables to values."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import keras

Value = TypeVar("Value")


class VariableTable(Generic[Value]):
    """A dictionary with Keras variables as keys, which it does not keep alive.

    Variables cannot be keys of a `dict`, because `==` compares elements. This class compares identities. An
    entry disappears with its variable, and a later variable with the same `id` does not find it.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[keras.Variable], Value]] = {}

    def __setitem__(self, variable: keras.Variable, value: Value) -> None:
        key = id(variable)
        known = self._entries.get(key)
        if known is not None and known[0]() is variable:
            ref = known[0]
        else:
            ref = weakref.ref(variable, functools.partial(_forget, self._entries, key))
        self._entries[key] = ref, value

    def get(self, variable: keras.Variable) -> Value | None:
        ref, value = self._entries.get(id(variable), (None, None))
        return value if ref is not None and ref() is variable else None

    def pop(self, variable: keras.Variable) -> None:
        self._entries.pop(id(variable), None)

    def items(self) -> Iterator[tuple[keras.Variable, Value]]:
        """Yields the live variables and their values. The table can change during the iteration."""
        for ref, value in list(self._entries.values()):
            if (variable := ref()) is not None:
                yield variable, value

    def __len__(self) -> int:
        return len(self._entries)


def _forget(
    entries: dict[int, tuple[weakref.ref[keras.Variable], Value]], key: int, ref: weakref.ref[keras.Variable]
) -> None:
    if key in entries and entries[key][0] is ref:
        del entries[key]
