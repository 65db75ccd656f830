"""The cells of the contract's matrix: backend × strategy × case. Does not import Keras."""

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
    """Returns the strategy of a configuration, and whether it has several workers and several devices per worker.

    Strategies that shard variables are one kind. Each configuration with parameter servers is a separate kind.
    """
    configuration = CONFIGURATIONS[name]
    if configuration.strategy == "ParameterServer":
        return name, True, False
    if configuration.strategy in ("FullySharded", "ModelParallel"):
        return "Divided", False, False
    return configuration.strategy, configuration.num_workers > 1, configuration.devices_per_worker > 1


def _pairs(case: Case, turn: int) -> Iterator[tuple[str, str]]:
    """Yields the one or two pairs of backend and configuration in which `make test` runs a case.

    One pair mirrors the variables: on several devices, on several workers, or both. Kinds and backends rotate, and
    after all combinations, the configurations of a kind. In every second turn, another pair places the variables
    differently: one kind per turn. Two of three times, it uses PyTorch, because its cells are fast.
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
    # Without the shift, `place` and `position` would advance together, and some pairs would never run.
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
    # Sorted by backend, then by configuration.
    today = chosen(turn_of_today())
    for backend, configuration, case in itertools.product(BACKENDS, CONFIGURATIONS.values(), CASES.values()):
        if backend in case.backends and configuration.can(case.name, backend):
            is_pair = (backend, configuration.name, case.name) in today
            yield Cell(backend, configuration.name, case.name, is_pair)


CELLS = [*_cells()]


def missing_pairs(first: int, turns: int) -> set[tuple[str, object]]:
    """Returns pairs that none of several turns runs: case and backend, case and kind, backend and configuration."""

    def pairs(cells: Iterable[tuple[str, str, str]]) -> set[tuple[str, object]]:
        found: set[tuple[str, object]] = set()
        for backend, configuration, case in cells:
            found |= {(case, backend), (case, _kind(configuration)), (backend, configuration)}
        return found

    every = {(cell.backend, cell.configuration, cell.case) for cell in CELLS}
    return pairs(every) - pairs(set().union(*(chosen(first + turn) for turn in range(turns))))


def missing_cells(first: int, turns: int) -> set[tuple[str, str, str]]:
    """Returns the cells that none of several turns runs."""
    every = {(cell.backend, cell.configuration, cell.case) for cell in CELLS}
    return every - set().union(*(chosen(first + turn) for turn in range(turns)))
