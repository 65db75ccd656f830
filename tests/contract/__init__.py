"""The conformance suite of a backend: small models must have the results of one device under every strategy.

A case is a function that trains a small model with plain Keras and returns numbers. It runs twice: without a
strategy on one device, and in the scope of a strategy. `compare` checks that both runs agree.
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
