"""The support table of the contract's page, made from the results of the contract's test module.

Run it as `python -m tests.contract.table RESULTS PAGE`; `make table` does both steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.contract.case import CASES, Case
from tests.contract.configuration import CONFIGURATIONS

BEGIN = "<!-- support table: written by `make table`, do not edit -->"
END = "<!-- end of the support table -->"
_BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}


def table(results: dict[str, str]) -> str:
    """Returns the table in Markdown.

    Args:
        results: "backend-configuration-case" to "passed" or "failed", as the test module wrote them.

    Returns:
        One row a case and one column a backend. A cell counts the strategies under which the numbers were
        those of one device.
    """
    head = [
        "| under every strategy, the numbers of one device with | " + " | ".join(_BACKENDS.values()) + " |"
    ]
    head.append("| --- |" + " :-: |" * len(_BACKENDS))
    notes: list[str] = []
    rows = [_row(case, results, notes) for case in CASES.values()]
    configurations = CONFIGURATIONS.values()
    tested = "; ".join(c.title + ("" if len(c.backends) == 3 else "\\*") for c in configurations)
    lines = [*head, *rows, "", f"✓ m/n: all that were run passed, m of the n strategies: {tested}.", ""]
    for backends, why in dict.fromkeys((c.backends, c.why_not_all) for c in configurations):
        if why:
            titles = "; ".join(
                c.title for c in configurations if (c.backends, c.why_not_all) == (backends, why)
            )
            lines.append(
                f"- \\* {titles}: {' and '.join(_BACKENDS[b] for b in backends)} only. {_sentence(why)}"
            )
    lines += [f"- {number} {_sentence(note)}" for number, note in zip("¹²³⁴⁵⁶⁷⁸⁹", notes, strict=False)]
    return "\n".join(lines)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _row(case: Case, results: dict[str, str], notes: list[str]) -> str:
    title = case.title
    if case.why_not_all:
        if case.why_not_all not in notes:
            notes.append(case.why_not_all)
        title += " " + "¹²³⁴⁵⁶⁷⁸⁹"[notes.index(case.why_not_all)]
    return f"| {title} | " + " | ".join(_cell(case, backend, results) for backend in _BACKENDS) + " |"


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
    """Returns a document with the part between the markers replaced by the table."""
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
