"""Fuzzing of all parsers of kdist with 5,000 changed inputs; with `--full`, also 100,000 new inputs per turn.

Parsers may only raise errors of kdist. They must not need more than a few seconds or much memory. They must not open
files elsewhere, unpickle, or start processes. A failure prints its seed: `target.make(Random(seed))` returns its input.
"""

from __future__ import annotations

import time
import traceback
from random import Random

import pytest

from tests.helpers.processes import run
from tests.turn import turn


def in_worker_fuzz(folder, inputs, seed, only=None):
    """Feeds the parsers; returns the number of inputs per parser, the number of refused inputs, and the failures."""
    import logging

    from kdist.errors import KdistError
    from tests.fuzz import guard
    from tests.fuzz.targets import all_targets

    logger = logging.getLogger("kdist")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    targets = [target for target in all_targets(folder) if only in (None, target.name)]
    failures, counts, refused = {}, {}, {}
    for target in targets:
        for good in target.good:
            target.feed(good)
        spent = time.process_time()
        with guard.watched(folder):
            number = round(inputs * target.share + 1)
            for position in range(number):
                name = f"{seed}:{target.name}:{position}"
                made = target.make(Random(name))
                try:
                    with guard.in_time():
                        target.feed(made)
                except KdistError:
                    refused[target.name] = refused.get(target.name, 0) + 1
                except (Exception, guard.Forbidden) as error:
                    last = "".join(traceback.format_exception(error)[-3:])
                    failures.setdefault(last, f"seed {name!r}: {str(made)[:300]}\n{last}")
        counts[target.name] = number, round(time.process_time() - spent, 1)
    logger.setLevel(level)
    return counts, refused, [*failures.values()]


@pytest.mark.kills("fuzz_malformed_data_crashes")
@pytest.mark.in_turn(3)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("inputs", "seed"),
    [
        pytest.param(5_000, "kdist 28", id="five-thousand"),
        pytest.param(100_000, f"turn {turn()}", id="a-hundred-thousand", marks=pytest.mark.full),
    ],
)
def test_changed_inputs(inputs, seed, tmp_path):
    ((counts, refused, failures),) = run("torch", 1, in_worker_fuzz, str(tmp_path), inputs, seed, timeout=380)
    assert not failures, "\n".join(failures)
    assert sum(number for number, _ in counts.values()) >= inputs
    ignoring = {
        "address of a worker",
        "channel",
        "kept checkpoints",
    }  # these ignore bad inputs without an error
    assert refused.keys() == counts.keys() - ignoring  # each parser refused some inputs
    print(counts, sum(seconds for _, seconds in counts.values()))
