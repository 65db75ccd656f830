"""Breaks kdist on purpose, one small patch at a time, and says which breaks the tests do not notice.

    python tests/mutants/run.py [NAME OR PART OF IT …] [-k PART] [--part I/N] [--jobs 2] [--list] [--no-baseline]

A mutant is a file `tests/mutants/NAME.patch`: lines of a head, then a unified diff of `kdist/`:

    promise: The gradients of all replicas are summed once.
    tests: tests/fit_multi_process_test.py::test_it[torch]

`promise` says in one sentence what is broken; `tests` are the arguments of pytest which must turn red, as few and as
cheap as will do, all of them part of `make test`. `limit: 60` gives them so many seconds instead of 300, and
`hang: yes` says that running out of time is what the break leads to, and counts as noticed.

Each patch is applied to a copy of the tree, where its tests run. Before that, all these tests must be green on a copy
without a patch. Exit code 0: every mutant was caught.
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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path("tests/mutants")
LIMIT = 300.0
BASELINE_LIMIT = 3600.0
_FIELDS = ("promise", "tests", "limit", "hang")
_LAST_LINES = 25

CAUGHT, SURVIVED, STALE, BROKEN = KINDS = ("caught", "survived", "stale", "broken")


@dataclass(frozen=True)
class Mutant:
    """A broken promise.

    Args:
        path: Of the patch.
        promise: What is broken.
        tests: The arguments of pytest.
        limit: Seconds that the tests may take.
        may_hang: Whether running out of time means that the break was noticed.
    """

    path: Path
    promise: str
    tests: tuple[str, ...]
    limit: float = LIMIT
    may_hang: bool = False

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem


@dataclass(frozen=True)
class Ended:
    """How a run of pytest ended.

    Args:
        code: The exit code; `None` if the time ran out.
        output: What it printed.
        seconds: How long it took.
    """

    code: int | None
    output: str
    seconds: float


def read_mutant(path: Path) -> Mutant:
    """Reads the head of a patch.

    Raises:
        ValueError: It lacks something, or has what is not known.
    """
    head, _, diff = path.read_text(encoding="utf-8").partition("\n--- a/")
    if not diff:
        raise ValueError(f"{path.name}: there is no diff of the form --- a/kdist/…")
    fields: dict[str, str] = {}
    for line in head.splitlines():
        if not line or line.startswith(("diff --git ", "index ")):
            continue
        name, colon, value = line.partition(": ")
        if not colon or name not in _FIELDS or name in fields:
            raise ValueError(f"{path.name}: the head has one line each of {', '.join(_FIELDS)}; not {line!r}")
        fields[name] = value.strip()
    if not (fields.get("promise") and fields.get("tests")):
        raise ValueError(f"{path.name}: the head must say promise: and tests:")
    return Mutant(
        path,
        fields["promise"],
        tuple(shlex.split(fields["tests"])),
        float(fields.get("limit", LIMIT)),
        fields.get("hang", "no") == "yes",
    )


def find_mutants(root: Path, wanted: Sequence[str] = ()) -> list[Mutant]:
    """Returns the mutants of a tree; of those wanted, each of which is a name or a part of one."""
    found = [read_mutant(path) for path in sorted((root / PATCHES).glob("*.patch"))]
    whole = {mutant.name for mutant in found}
    return [
        m for m in found if not wanted or any(w == m.name or (w not in whole and w in m.name) for w in wanted)
    ]


def files_of(root: Path) -> Iterator[Path]:
    """Yields the files of a tree that git knows or would take, relative to it; all, where there is no git."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    if listed.returncode == 0:
        names = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        names = [path.relative_to(root) for path in root.rglob("*") if "__pycache__" not in path.parts]
    # An environment may be a link to a folder.
    return (name for name in names if (root / name).is_file() and not (root / name).is_symlink())


