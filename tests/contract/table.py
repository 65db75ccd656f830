"""Writes the support table of the contract's page from the results of the contract's test module.

Run it as `python -m tests.contract.table RESULTS PAGE`. `make table` runs the tests and this module.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from tests.contract.case import CASES, Case
from tests.contract.configuration import CONFIGURATIONS

BEGIN = "<!-- support table: written by `make table`, do not edit -->"
END = "<!-- end of the support table -->"
_BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}


_GROUPS = {
    "data": "Data and `fit`",
    "losses": "Losses",
    "optimizers": "Optimizers and precision",
    "layers": "Layers",
    "models": "Models",
    "metrics": "Metrics",
    "callbacks": "Callbacks",
    "transformers": "Transformers and embeddings",
    "ecosystem": "Fine-tuning",
}


def table(results: dict[str, str]) -> str:
    """Returns the lists and tables in Markdown.

    Args:
        results: Maps "backend-configuration-case" to "passed" or "failed", as the test module writes them.

    Returns: A list of the cases that passed in all configurations, and one row for each other case. A cell
        counts the configurations whose results matched one device.
    """
    numbers = {b: sum(b in c.backends for c in CONFIGURATIONS.values()) for b in _BACKENDS}
    everywhere = {
        case.name: all(_cell(case, b, results) == f"✓ {n}/{n}" for b, n in numbers.items())
        for case in CASES.values()
    }
    counts = [f"{n} on {_BACKENDS[b]}" for b, n in numbers.items()]
    all_of_them = f"{', '.join(counts[:-1])} and {counts[-1]}"
    lines = [f"In all configurations ({all_of_them}), results match one device for:", ""]
    for group, name in _GROUPS.items():
        titles = [case.title for case in CASES.values() if case.group == group and everywhere[case.name]]
        if titles:
            lines += textwrap.wrap(f"- **{name}:** {'; '.join(titles)}", 120, subsequent_indent="  ")
    head = " | ".join(_BACKENDS.values())
    notes: list[str] = []
    lines += ["", "Other features:", "", f"| feature | {head} |"]
    lines.append("| --- |" + " :-: |" * len(_BACKENDS))
    lines += [_row(case, results, notes) for case in CASES.values() if not everywhere[case.name]]
    lines += [
        "",
        "✓ m/n: all tested configurations passed, m of the n configurations of the backend. ✗: at least one failed.",
        "",
        f"| configuration | {head} |",
        "| --- |" + " :-: |" * len(_BACKENDS),
    ]
    for configuration in CONFIGURATIONS.values():
        marks = ["✓" if b in configuration.backends else "–" for b in _BACKENDS]
        title = _with_notes(configuration.title, [configuration.why_not_all], notes)
        lines.append(f"| {title} | {' | '.join(marks)} |")
    lines.append("")
    lines += [f"- {_raised(number)} {_sentence(note)}" for number, note in enumerate(notes, start=1)]
    return "\n".join(lines)


def _raised(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _row(case: Case, results: dict[str, str], notes: list[str]) -> str:
    title = _with_notes(case.title, [case.why_not_all, *_exceptions(case)], notes)
    return f"| {title} | " + " | ".join(_cell(case, backend, results) for backend in _BACKENDS) + " |"


def _with_notes(title: str, reasons: list[str], notes: list[str]) -> str:
    reasons = [reason for reason in reasons if reason]
    notes += [reason for reason in reasons if reason not in notes]
    return " ".join([title, *(_raised(notes.index(reason) + 1) for reason in reasons)])


def _exceptions(case: Case) -> list[str]:
    """Returns the reasons why some configurations do not run a case, with their titles and backends."""
    found: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for configuration in CONFIGURATIONS.values():
        for one in configuration.without:
            if one.case == case.name:
                found.setdefault((one.backends, one.why), []).append(configuration.title)
    return [
        f"not under {' and '.join(title.partition(',')[0] for title in titles)}"
        f"{'' if len(backends) == len(_BACKENDS) else f' on {_and(backends)}'}: {why}"
        for (backends, why), titles in found.items()
    ]


def _and(backends: tuple[str, ...]) -> str:
    return " and ".join(_BACKENDS[backend] for backend in backends)


def _cell(case: Case, backend: str, results: dict[str, str]) -> str:
    if backend not in case.backends:
        return "–"
    names = [c.name for c in CONFIGURATIONS.values() if backend in c.backends]
    outcomes = [results.get(f"{backend}-{name}-{case.name}") for name in names]
    if not any(outcomes):
        return "not run"
    passed = outcomes.count("passed")
    mark = "✓" if passed == len(names) - outcomes.count(None) else "✗"
    return f"{mark} {passed}/{len(names)}"


def replace_table(text: str, results: dict[str, str]) -> str:
    """Returns a document whose part between the markers is the new table."""
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"The document must contain the markers {BEGIN!r} and {END!r}.")
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def main(arguments: list[str]) -> None:
    """Reads the results and rewrites the document."""
    results, document = map(Path, arguments)
    text = replace_table(
        document.read_text(encoding="utf-8"), json.loads(results.read_text(encoding="utf-8"))
    )
    document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
