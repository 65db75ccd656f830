"""Breaks one guarantee of kdist at a time, and reports the breaks (mutants) that no test notices.

    python -m tests.mutants.run [NAME OR PART OF IT …] [-k PART] [--changed [REVISION]] [--part I/N] [--jobs 2] [--list]

`tests/mutants/*.toml` contain the mutants (see `data.py`). Tests name them with `@pytest.mark.kills` (see
`kills.py`). Each mutant runs `pytest -x --kills NAME` in a copy of the tree. Before that, all these tests
must pass in a copy without a change. Exit code 0: with each mutant, a test failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import data, kills
from tests.mutants.data import Mutant
from tests.rest import part_of

ROOT = Path(__file__).resolve().parents[2]
BASELINE_LIMIT = 3600.0
_LAST_LINES = 25

CAUGHT, SURVIVED, STALE, BROKEN = KINDS = ("caught", "survived", "stale", "broken")


@dataclass(frozen=True)
class Ended:
    """How a run of pytest ended.

    Args:
        code: The exit code; `None` if it exceeded its limit.
        output: Its output.
        seconds: Its duration.
    """

    code: int | None
    output: str
    seconds: float


def find_mutants(root: Path, wanted: Sequence[str] = ()) -> list[Mutant]:
    """Returns the mutants of a tree: all, or only the mutants with one of these names or parts of names."""
    found = data.read(root)
    whole = {mutant.name for mutant in found}
    return [
        m for m in found if not wanted or any(w == m.name or (w not in whole and w in m.name) for w in wanted)
    ]


def killing_files(root: Path) -> dict[str, set[Path]]:
    """Returns the test files that name each mutant."""
    found: dict[str, set[Path]] = {}
    for kill in kills.find(root):
        found.setdefault(kill.mutant, set()).add(kill.file)
    return found


def changed_since(root: Path, revision: str) -> set[Path]:
    """Returns the files that differ between a revision and the working tree."""
    commands = (
        ("diff", "--name-only", "--no-renames", "-z", revision, "--"),
        ("ls-files", "--others", "--exclude-standard", "-z"),
    )
    files: set[Path] = set()
    for command in commands:
        listed = subprocess.run(
            ["git", "-C", str(root), *command],
            capture_output=True,
            text=True,
            check=False,
            env=_environment(),
        )
        if listed.returncode:
            raise SystemExit(listed.stderr.strip())
        files |= {Path(name) for name in listed.stdout.split("\0") if name}
    return files


def files_of(root: Path) -> Iterator[Path]:
    """Yields the files of a tree that git tracks or would track, relative to it; without git, all files."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    if listed.returncode == 0:
        names = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        # Environments and caches, which git ignores, begin with a dot. An environment has gigabytes.
        kept = (".ci", ".github", ".gitignore")
        tops = [path for path in root.iterdir() if path.name in kept or not path.name.startswith(".")]
        found = [path for top in tops for path in (top, *top.rglob("*"))]
        names = [path.relative_to(root) for path in found if "__pycache__" not in path.parts]
    # An environment may be a link to a directory.
    return (name for name in names if (root / name).is_file() and not (root / name).is_symlink())


@contextlib.contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """Provides a temporary copy of a tree; at the end, terminates the processes that started there."""
    with tempfile.TemporaryDirectory(prefix="kdist-mutant-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder).resolve() / "tree"
        names = list(files_of(root))
        for name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
        for folder in {name.parent for name in names if name.suffix == ".py"}:
            # Compiled files save time; Python ignores them for files that a mutant changes. The files of pytest
            # contain the path of the original, so that tests that look for their own file would not find it.
            compiled, ignored = root / folder / "__pycache__", shutil.ignore_patterns("*-pytest-*")
            if compiled.is_dir():
                shutil.copytree(compiled, copy / folder / "__pycache__", dirs_exist_ok=True, ignore=ignored)
        try:
            yield copy
        finally:
            for pid in _started_from(copy):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def arguments_for(names: Sequence[str], files: Mapping[str, set[Path]]) -> list[str]:
    """Returns the arguments of pytest that select the tests of some mutants."""
    options = [word for name in names for word in ("--kills", name)]
    return [*options, *sorted({str(file) for name in names for file in files.get(name, ())})]


def run_tests(tree: Path, arguments: Sequence[str], limit: float) -> Ended:
    """Runs pytest in a copy."""
    environ = _environment() | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *arguments]
    start = time.monotonic()
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        code: int | None = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then terminates its workers
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        return Ended(code, output.read(), time.monotonic() - start)


