"""The cells of the contract's matrix: backend × strategy × case, known without importing Keras."""

from __future__ import annotations

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

    def __str__(self) -> str:
        return f"{self.backend}-{self.configuration}-{self.case}"


CELLS = [
    Cell(backend, configuration.name, entry.name)
    for backend in BACKENDS
    for configuration in CONFIGURATIONS.values()
    if backend in configuration.backends
    for entry in catalogue()
    if backend in entry.backends
]
