"""Options and reports of the whole test suite."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

CONTRACT = "contract_multi_process_test.py"


# A shell lets what it starts in the background ignore Ctrl-C, and all processes started from there inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--contract-results", default=None, help="write the result of each contract cell to this file"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    results = dict(sorted(_contract_results(terminalreporter)))
    if not results:
        return
    terminalreporter.section("global-batch contract: numbers equal to one device's")
    for line in _matrix(results):
        terminalreporter.write_line(line)
    path = config.getoption("--contract-results")
    if path:
        Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _contract_results(reporter: pytest.TerminalReporter) -> Iterator[tuple[str, str]]:
    for outcome in ("passed", "failed", "error"):
        for report in reporter.stats.get(outcome, []):
            path, _, name = report.nodeid.partition("::test_numbers_are_those_of_one_device[")
            if name and path.endswith(CONTRACT):
                yield name.partition("@")[0].rstrip("]"), outcome


def _matrix(results: dict[str, str]) -> list[str]:
    columns: dict[tuple[str, str], dict[str, str]] = {}
    from tests.contract_cells import CELLS

    for cell in CELLS:
        if str(cell) in results:
            columns.setdefault((cell.backend, cell.configuration), {})[cell.case] = results[str(cell)]
    cases = list(dict.fromkeys(cell.case for cell in CELLS if any(cell.case in c for c in columns.values())))
    lines = [f"{'':34}" + " ".join(f"{backend[:5]:>7}" for backend, _ in columns)]
    lines.append(f"{'':34}" + " ".join(f"{name[-7:]:>7}" for _, name in columns))
    marks = {"passed": "ok", "failed": "FAIL", "error": "ERROR", "": "–"}
    for case in cases:
        lines.append(
            f"{case:34}" + " ".join(f"{marks[column.get(case, '')]:>7}" for column in columns.values())
        )
    return lines