def verdict(ended: Ended, may_hang: bool) -> str:
    """Returns the meaning of a run of a mutant's tests."""
    if ended.code is None:
        return CAUGHT if may_hang else BROKEN
    if ended.code == 1 and re.search(r"\b[1-9][0-9]* failed\b", ended.output):
        return CAUGHT
    # Errors of fixtures, and tests that pytest cannot find or import, prove nothing.
    return SURVIVED if ended.code == 0 else BROKEN


def run_mutant(root: Path, mutant: Mutant, files: Mapping[str, set[Path]]) -> tuple[str, Ended]:
    """Runs a mutant's tests in a copy with its changes."""
    if mutant.name not in files:
        return BROKEN, Ended(None, "No test names this mutant in its mark `kills`.", 0.0)
    with copy_of(root) as copy:
        try:
            data.apply(mutant, copy)
        except ValueError as error:
            return STALE, Ended(None, str(error), 0.0)
        ended = run_tests(copy, ["-x", *arguments_for([mutant.name], files)], mutant.limit)
        return verdict(ended, mutant.may_hang), ended


def baseline(root: Path, mutants: Sequence[Mutant], files: Mapping[str, set[Path]], jobs: int) -> Ended:
    """Runs the tests of all mutants in a copy without a change."""
    parallel = ["-n", str(jobs), "--dist", "loadgroup"] if jobs > 1 else []
    with copy_of(root) as copy:
        check_import(copy)
        arguments = arguments_for([mutant.name for mutant in mutants], files)
        return run_tests(copy, [*parallel, *arguments], BASELINE_LIMIT)


def check_import(copy: Path) -> None:
    """Raises an error unless Python imports kdist from the copy."""
    environ = _environment() | {"PYTHONPATH": str(copy)}
    command = [sys.executable, "-c", "import kdist; print(kdist.__file__)"]
    said = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, check=False)
    if Path(said.stdout.strip()) != copy / "kdist" / "__init__.py":
        raise SystemExit(f"Python must import kdist from the copy. Received: {said.stdout}{said.stderr}")


def _environment() -> dict[str, str]:
    """Returns this process's environment without variables for a backend, a cluster or a repository."""
    dropped = ("KERAS_BACKEND", "TF_CONFIG", "GIT_", "PYTEST_", "KDIST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"TF_CPP_MIN_LOG_LEVEL": "2"}


def _started_from(copy: Path) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if os.fsencode(str(copy)) in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                yield int(entry.parent.name)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="mutants, or parts of their names (default: all)")
    parser.add_argument("-k", dest="part", help="mutants with this text in their names")
    parser.add_argument(
        "--changed",
        nargs="?",
        const="HEAD~1",
        metavar="REVISION",
        help="only mutants whose source file or test file differs from this revision (default: HEAD~1)",
    )
    parser.add_argument("--part", dest="part_of", metavar="I/N", help="only this part of them, such as 2/8")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests without a change first"
    )
    options = parser.parse_args(arguments)
    mutants = find_mutants(root, [*options.names, *([options.part] if options.part else [])])
    files = killing_files(root)
    if options.changed:
        differ = changed_since(root, options.changed)
        mutants = [m for m in mutants if differ & ({c.file for c in m.changes} | files.get(m.name, set()))]
    if options.part_of:
        mutants = part_of(mutants, options.part_of, lambda mutant: mutant.name)
    if options.list or not mutants:
        for mutant in mutants:
            print(f"{mutant.name:40} {mutant.promise}")
        if not mutants:
            print("No mutant is selected.")
        return 0 if mutants or options.changed else 2
    if not options.no_baseline:
        print("Without a change …", flush=True)
        ended = baseline(root, mutants, files, options.jobs)
        if ended.code != 0:
            print(f"{ended.output}\nThe tests must pass without a change. No mutant ran.")
            return 1
    return _report(root, mutants, files, options.jobs)


def _report(root: Path, mutants: Sequence[Mutant], files: Mapping[str, set[Path]], jobs: int) -> int:
    counts = dict.fromkeys(KINDS, 0)
    with ThreadPoolExecutor(jobs) as pool:
        runs = [(mutant, pool.submit(run_mutant, root, mutant, files)) for mutant in mutants]
        for mutant, run in runs:
            result, ended = run.result()
            counts[result] += 1
            print(f"{result:9}{ended.seconds:6.1f} s  {mutant.name}", flush=True)
            if result != CAUGHT:
                command = shlex.join(["pytest", *arguments_for([mutant.name], files)])
                print(f"  {mutant.promise}\n  {command}\n{_last(ended)}", flush=True)
    print(", ".join(f"{number} {result}" for result, number in counts.items()))
    return 0 if counts[CAUGHT] == len(mutants) else 1


def _last(ended: Ended) -> str:
    return "\n".join(f"    {line}" for line in ended.output.splitlines()[-_LAST_LINES:])


if __name__ == "__main__":
    sys.exit(main())