@contextlib.contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """Gives a copy of a tree, for as long as it is needed; ends what was started from there and runs on."""
    with tempfile.TemporaryDirectory(prefix="kdist-mutant-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder).resolve() / "tree"
        names = list(files_of(root))
        for name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
        for folder in {name.parent for name in names if name.suffix == ".py"}:
            # What Python has compiled already; of a file that a patch changes it takes no notice.
            compiled = root / folder / "__pycache__"
            if compiled.is_dir():
                shutil.copytree(compiled, copy / folder / "__pycache__", dirs_exist_ok=True)
        try:
            yield copy
        finally:
            for pid in _started_from(copy):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def apply(patch: Path, tree: Path, check: bool = False) -> str | None:
    """Applies a patch to a tree; returns why it cannot be applied, if so.

    Args:
        patch: The file.
        tree: The folder.
        check: Whether to look only, and to change nothing.
    """
    # Inside a repository, git would take the paths of the patch as that repository's.
    environ = _environment() | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", *(["--check"] if check else []), str(patch)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, env=environ)
    return None if done.returncode == 0 else done.stderr.strip() or f"git ended with {done.returncode}"


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
            process.send_signal(signal.SIGINT)  # it ends its workers then
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        return Ended(code, output.read(), time.monotonic() - start)


def verdict(ended: Ended, may_hang: bool) -> str:
    """Says what a run of a mutant's tests means."""
    if ended.code is None:
        return CAUGHT if may_hang else BROKEN
    if ended.code == 1 and re.search(r"\b[1-9][0-9]* failed\b", ended.output):
        return CAUGHT
    # Errors of fixtures, and tests that could not be found or imported, say nothing about the promise.
    return SURVIVED if ended.code == 0 else BROKEN


def run_mutant(root: Path, mutant: Mutant) -> tuple[str, Ended]:
    """Runs a mutant's tests in a copy with its patch."""
    with copy_of(root) as copy:
        problem = apply(mutant.path, copy)
        if problem is not None:
            return STALE, Ended(None, problem, 0.0)
        ended = run_tests(copy, ["-x", *mutant.tests], mutant.limit)
        return verdict(ended, mutant.may_hang), ended


def baseline(root: Path, mutants: Iterable[Mutant], jobs: int) -> Iterator[Ended]:
    """Runs the tests of all mutants on a copy without a patch; yields the ends of runs that were not green."""
    runs: dict[str, set[str]] = {}
    for mutant in mutants:
        has_options = any(word.startswith("-") for word in mutant.tests)
        # Options would choose among the other tests, too.
        key = shlex.join(mutant.tests) if has_options else ""
        runs.setdefault(key, set()).update(mutant.tests)
    with copy_of(root) as copy:
        check_import(copy)
        for key, tests in runs.items():
            parallel = ["-n", str(jobs), "--dist", "loadgroup"] if jobs > 1 and not key else []
            ended = run_tests(copy, [*parallel, *(shlex.split(key) or sorted(tests))], BASELINE_LIMIT)
            if ended.code != 0:
                yield ended


def check_import(copy: Path) -> None:
    """Raises unless Python finds the copy's kdist, and not one that is installed."""
    environ = _environment() | {"PYTHONPATH": str(copy)}
    command = [sys.executable, "-c", "import kdist; print(kdist.__file__)"]
    said = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, check=False)
    if Path(said.stdout.strip()) != copy / "kdist" / "__init__.py":
        raise SystemExit(f"The copy's kdist would not run, but {said.stdout}{said.stderr}")


def _environment() -> dict[str, str]:
    """This process's environment without what describes a backend, a cluster or a repository."""
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
    parser.add_argument("names", nargs="*", help="mutants, or parts of their names")
    parser.add_argument("-k", dest="part", help="those with this in their name")
    parser.add_argument("--part", dest="part_of", metavar="I/N", help="only this part of them, such as 2/8")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once (default 2)")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests without a patch first"
    )
    options = parser.parse_args(arguments)
    mutants = find_mutants(root, [*options.names, *([options.part] if options.part else [])])
    if options.part_of:
        index, number = map(int, options.part_of.split("/"))
        mutants = mutants[index - 1 :: number]
    if options.list or not mutants:
        for mutant in mutants:
            print(f"{mutant.name:40} {mutant.promise}")
        return 0 if mutants else 2
    if not options.no_baseline:
        print("Without a patch …", flush=True)
        for ended in baseline(root, mutants, options.jobs):
            print(f"{_last(ended)}\nThe tests must be green before anything is broken: no mutant was run.")
            return 1
    return _report(root, mutants, options.jobs)


def _report(root: Path, mutants: Sequence[Mutant], jobs: int) -> int:
    counts = dict.fromkeys(KINDS, 0)
    with ThreadPoolExecutor(jobs) as pool:
        runs = [(mutant, pool.submit(run_mutant, root, mutant)) for mutant in mutants]
        for mutant, run in runs:
            result, ended = run.result()
            counts[result] += 1
            print(f"{result:9}{ended.seconds:6.1f} s  {mutant.name}", flush=True)
            if result != CAUGHT:
                print(f"  {mutant.promise}\n  {shlex.join(mutant.tests)}\n{_last(ended)}", flush=True)
    print(", ".join(f"{number} {result}" for result, number in counts.items()))
    return 0 if counts[CAUGHT] == len(mutants) else 1


def _last(ended: Ended) -> str:
    return "\n".join(f"    {line}" for line in ended.output.splitlines()[-_LAST_LINES:])


if __name__ == "__main__":
    sys.exit(main())
