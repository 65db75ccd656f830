"""The cells of the contract's matrix: backend × strategy × case, known without importing Keras."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.contract.case import CASES, Case
from tests.contract.configuration import CONFIGURATIONS
from tests.turn import turn as turn_of_today

BACKENDS = ("tensorflow", "jax", "torch")


@dataclass(frozen=True)
class Cell:
    """One test of the contract."""

    backend: str
    configuration: str
    case: str
    is_pair: bool

    def __str__(self) -> str:
        return f"{self.backend}-{self.configuration}-{self.case}"


def _kind(name: str) -> tuple[str, bool, bool]:
    """The strategy of a configuration, whether it has several workers, and whether a worker has several devices.

    Those that divide variables are one kind; with parameter servers it is the coordinator that steps, or each server.
    """
    configuration = CONFIGURATIONS[name]
    if configuration.strategy == "ParameterServer":
        return name, True, False
    if configuration.strategy in ("FullySharded", "ModelParallel"):
        return "Divided", False, False
    return configuration.strategy, configuration.num_workers > 1, configuration.devices_per_worker > 1


def _pairs(case: Case, turn: int) -> Iterator[tuple[str, str]]:
    """The backends and configurations of a case in `make test`: one or two.

    The first holds the variables as mirrors: with several devices, several workers, or both, which take turns, as do
    the backends, and after a round of them the configurations of a kind. In every second turn another holds them in
    another way: one kind per turn; two times of three on PyTorch, whose cells are quick.
    """
    groups = [[*names] for _, names in itertools.groupby(CONFIGURATIONS, _kind)]
    elsewhere = [
        [(b, name) for name in names for b in case.backends if CONFIGURATIONS[name].can(case.name, b)]
        for names in groups
        if CONFIGURATIONS[names[0]].strategy != "Mirrored"
    ]
    elsewhere = [able for able in elsewhere if able]
    if elsewhere and turn % 2:
        rounds, place = divmod(turn // 2, len(elsewhere))
        able = elsewhere[place]
        quick = [pair for pair in able if rounds % 3 and pair[0] == "torch"]
        yield quick[(rounds - rounds // 3) % len(quick)] if quick else able[(rounds // 3) % len(able)]
    kinds = [names for names in groups if CONFIGURATIONS[names[0]].strategy == "Mirrored"]
    backends = [[b for b in case.backends if b in CONFIGURATIONS[names[0]].backends] for names in kinds]
    kinds, backends = [k for k, b in zip(kinds, backends, strict=True) if b], [b for b in backends if b]
    meets_all = [chosen for chosen in itertools.product(*backends) if {*chosen} == {*case.backends}]
    rounds, place = divmod(turn, len(meets_all))
    # Without the shift, places and positions would advance together, and some of their pairs never come.
    shift = 0 if len(meets_all) % len(kinds) else rounds
    position = (turn + shift) % len(kinds)
    names = kinds[position]
    yield meets_all[place][position], names[rounds // len(kinds) % len(names)]


def chosen(turn: int) -> set[tuple[str, str, str]]:
    """Returns backend, configuration and case of the cells that `make test` runs in a turn."""
    return {
        (*pair, case.name) for place, case in enumerate(CASES.values()) for pair in _pairs(case, turn + place)
    }


def _cells() -> Iterator[Cell]:
    # One configuration of one backend after the other.
    today = chosen(turn_of_today())
    for backend, configuration, case in itertools.product(BACKENDS, CONFIGURATIONS.values(), CASES.values()):
        if backend in case.backends and configuration.can(case.name, backend):
            is_pair = (backend, configuration.name, case.name) in today
            yield Cell(backend, configuration.name, case.name, is_pair)


CELLS = [*_cells()]


def missing_pairs(first: int, turns: int) -> set[tuple[str, object]]:
    """Cases on a backend, cases under a kind, and strategies on a backend that no turn of several runs."""

    def pairs(cells: Iterable[tuple[str, str, str]]) -> set[tuple[str, object]]:
        found: set[tuple[str, object]] = set()
        for backend, configuration, case in cells:
            found |= {(case, backend), (case, _kind(configuration)), (backend, configuration)}
        return found

    every = {(cell.backend, cell.configuration, cell.case) for cell in CELLS}
    return pairs(every) - pairs(set().union(*(chosen(first + turn) for turn in range(turns))))


def missing_cells(first: int, turns: int) -> set[tuple[str, str, str]]:
    """Cells that no turn of several runs."""
    every = {(cell.backend, cell.configuration, cell.case) for cell in CELLS}
    return every - set().union(*(chosen(first + turn) for turn in range(turns)))
