"""Runs the tests that `make test` skips, in shards of about twelve minutes, and records the results in a ledger.

    python -m tests.rest [SHARD …] [--count N] [--again] [--list]

This runs the given shards, or the N shards that have waited longest (default: 1). It writes each result to
`tests/ledger.json`: the number of commits in the history, the revision, the result and the seconds. The age of a
result is counted in commits, not in days, so that a clone of an old commit passes years later.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from tests import turn
from tests.helpers.environment import ROOT
from tests.versions import ENVIRONMENTS

LEDGER = ROOT / "tests" / "ledger.json"
MOST_COMMITS = 150
LAST_LINES = 60
PYTEST = (
    "-m",
    "pytest",
    "-n",
    "3",
    "--dist",
    "loadgroup",
    "--no-loadscope-reorder",
    "-q",
    "-p",
    "no:cacheprovider",
)
COMING = "coming Keras"
SCORED = "mutation score of"
# Packages with tests that do not start processes, and a sample: the last digits of the changes; see mutation_score.py.
PACKAGES = {
    "cluster": "3",
    "tracing": "0123456789",
    "checkpoint": "3",
    "coordinator": "3",
    "launch": "3",
    "doctor": "3",
    "measuring": "3",
    "parity": "0123456789",
}
MOST_LOST = 0.02
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """The last run of a shard.

    Args:
        commits: The number of commits in the history of the tested tree.
        revision: The abbreviated hash of the commit.
        passed: Whether all tests of the shard passed.
        seconds: The duration of the run.
        score: For a mutation shard, the share of changes that the tests detected.
    """

    commits: int
    revision: str
    passed: bool
    seconds: float
    score: float | None = None


def shards() -> dict[str, tuple[str, ...]]:
    """Returns the arguments for Python of each shard."""
    # Otherwise, nox skips the session, and the ledger would show a result of no test.
    nox = ("-m", "nox", "--error-on-missing-interpreters", "--session")
    sliced = {
        "full": (10, lambda part: (*PYTEST, "--full", "--rest", "--part", part)),
        "no forks": (4, lambda part: (*PYTEST, "--no-forks", "--part", third_of(part))),
        "mutants": (8, lambda part: ("-m", "tests.mutants.run", "--part", part)),
        COMING: (
            4,
            lambda part: (*nox, f"contract-{COMING.replace(' ', '-')}", "--", "--full", "--part", part),
        ),
    }
    found = {
        f"{name} {i}/{number}": command(f"{i}/{number}")
        for name, (number, command) in sliced.items()
        for i in range(1, number + 1)
    }
    others = [environment.name for environment in ENVIRONMENTS if environment.name != COMING]
    found |= {f"versions {name}": (*nox, "contract-" + name.replace(" ", "-")) for name in others}
    return found | {f"{SCORED} {name}": ("-m", "tests.mutation_score", name) for name in PACKAGES}


def third_of(part: str) -> str:
    """Returns a third of a part, and a different third in the next turn, because tests without forks are slow."""
    index, number = map(int, part.split("/"))
    return f"{index + number * (turn.turn() % 3)}/{3 * number}"


def part_of(items: Sequence[T], part: str, key: Callable[[T], str] = str) -> list[T]:
    """Returns the items of a part such as "2/8": an eighth of all possible keys. Items with one key stay together.

    New items do not move other items to a different part, so the results of parts remain valid.

    Raises:
        ValueError: `part` does not have this form.
    """
    index, number = map(int, part.split("/"))
    if not 1 <= index <= number:
        raise ValueError(f"{part!r} is not a part such as 2/8")
    return [item for item in items if zlib.crc32(key(item).encode()) % number == index - 1]


def read() -> dict[str, Entry]:
    """Returns the ledger."""
    return {name: Entry(**entry) for name, entry in json.loads(LEDGER.read_text(encoding="utf-8")).items()}


def write(entries: Mapping[str, Entry]) -> None:
    """Writes the ledger."""
    text = json.dumps({name: asdict(entry) for name, entry in sorted(entries.items())}, indent=1)
    LEDGER.write_text(text + "\n", encoding="utf-8")


def oldest(entries: Mapping[str, Entry], names: Iterable[str], now: int) -> list[str]:
    """Returns the names of shards, starting with the longest wait. The turn decides between equal waits."""
    listed = sorted(names)
    return sorted(
        listed,
        key=lambda name: (
            entries[name].commits if name in entries else -1,
            (listed.index(name) - now) % len(listed),
        ),
    )


def overdue(entries: Mapping[str, Entry], now: int) -> list[str]:
    """Returns the problems in the ledger: shards that failed, or that did not run for too many commits."""
    failed = [f"{name} failed" for name, entry in entries.items() if not entry.passed]
    return failed + [
        f"{name} did not run for {now - entry.commits} commits"
        for name, entry in entries.items()
        if now - entry.commits > MOST_COMMITS
    ]


def run(name: str, before: Entry | None = None) -> tuple[Entry, list[str]]:
    """Runs a shard; returns its entry and its last lines.

    A mutation score may be lower than before by at most `MOST_LOST`.
    """
    revision = ["git", "rev-parse", "--short=12", "HEAD"]
    said = subprocess.run(revision, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    command = [sys.executable, *shards()[name]]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "score"
        if name.startswith(SCORED):
            least = (before.score or 0.0) - MOST_LOST if before else 0.0
            command += ["--to", str(file), "--least", str(least)]
        code, kept = print_and_keep(command)
        score = float(file.read_text()) if file.exists() else None
    return Entry(turn.turn(), said, code == 0, round(time.monotonic() - start, 1), score), kept


def print_and_keep(command: Sequence[str]) -> tuple[int, list[str]]:
    """Runs a command and prints its output; returns its exit code and its last lines, without caught mutants."""
    kept: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )

    def copy_lines() -> None:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if not line.startswith("caught "):
                kept.append(line.rstrip())

    # A process that a test leaves running can keep the pipe open, so this does not wait for its end.
    copying = threading.Thread(target=copy_lines, daemon=True)
    copying.start()
    process.wait()
    copying.join(10.0)
    return process.returncode, [*kept]


def main() -> int:
    """Runs the command line; returns 1 if a shard fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shards", nargs="*", metavar="SHARD", help="shards to run, for example 'full 2/10'")
    parser.add_argument("--count", type=int, default=1, help="number of shards to run (default: 1)")
    parser.add_argument(
        "--list", action="store_true", help="print the shards, the oldest first, and run nothing"
    )
    parser.add_argument(
        "--again", action="store_true", help="choose only from shards that have run before, as CI does"
    )
    options = parser.parse_args()
    known = shards()
    if unknown := [name for name in options.shards if name not in known]:
        parser.error(f"these shards do not exist: {unknown}. Choose from: {', '.join(known)}")
    waiting = oldest(read(), {*known} & {*read()} if options.again else known, turn.turn())
    if options.list:
        for name in waiting:
            print(f"{name:24}", read().get(name, "never run"))
        return 0
    failures = {}
    for name in options.shards or waiting[: options.count]:
        print(f"──── {name} ────", flush=True)
        entry, kept = run(name, read().get(name))
        write(read() | {name: entry})
        print(
            f"──── {name}: {'passed' if entry.passed else 'FAILED'} in {entry.seconds:.0f} s ────", flush=True
        )
        if not entry.passed:
            failures[name] = kept
    # Other shards ran in between, and a report of CI often contains only the end of its output.
    for name, kept in failures.items():
        print(f"──── The last lines of {name}, which failed ────", *kept, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
