"""Summaries at the end of a test run: the matrix of the contract, the fault matrix, and the slowest modules."""

from __future__ import annotations

import collections
import importlib.metadata
import itertools
import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract_cells import CELLS

_CONTRACT = "contract_multi_process_test.py"
_MARKS = {"passed": "ok", "failed": "FAIL", "error": "ERROR", "": "–"}
# The short names of backends. Strategies also have short names, for example m-2 for mirrored-2.
_SHORT = {"tensorflow": "tf", "jax": "jax", "torch": "torch"}


def print_contract(reporter: pytest.TerminalReporter, path: str | None) -> None:
    """Prints the contract's cells, with one column per backend and strategy.

    Args:
        reporter: The terminal reporter of pytest.
        path: The file to which the results are also written, if any.
    """
    results = dict(sorted(_contract_results(reporter)))
    if not results:
        return
    reporter.section("global-batch contract: numbers equal to one device's")
    for line in _contract_lines(results):
        reporter.write_line(line)
    if path:
        Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _contract_results(reporter: pytest.TerminalReporter) -> Iterator[tuple[str, str]]:
    for outcome in ("passed", "failed", "error"):
        for report in reporter.stats.get(outcome, []):
            path, _, name = report.nodeid.partition("::test_numbers_are_those_of_one_device[")
            if name and path.endswith(_CONTRACT):
                yield name.partition("@")[0].rstrip("]"), outcome


def _contract_lines(results: dict[str, str]) -> Iterator[str]:
    columns: dict[tuple[str, str], dict[str, str]] = {}
    for cell in CELLS:
        if str(cell) in results:
            columns.setdefault((cell.backend, cell.configuration), {})[cell.case] = results[str(cell)]
    yield f"{'':34}" + " ".join(f"{_SHORT[backend]:>7}" for backend, _ in columns)
    yield f"{'':34}" + " ".join(f"{name[0] + name[name.index('-') :]:>7}" for _, name in columns)
    for case in dict.fromkeys(cell.case for cell in CELLS if any(cell.case in c for c in columns.values())):
        yield f"{case:34}" + " ".join(f"{_MARKS[c.get(case, '')]:>7}" for c in columns.values())


def print_faults(reporter: pytest.TerminalReporter) -> None:
    """Prints the seconds from each fault to the end of the last worker, and ↺ if the job restarted."""
    cells = _recorded(reporter, "fault matrix")
    if not cells:
        return
    places = sorted({place for _, place, _ in cells})
    reporter.section("fault matrix: seconds until the last worker has ended; ↺: and started again")
    reporter.write_line(f"{'':38}" + "".join(f"{place:>13}" for place in places))
    for row in sorted({row for row, _, _ in cells}):
        found = {place: result for other, place, result in cells if other == row}
        reporter.write_line(f"{row:38}" + "".join(f"{found.get(place, ''):>13}" for place in places))


def print_modules(reporter: pytest.TerminalReporter, number: int = 20) -> None:
    """Prints the slowest modules, and their share of the total time of all tests."""
    seconds: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for report in itertools.chain(*reporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            module = report.nodeid.partition("::")[0]
            seconds[module] += report.duration
            counts[module] += report.when == "call"
    whole = sum(seconds.values())
    if whole < 60:
        return
    reporter.section(f"slowest modules of {whole:.0f} s in all processes")
    for module, spent in seconds.most_common(number):
        reporter.write_line(f"{spent:6.0f} s {spent / whole:4.0%} {counts[module]:4} tests  {module}")


def write_support(reporter: pytest.TerminalReporter, path: str | None) -> None:
    """Writes the supported features of each strategy on each backend to a file, if `path` is set."""
    if path:
        results = dict(sorted(_recorded(reporter, "support")))
        Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _recorded(reporter: pytest.TerminalReporter, wanted: str) -> list[Any]:
    """Returns the values that the tests have recorded under a name."""
    return [
        value
        for reports in reporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == wanted and report.when == "call"
    ]


def write_gpus(reporter: pytest.TerminalReporter, path: str | None) -> None:
    """Writes a page about the tests that ran on GPUs: the devices, the versions, and the result of each test.

    Args:
        reporter: The terminal reporter of pytest.
        path: The file; `None` for no page.
    """
    if path is None:
        return
    lines = ["# kdist on GPUs", "", "## Devices", "", "```text", _output_of("nvidia-smi", "-L"), "```", ""]
    lines += [
        "## Versions",
        "",
        "| package | version |",
        "| --- | --- |",
        f"| python | {platform.python_version()} |",
    ]
    commit = _output_of("git", "rev-parse", "--short", "HEAD")
    lines += [f"| kdist | {importlib.metadata.version('kdist')}, commit {commit} |"]
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[
        0
    ]
    lines += [f"| NVIDIA driver | {driver} |"]
    for distribution in sorted(importlib.metadata.distributions(), key=lambda d: d.name):
        if distribution.name.startswith(("keras", "jax", "tensorflow", "torch", "nvidia-", "numpy")):
            lines.append(f"| {distribution.name} | {distribution.version} |")
    lines += ["", "## Tests", "", "| test | result | seconds |", "| --- | --- | --- |"]
    failures = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in reporter.stats.get(outcome, []):
            name = report.nodeid.rpartition("::")[2].partition("@")[0]
            reason = f": {report.longrepr[2].removeprefix('Skipped: ')}" if outcome == "skipped" else ""
            lines.append(f"| {name} | {outcome}{reason} | {report.duration:.1f} |")
            if outcome in ("failed", "error"):
                failures += ["", f"### {name}", "", "```text", *report.longreprtext.splitlines()[-60:], "```"]
    Path(path).write_text("\n".join([*lines, *failures, ""]), encoding="utf-8")
    reporter.write_line(f"written: {path}")


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"none: {error}"
