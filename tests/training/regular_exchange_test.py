"""`RegularExchange` exchanges at the right intervals, and after the same steps on all workers."""

from __future__ import annotations

import pytest

from kdist.training import voting


@pytest.mark.kills("exchange_at_every_step", "exchange_waits_for_steps_after_a_rollback")
def test_exchanges_come_about_as_often_as_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(voting.time, "monotonic", lambda: clock[0])
    met = voting.RegularExchange(None, seconds=0.5)
    times = []
    for step in range(4000):
        clock[0] += 0.001
        if met.is_due(step):
            assert met.exchange(step, step) == [step]
            times.append(clock[0])
    apart = [b - a for a, b in zip(times[-4:], times[-3:], strict=False)]
    assert all(0.4 < seconds <= 0.51 for seconds in apart)
    assert len(times) < 20  # the first intervals are short, and each is at most twice as long as before
    # A loop restores an earlier checkpoint: the next exchange must not wait for the old number of steps.
    assert met.is_due(1000) and met.exchange(1000, 1) == [1]
    assert not met.is_due(1000) and met.is_due(1001)
