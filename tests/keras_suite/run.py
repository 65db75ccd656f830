"""Runs Keras's own tests in the scope of two CPU devices, and lists the tests that pass only without the scope.

    python -m tests.keras_suite.run path/to/keras [--backend jax] [--only trainers] [--quick]

Keras's tests of trainers, callbacks, optimizers (including loss scaling), metrics and saving run against the
installed Keras, on each backend twice in separate processes: without kdist, and in the scope of
`kdist.MirroredStrategy(["cpu:0", "cpu:1"])`. The run fails if a test passes only without kdist and is not in
`known.txt`. With `--quick`, only the tests that fail in the scope also run without kdist. The results of
every test and the output of pytest are in `build/keras_suite`.

With Keras 3.15.1 there are 1,280 tests per backend. Without kdist, 1,198 of them pass on JAX, 1,108 on
PyTorch and 1,216 on TensorFlow. `known.txt` lists the tests that fail only in the scope, with reasons. A run
takes 10, 4 and 10 minutes on 2 busy cores.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.helpers.environment import clean_environment
from tests.keras_suite.comparison import BEGUN, Comparison, Outcome, read_known, read_results, report

BACKENDS = ("jax", "torch", "tensorflow")
FOLDERS = ("trainers", "callbacks", "optimizers", "metrics", "saving", "legacy/saving")
# The time limit of a test in seconds; the slowest test needs about ten seconds on an idle machine.
LIMIT = 300
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Runs the tests and prints the comparison; returns 1 if the scope causes unknown failures."""
    parser = argparse.ArgumentParser(description="Keras's own tests, plainly and in a scope")
    parser.add_argument("repo", type=Path, help="a checkout of Keras, of the version that is installed")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="these backends alone")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="these folders or files of Keras's tests alone"
    )
    parser.add_argument("--quick", action="store_true", help="plainly only what does not pass in the scope")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds a test may take")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "keras_suite", help="emptied, for results"
    )
    options = parser.parse_args()

    tests = _copy_tests(options.repo, options.folder.resolve())
    known = read_known(Path(__file__).with_name("known.txt").read_text(encoding="utf-8"))
    comparisons = []
    for backend in options.backend or BACKENDS:
        scoped = run_tests(f"{backend}-scope", backend, tests, options, "--in-scope")
        passed = {t: Outcome("passed") for t, o in scoped.items() if o.outcome == "passed" and options.quick}
        rest = [f"--but-passed-in={tests.parent / backend}-scope.jsonl"] if options.quick else []
        plain = passed | run_tests(f"{backend}-plain", backend, tests, options, *rest)
        mine = {k.test: k for k in known if k.backend == backend and k.test.startswith(tuple(options.only))}
        comparisons.append(Comparison(backend, plain, scoped, mine))
    print(report(comparisons))
    return 1 if any(comparison.new for comparison in comparisons) else 0


def _copy_tests(repo: Path, folder: Path) -> Path:
    """Copies the test files out of the repository, so that `keras` can only be the installed package."""
    version = importlib.metadata.version("keras")
    shutil.rmtree(folder, ignore_errors=True)
    source, target = folder / "repo", folder / "tests"
    if _version_of(repo) == version:
        source = repo
    elif not _unpack_tag(repo, f"v{version}", source):
        raise SystemExit(
            f"The installed Keras is {version}, and its tests are needed.\n"
            f"Received: KERAS_REPO={repo}, which holds {_version_of(repo) or 'no Keras'} and no tag v{version}.\n"
            f"git clone --depth 1 --branch v{version} https://github.com/keras-team/keras"
        )
    for name in FOLDERS:
        for path in (source / "keras" / "src" / name).rglob("*"):
            if path.name.endswith("_test.py") or "test_data" in path.parts:
                copy = target / path.relative_to(source / "keras" / "src")
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy) if path.is_file() else copy.mkdir(exist_ok=True)
    for name in ("conftest.py", "pyproject.toml"):  # Keras's pytest settings
        shutil.copy(source / name, target / name)
    return target


def _version_of(repo: Path) -> str:
    path = repo / "keras" / "src" / "version.py"
    found = re.search(r'__version__ = "(.+)"', path.read_text(encoding="utf-8")) if path.exists() else None
    return found.group(1) if found else ""


def _unpack_tag(repo: Path, tag: str, target: Path) -> bool:
    """Unpacks a tag of a git repository, bare or not; returns false if there is no such tag."""
    names = [f"keras/src/{name}" for name in FOLDERS]
    command = ["git", "-C", str(repo), "archive", tag, "conftest.py", "pyproject.toml", *names]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode == 0:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(target, filter="data")
    return done.returncode == 0


def run_tests(
    name: str, backend: str, tests: Path, options: argparse.Namespace, *more: str
) -> dict[str, Outcome]:
    """Runs the tests, and starts another process for the rest if a test has ended the process."""
    results, log = tests.parent / f"{name}.jsonl", tests.parent / f"{name}.log"
    command = [sys.executable, "-m", "pytest", "-p", "tests.keras_suite.plugin", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(tests), "-c", str(tests / "pyproject.toml"), "--import-mode=importlib"]
    command += ["--continue-on-collection-errors", f"--results={results}", f"--limit={options.limit}", *more]
    command += [str(tests / only) for only in options.only]
    env = clean_environment() | {
        "KERAS_BACKEND": backend,
        "KERAS_HOME": str(tests.parent / "home"),
        # With PyTorch's compiler, training takes minutes per test. kdist's steps with collectives are eager anyway.
        "TORCHDYNAMO_DISABLE": "1",
    }
    start = time.monotonic()
    while True:
        before = len(read_results(results))
        with log.open("a") as output:
            status = subprocess.run(command, cwd=tests, env=env, stdout=output, stderr=output).returncode
        found = read_results(results)
        died = [test for test, outcome in found.items() if outcome.outcome == BEGUN]
        if len(found) == before or not (died or status == pytest.ExitCode.INTERNAL_ERROR):
            break
        _end(
            results,
            died,
            f"the process ended with status {status}; it ends a test after {options.limit:.0f} s",
        )
    if status not in (0, 1, 5):  # pytest's codes: all passed, some failed, no tests
        raise SystemExit(f"{name}: pytest ended with status {status}; the end of {log}:\n{_tail(log)}")
    print(f"{name}: {len(found)} tests, {(time.monotonic() - start) / 60:.1f} min", flush=True)
    return found


def _end(results: Path, died: list[str], line: str) -> None:
    with results.open("a", encoding="utf-8") as file:
        for test in died:
            file.write(json.dumps({"test": test, "outcome": "died", "line": line, "seconds": 0.0}) + "\n")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


if __name__ == "__main__":
    sys.exit(main())
