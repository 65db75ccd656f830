"""The tests that `make test` leaves out, in shards of some twelve minutes, and the ledger of their last results.

    python -m tests.rest [SHARD …] [--count N] [--again] [--list]

runs the named shards, or the N shards that have waited longest (default: 1), and writes each result to
`tests/ledger.json`: the number of commits at that time, the revision, the result and the seconds. Age is counted in
commits and never in days, so that a clone of an old commit passes years later.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
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
# Packages with tests that start no processes; see mutation_score.py.
PACKAGES = ("cluster", "tracing", "checkpoint", "coordinator", "launch", "doctor", "measuring", "parity")
MOST_LOST = 0.02
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """The last run of a shard.

    Args:
        commits: The number of commits of the tree that was tested.
        revision: The commit, shortened.
        passed: Whether all tests of the shard passed.
        seconds: The duration of the run.
        score: Of a mutation shard, the share of changes that the tests noticed.
    """

    commits: int
    revision: str
    passed: bool
    seconds: float
    score: float | None = None


def shards() -> dict[str, tuple[str, ...]]:
    """Returns each shard's arguments for Python."""
    nox = ("-m", "nox", "--session")
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
    """Returns a third of a part of the tests, another third in the next turn: with own processes, they take long."""
    index, number = map(int, part.split("/"))
    return f"{index + number * (turn.turn() % 3)}/{3 * number}"


def part_of(items: Sequence[T], part: str, key: Callable[[T], str] = str) -> list[T]:
    """Returns the items of part "2/8": an eighth of all possible keys, so that items of one key stay together.

    A new item does not move others to another part, so that results of parts stay valid.

    Raises:
        ValueError: `part` is not of this form.
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
    """Returns the names, the shard that waited longest first; among equals, the turn decides."""
    listed = sorted(names)
    return sorted(
        listed,
        key=lambda name: (
            entries[name].commits if name in entries else -1,
            (listed.index(name) - now) % len(listed),
        ),
    )


def overdue(entries: Mapping[str, Entry], now: int) -> list[str]:
    """Returns what is wrong with the ledger: shards that failed, or that did not run for too many commits."""
    failed = [f"{name} failed" for name, entry in entries.items() if not entry.passed]
    return failed + [
        f"{name} did not run for {now - entry.commits} commits"
        for name, entry in entries.items()
        if now - entry.commits > MOST_COMMITS
    ]


def run(name: str, before: Entry | None = None) -> Entry:
    """Runs a shard; a mutation score may be lower than before by `MOST_LOST`."""
    revision = ["git", "rev-parse", "--short=12", "HEAD"]
    said = subprocess.run(revision, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    command = [sys.executable, *shards()[name]]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "score"
        if name.startswith(SCORED):
            least = (before.score or 0.0) - MOST_LOST if before else 0.0
            command += ["--to", str(file), "--least", str(least)]
        done = subprocess.run(command, cwd=ROOT, check=False)
        score = float(file.read_text()) if file.exists() else None
    return Entry(turn.turn(), said, done.returncode == 0, round(time.monotonic() - start, 1), score)


def main() -> int:
    """Runs the command line; 1 if a shard fails."""
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
    results = []
    for name in options.shards or waiting[: options.count]:
        print(f"──── {name} ────", flush=True)
        entry = run(name, read().get(name))
        results.append(entry)
        write(read() | {name: entry})
        print(
            f"──── {name}: {'passed' if entry.passed else 'FAILED'} in {entry.seconds:.0f} s ────", flush=True
        )
    return 0 if all(entry.passed for entry in results) else 1


if __name__ == "__main__":
    sys.exit(main())
