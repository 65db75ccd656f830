"""Measures the mutation score of a package: the share of small automatic changes that its single-process tests detect.

    python -m tests.mutation_score PACKAGE [--least 0.8] [--to FILE] [--jobs 2]

mutmut (https://mutmut.readthedocs.io) makes the changes in a copy of the tree. Only packages that do not need a
framework have such tests. `tests/mutants/` contains changes that are written by hand, for promises in the docs.

mutmut numbers the changes of each function. A large package has thousands, which would take hours, so that only the
changes with some last digits run: `rest.PACKAGES`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.environment import ROOT
from tests.mutants.run import copy_of
from tests.rest import PACKAGES

_CONFIGURATION = """

[tool.mutmut]
source_paths = ["kdist"]
only_mutate = {files}
also_copy = {copied}
timeout_multiplier = 5.0
pytest_add_cli_args = ["-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = {tests}
"""


def tests_of(package: str) -> list[str]:
    """Returns the test files of a package that do not start processes."""
    found = (ROOT / "tests" / package).rglob("*_test.py")
    return sorted(str(path.relative_to(ROOT)) for path in found if "multi_process" not in path.name)


def files_of(package: str) -> list[str]:
    """Returns the files of a package, or the one file of a module.

    Raises:
        ValueError: kdist does not have this package. Without files, mutmut would change all of kdist.
    """
    found = [ROOT / "kdist" / f"{package}.py", *(ROOT / "kdist" / package).rglob("*.py")]
    if files := sorted(str(path.relative_to(ROOT)) for path in found if path.exists()):
        return files
    raise ValueError(f"kdist has no package or module {package!r}")


def configuration(package: str, tree: Path) -> str:
    """Returns the settings of mutmut for a package, to append to pyproject.toml."""
    copied = sorted(path.name for path in tree.iterdir() if path.name not in ("kdist", "tests"))
    return _CONFIGURATION.format(
        files=json.dumps(files_of(package)), copied=json.dumps(copied), tests=json.dumps(tests_of(package))
    )


def measure(package: str, jobs: int) -> dict[str, int]:
    """Runs mutmut on a package; returns the number of changes per result."""
    with copy_of(ROOT) as tree:
        with open(tree / "pyproject.toml", "a", encoding="utf-8") as file:
            file.write(configuration(package, tree))
        environ = dict(os.environ)
        environ.pop("PYTHONPATH", None)  # the tests must import the changed copy, not this tree
        sample = f"*__mutmut_*[{PACKAGES[package]}]"
        for command in (["run", "--max-children", str(jobs), sample], ["export-cicd-stats"]):
            # mutmut draws its progress several times per second, which would fill a log.
            done = subprocess.run(
                [sys.executable, "-m", "mutmut", *command],
                cwd=tree,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            if done.returncode:
                raise SystemExit(done.stdout.decode("utf-8", "replace")[-5000:])
        results: dict[str, int] = json.loads((tree / "mutants" / "mutmut-cicd-stats.json").read_text())
        return results


def main() -> int:
    """Runs the command line; returns 1 if the score is too low."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", choices=PACKAGES, help="package of kdist")
    parser.add_argument("--least", type=float, default=0.0, help="lowest score that passes (default: 0)")
    parser.add_argument("--to", type=Path, help="file for the score (default: none)")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes (default: 2)")
    options = parser.parse_args()
    results = measure(options.package, options.jobs)
    noticed = results["killed"] + results["timeout"] + results["segfault"]
    run = noticed + results["survived"] + results["no_tests"] + results["suspicious"]
    score = round(noticed / max(1, run), 3)
    print(
        f"\n{options.package}: the tests detect {noticed} of {run} changes, of {results['total']}: {score:.1%}"
    )
    if options.to:
        options.to.write_text(str(score), encoding="utf-8")
    return 0 if score >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
