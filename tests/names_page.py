"""Every public name of `tf.distribute`: `python -m tests.names_page` writes docs/names.md, where TensorFlow is."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import kdist
from kdist.names import LEFT_OUT
from tests.environment import ROOT

PAGE = ROOT / "docs" / "names.md"
_HEAD = """\
# Names of tf.distribute

Every public name of `tf.distribute`, module by module: it is in kdist under the same name, with the same arguments, or
it is left out, with the reason, which the error of a name that is missing says, too. A class is listed with the members
that the class which it is made from does not have. A test compares this page with TensorFlow and kdist as installed.
"""


def public(thing: Any) -> list[str]:
    """The public names of a module or a class, sorted."""
    return [name for name in sorted(dir(thing)) if not name.startswith("_")]


def modules(theirs: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """`tf.distribute` and all public modules in it, each with its name there."""
    yield where, theirs
    for name in public(theirs):
        if isinstance(inner := getattr(theirs, name), types.ModuleType):
            yield from modules(inner, join(where, name))


def values_of(theirs: Any) -> Iterator[tuple[str, Any]]:
    """The public names of a module, but for modules, and what they are."""
    for name in public(theirs):
        if not isinstance(native := getattr(theirs, name), types.ModuleType):
            yield name, native


def join(*names: str) -> str:
    """`experimental.rpc`, say."""
    return ".".join(filter(None, names))


def own(where: str) -> Any:
    """The module of kdist of that name; `None` if it is left out."""
    if where in LEFT_OUT:
        return None
    parent, _, name = where.rpartition(".")
    return getattr(own(parent), name) if name else kdist


def reason_of_member(native: type, member: str) -> str | None:
    """Why a member is left out of a class and of those that are made from it."""
    reasons = (LEFT_OUT.get(f"{base.__name__}.{member}") for base in native.__mro__)
    return next(filter(None, reasons), None)


def _rows(name: str, native: Any, inherited: set[str]) -> Iterator[str]:
    """The table's row of a name, and those of the members that are left out."""
    here = [m for m in public(native) if inspect.isclass(native) and m not in inherited]
    kept = [f"`{m}`" for m in here if not reason_of_member(native, m)]
    yield " ".join(["|", f"`{name}`", "|", "yes", "|", *[", ".join(kept)] * bool(kept), "|"])
    for member in here:
        if reason := reason_of_member(native, member):
            yield f"| `{name}.{member}` | left out | {reason} |"


def write() -> str:
    """Returns the page."""
    import tensorflow as tf

    names = {where: dict(values_of(theirs)) for where, theirs in modules(tf.distribute)}
    classes = {native for inner in names.values() for native in inner.values() if inspect.isclass(native)}
    lines = [_HEAD]
    for where, inner in names.items():
        lines.append(f"## tf.{join('distribute', where)}\n")
        if reason := LEFT_OUT.get(where):
            lines.append(f"Left out: {', '.join(f'`{name}`' for name in inner)}. {reason}\n")
            continue
        lines += ["| name | in kdist | members, or why not |", "| --- | --- | --- |"]
        for name, native in inner.items():
            if reason := LEFT_OUT.get(join(where, name)):
                lines.append(f"| `{name}` | left out | {reason} |")
            else:
                bases = classes.intersection(native.__mro__[1:]) if native in classes else ()
                lines += _rows(name, native, {member for base in bases for member in dir(base)})
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(write(), encoding="utf-8")
