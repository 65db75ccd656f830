"""The cells of the contract's matrix: backend × strategy × case, known without importing Keras."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from kdist.testing.conformance.catalogue import catalogue
from kdist.testing.conformance.configuration import CONFIGURATIONS

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


ENTRIES = {entry.name: entry for entry in catalogue()}


def _cells() -> Iterator[Cell]:
    """All cells; `make test` runs the pairs, in which each case meets every strategy and every backend."""
    for c, configuration in enumerate(CONFIGURATIONS.values()):
        for e, entry in enumerate(ENTRIES.values()):
            turn = [BACKENDS[(c + e + i) % len(BACKENDS)] for i in range(len(BACKENDS))]
            able = [b for b in turn if b in configuration.backends and b in entry.backends]
            for backend in able:
                yield Cell(backend, configuration.name, entry.name, backend == able[0])


# One configuration of one backend after the other.
CELLS = sorted(_cells(), key=lambda cell: BACKENDS.index(cell.backend))


def missing_pairs() -> set[tuple[str, str]]:
    """Pairs of case, strategy and backend that `make test` leaves out, of those that some cell has."""

    def pairs(cells: list[Cell]) -> set[tuple[str, str]]:
        triples = [(cell.backend, cell.configuration, cell.case) for cell in cells]
        return {pair for triple in triples for pair in itertools.combinations(triple, 2)}

    return pairs(CELLS) - pairs([cell for cell in CELLS if cell.is_pair])
