"""Writes docs/reference/benchmarks.md from the docstrings of the benchmarks."""

from __future__ import annotations

import ast

from tests.helpers.layers import ROOT

_HEAD = """\
# Benchmark scripts

Run these benchmarks when you change kdist and want to know its overhead. To measure your own model, use
[`kdist bench`](command-line.md#kdist-bench). The benchmarks compare kdist with native code for the same backend, mostly
in alternating rounds in the same processes, and print ratios. `make bench` runs all of them.

Results on CPUs are published for [steps](../benchmarks.md), [input pipelines](../input.md#reading-ahead),
[sharding](../sharding.md) and [parameter servers](../parameter-servers.md#figures), but not for `step_time`,
`loop_time` and `checkpoint_speed`.
"""


def write() -> str:
    """Returns the page."""
    lines = [_HEAD]
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if about:
            lines.append(f"## {path.stem}\n\n{about}\n")
    return "\n".join(lines).rstrip() + "\n"
