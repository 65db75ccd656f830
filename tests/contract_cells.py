"""The cells of the contract's matrix: backend × strategy × case, known without importing Keras."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.contract.case import CASES, Case
from tests.contract.configuration import CONFIGURATIONS

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
    """The backends and configurations of a case in `make test`: it meets each backend and each kind of strategy.

    With every turn the backends change places, and after a round of them the configurations of a kind. Strategies
    that hold their variables in another way meet each case once, three times of four on PyTorch, whose cells are quick.
    """
    groups = [[*names] for _, names in itertools.groupby(CONFIGURATIONS, _kind)]
    for names in groups:
        able = [(b, name) for name in names for b in case.backends if CONFIGURATIONS[name].can(case.name, b)]
        if CONFIGURATIONS[names[0]].strategy != "Mirrored" and able:
            rounds, place = divmod(turn, 4)
            quick = [pair for pair in able if place and pair[0] == "torch"]
            yield quick[turn % len(quick)] if quick else able[rounds % len(able)]
    kinds = [names for names in groups if CONFIGURATIONS[names[0]].strategy == "Mirrored"]
    backends = [[b for b in case.backends if b in CONFIGURATIONS[names[0]].backends] for names in kinds]
    kinds, backends = [k for k, b in zip(kinds, backends, strict=True) if b], [b for b in backends if b]
    meets_all = [chosen for chosen in itertools.product(*backends) if {*chosen} == {*case.backends}]
    rounds, place = divmod(turn, len(meets_all))
    for backend, names in zip(meets_all[place], kinds, strict=True):
        yield backend, names[rounds % len(names)]


def _cells() -> Iterator[Cell]:
    for turn, case in enumerate(CASES.values()):
        pairs = set(_pairs(case, turn))
        for configuration in CONFIGURATIONS.values():
            for backend in BACKENDS:
                if backend in case.backends and configuration.can(case.name, backend):
                    is_pair = (backend, configuration.name) in pairs
                    yield Cell(backend, configuration.name, case.name, is_pair)


# One configuration of one backend after the other.
_ORDER = [*itertools.product(BACKENDS, CONFIGURATIONS)]
CELLS = sorted(_cells(), key=lambda cell: _ORDER.index((cell.backend, cell.configuration)))


def missing_pairs() -> set[tuple[Any, Any]]:
    """Cases on a backend, cases under a kind, strategies on a backend: what some cell has, and none of the pairs."""

    def pairs(cells: list[Cell]) -> set[tuple[Any, Any]]:
        of_cases = {
            (cell.case, other) for cell in cells for other in (cell.backend, _kind(cell.configuration))
        }
        return of_cases | {(cell.backend, cell.configuration) for cell in cells}

    return pairs(CELLS) - pairs([cell for cell in CELLS if cell.is_pair])
