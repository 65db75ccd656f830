"""kdist's names and arguments are compatible with `tf.distribute` of the installed TensorFlow."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from kdist.names import LEFT_OUT
from tests import names_page
from tests.helpers.processes import run
from tests.names_page import join, modules, own, public, reason_of_member, values_of

# Users do not create these objects directly, but through subclasses of `Strategy` and through coordinators.
MADE_INSIDE = {
    *("Strategy", "StrategyExtended"),
    *("coordinator.PerWorkerValue", "experimental.coordinator.PerWorkerValues"),
}


def arguments(function: Any) -> list[str]:
    kept = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    return [p.name for p in kept if p.name != "self"]


def compare(name: str, native: Any, ours: Any) -> Iterator[str]:
    wanted, have = arguments(native), arguments(ours)
    if have[: len(wanted)] != wanted:
        yield f"{name}: {wanted} and here {have}"


def compare_class(name: str, native: type, ours: type) -> Iterator[str]:
    is_enum = hasattr(native, "__members__")
    if name not in MADE_INSIDE and not is_enum:
        yield from compare(name, native, ours)
    for member in {*public(native), *getattr(native, "__members__", ())}:
        if hasattr(ours, member) == bool(reason_of_member(native, member)):
            yield f"{name}.{member}: it is either there or left out"
        elif hasattr(ours, member) and inspect.isfunction(getattr(native, member)):
            yield from compare(f"{name}.{member}", getattr(native, member), getattr(ours, member))


def differences() -> list[str]:
    """Returns the differences between `tf.distribute` and kdist. Needs TensorFlow."""
    import tensorflow as tf

    found, known = [], set()
    for where, theirs in modules(tf.distribute):
        ours = own(where)
        for name, native in values_of(theirs):
            full = join(where, name)
            known |= {full, where, *(f"{full}.{member}" for member in public(native))}
            if (ours is None or full in LEFT_OUT) == hasattr(ours, name):
                found.append(f"{full}: it is either there or left out")
            elif inspect.isclass(native) and hasattr(ours, name):
                found += compare_class(full, native, getattr(ours, name))
            elif hasattr(ours, name):
                found += compare(full, native, getattr(ours, name))
    return found + [
        f"{name}: left out, and not there in TensorFlow" for name in LEFT_OUT if name not in known
    ]


@pytest.mark.kills("names_listed_as_left_out")
def test_names_and_arguments_are_those_of_tensorflow() -> None:
    (found,) = run("tensorflow", 1, differences)
    assert not found, "\n".join(found)


def test_the_page_of_names_is_that_of_the_installed_tensorflow() -> None:
    (page,) = run("tensorflow", 1, names_page.write)
    written = names_page.PAGE.read_text(encoding="utf-8")
    assert written == page, "Write it anew: python -m tests.names_page"
