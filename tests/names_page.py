"""Lists every public name of `tf.distribute`: `python -m tests.names_page` writes docs/names.md. Needs TensorFlow."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import kdist
from kdist.names import LEFT_OUT
from tests.helpers.environment import ROOT

PAGE = ROOT / "docs" / "names.md"
_HEAD = """\
# tf.distribute compatibility

Look up a name here when you port a script from `tf.distribute`. kdist provides all names with the same arguments,
except the names that are listed as omitted. If you use an omitted name, the error contains the reason. Inherited
members are not repeated. For the steps of a migration, see [From tf.distribute](migrating/tf-distribute.md).
"""


def public(thing: Any) -> list[str]:
    """Returns the public names of a module or a class, sorted."""
    return [name for name in sorted(dir(thing)) if not name.startswith("_")]


def modules(theirs: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yields a module and all public modules in it, each with its name relative to `tf.distribute`."""
    yield where, theirs
    for name in public(theirs):
        if isinstance(inner := getattr(theirs, name), types.ModuleType):
            yield from modules(inner, join(where, name))


def values_of(theirs: Any) -> Iterator[tuple[str, Any]]:
    """Yields the public names of a module and their values, without submodules."""
    for name in public(theirs):
        if not isinstance(native := getattr(theirs, name), types.ModuleType):
            yield name, native


def join(*names: str) -> str:
    """Joins names with dots, for example to `experimental.rpc`, and ignores empty names."""
    return ".".join(filter(None, names))


def own(where: str) -> Any:
    """Returns kdist's module with this name, or `None` if kdist omits it."""
    if where in LEFT_OUT:
        return None
    parent, _, name = where.rpartition(".")
    return getattr(own(parent), name) if name else kdist


def reason_of_member(native: type, member: str) -> str | None:
    """Returns the reason why a class and its subclasses omit a member, or `None`."""
    reasons = (LEFT_OUT.get(f"{base.__name__}.{member}") for base in native.__mro__)
    return next(filter(None, reasons), None)


def write() -> str:
    """Returns the page."""
    import tensorflow as tf

    names = {where: dict(values_of(theirs)) for where, theirs in modules(tf.distribute)}
    classes = {native for inner in names.values() for native in inner.values() if inspect.isclass(native)}
    lines = [_HEAD]
    for where, inner in names.items():
        lines.append(f"## tf.{join('distribute', where)}\n")
        if reason := LEFT_OUT.get(where):
            lines.append(f"Omitted: {', '.join(f'`{name}`' for name in inner)}. {reason}\n")
            continue
        kept: dict[str, list[str]] = {}
        omitted: dict[str, list[str]] = {}
        for name, native in inner.items():
            if reason := LEFT_OUT.get(join(where, name)):
                omitted.setdefault(reason, []).append(name)
                continue
            bases = classes.intersection(native.__mro__[1:]) if native in classes else ()
            inherited = {member for base in bases for member in dir(base)}
            kept[name] = []
            for member in public(native) if inspect.isclass(native) else ():
                if reason := reason_of_member(native, member):
                    if member not in inherited:
                        omitted.setdefault(reason, []).append(f"{name}.{member}")
                elif member not in inherited:
                    kept[name].append(member)
        if whole := [name for name, members in kept.items() if not members]:
            lines.append(f"Provided: {_code(whole)}.\n")
        lines += _table(
            "provided name | members",
            {_code([name]): _code(members) for name, members in kept.items() if members},
        )
        lines += _table("omitted name | reason", {_code(one): reason for reason, one in omitted.items()})
    return "\n".join(lines).rstrip() + "\n"


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: str, rows: dict[str, str]) -> list[str]:
    """Returns the lines of a table with a text per name, and an empty line; without rows, returns an empty list."""
    lines = [f"| {head} |", "| --- | --- |", *(f"| {names} | {about} |" for names, about in rows.items())]
    return [*lines, ""] if rows else []


if __name__ == "__main__":
    PAGE.write_text(write(), encoding="utf-8")
