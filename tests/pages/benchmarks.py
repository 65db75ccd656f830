"""docs/reference/benchmarks.md: what each benchmark measures, as its file says."""

from __future__ import annotations

import ast

from tests.house import ROOT

_HEAD = """\
# Benchmarks

They are for those who change kdist: each compares with what one would write by hand for the engine, in the same
processes, and prints ratios. `make bench` runs them. Figures are on their pages: [input](../input.md#reading-ahead),
[divided variables](../sharding.md), [parameter servers](../parameter-servers.md#figures).
"""


def write() -> str:
    """Returns the page."""
    lines = [_HEAD]
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if about:
            lines.append(f"## {path.stem}\n\n{about}\n")
    return "\n".join(lines).rstrip() + "\n"
