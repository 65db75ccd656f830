"""No update is staler than the bound, and a closure can always begin when none is running."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kdist.coordinator.closures import Staleness


@pytest.mark.kills("servers_staleness_of_those_that_run_alone")
@given(most=st.none() | st.integers(0, 4), choices=st.lists(st.integers(0, 99), max_size=80))
# The second of two closures ends, a third closure must not begin, and then the first closure ends.
@example(most=1, choices=[0, 0, 1, 0, 1, 1])
def test_as_many_updates_at_most_are_made_meanwhile(most: int | None, choices: list[int]) -> None:
    bound = Staleness(most)
    made = 0
    began: dict[int, int] = {}  # the number of updates when each running closure began
    for number, choice in enumerate(choices):
        if began and choice % 2:  # one of them ends, in any order
            closure = sorted(began)[choice % len(began)]
            if choice % 3:
                staleness = made - began[closure]
                assert most is None or staleness <= most
                made += 1
            # Otherwise, its worker was lost, and the closure changed nothing.
            del began[closure]
            bound.end(closure)
        elif bound.begin(number):
            began[number] = made
        else:
            assert most is not None
            assert began  # a closure can always begin when none is running
    assert most != 0 or len(began) <= 1


@pytest.mark.kills("servers_staleness_ignored")
@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_as_many_run_beside_each_other_as_the_bound_allows(most: int) -> None:
    bound = Staleness(most)
    assert [bound.begin(number) for number in range(most + 3)] == [True] * (most + 1) + [False] * 2
    for number in range(most + 1):
        bound.end(number)
    assert bound.begin("again")


def test_who_ends_without_having_begun() -> None:
    bound = Staleness(0)
    bound.end("nobody")
    assert bound.begin("somebody")
