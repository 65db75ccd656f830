"""The conformance suite of a backend: small trainings whose numbers must be those of one device.

A case is a function that trains a small model with plain Keras and returns numbers. It is run twice: without
a strategy on one device, and in the scope of a strategy. `compare` holds both against each other.
"""

from __future__ import annotations

from tests.contract.case import CASES, Case, Numbers, compare, run_case
from tests.contract.configuration import CONFIGURATIONS, Configuration, make_strategy

__all__ = [
    "CASES",
    "CONFIGURATIONS",
    "Case",
    "Configuration",
    "Numbers",
    "compare",
    "make_strategy",
    "run_case",
]
