"""What a conformance case is, how it is run and what is compared."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

# Name -> value. Arrays of any shape; every number of both runs is compared.
Numbers = dict[str, Any]

MODULES = ("data", "losses", "optimizers", "layers", "models", "metrics", "callbacks")

# float32 sums over other groups of rows differ in the last digits; an error in the contract is far larger.
RTOL, ATOL = 1e-5, 2e-6

CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """One promise of the global-batch contract.

    Args:
        name: Of the function.
        group: Name of the module, for the table.
        title: What a user would call it; shown in the support table.
        function: Called in the scope of a strategy, or without one; returns the numbers to compare.
        rtol: Relative tolerance.
        atol: Absolute tolerance, for numbers near zero.
        backends: The backends that the case makes sense on.
        why_not_all: Where `backends` are not all: the reason.
    """

    name: str
    group: str
    title: str
    function: Callable[[], Numbers]
    rtol: float
    atol: float
    backends: tuple[str, ...]
    why_not_all: str


def case(
    title: str,
    rtol: float = RTOL,
    atol: float = ATOL,
    backends: tuple[str, ...] = ("tensorflow", "jax", "torch"),
    why_not_all: str = "",
) -> Callable[[Callable[[], Numbers]], Callable[[], Numbers]]:
    """Registers a function as a case."""

    def register(function: Callable[[], Numbers]) -> Callable[[], Numbers]:
        name = function.__name__
        assert name not in CASES, name
        group = function.__module__.rpartition(".")[2]
        CASES[name] = Case(name, group, title, function, rtol, atol, backends, why_not_all)
        return function

    return register


def load() -> dict[str, Case]:
    """Imports all cases (and with them Keras) and returns them by name."""
    for module in MODULES:
        importlib.import_module(f"kdist.testing.conformance.{module}")
    return CASES


def run_case(name: str, strategy: Any = None) -> Numbers:
    """Runs a case, in the scope of a strategy or without one.

    Args:
        name: Of the case.
        strategy: A kdist strategy; `None` for plain Keras on one device.

    Returns:
        The numbers, as NumPy arrays.
    """
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    policy = keras.config.dtype_policy()
    try:
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            numbers = load()[name].function()
    finally:
        keras.config.set_dtype_policy(policy)
    return {key: np.asarray(value) for key, value in numbers.items()}


class Tolerances(Protocol):
    """What `compare` needs of a `Case`, or of its `Entry` in the catalogue."""

    @property
    def name(self) -> str: ...
    @property
    def rtol(self) -> float: ...
    @property
    def atol(self) -> float: ...


def compare(case: Tolerances, expected: Numbers, actual: Numbers) -> None:
    """Raises an `AssertionError` that names the number unless both runs agree to the case's tolerances.

    Args:
        case: The case.
        expected: The numbers of one device; all of them finite, since NaN would agree with NaN.
        actual: The numbers under a strategy.
    """
    assert expected.keys() == actual.keys(), f"{case.name}: {sorted(expected)} != {sorted(actual)}"
    for key, value in expected.items():
        assert np.isfinite(value).all(), f"{case.name}: {key} of one device is {value}"
        np.testing.assert_allclose(
            actual[key], value, rtol=case.rtol, atol=case.atol, err_msg=f"{case.name}: {key}", verbose=True
        )
