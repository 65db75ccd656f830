"""Defines, lists, runs and compares the conformance cases.

The list of cases comes from their source code, so that it imports neither Keras nor a framework.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Name -> value. The arrays have any shape; the comparison covers every number of both runs.
Numbers = dict[str, Any]

# Append new modules: the order determines the pairs that `make test` runs.
MODULES = (
    "data",
    "losses",
    "optimizers",
    "layers",
    "models",
    "metrics",
    "callbacks",
    "transformers",
    "ecosystem",
)

# float32 sums over different groups of rows differ in the last digits; an error in the contract is far
# larger.
RTOL, ATOL = 1e-5, 2e-6


@dataclass(frozen=True)
class Case:
    """One guarantee of the global-batch contract.

    Args:
        name: The name of a function that returns the numbers to compare, with or without a strategy's scope.
        group: The name of the module, for the table.
        title: The user's name for the feature, in the support table.
        rtol: The relative tolerance.
        atol: The absolute tolerance, for numbers near zero.
        backends: The backends that can run the case.
        why_not_all: The reason if `backends` do not contain all backends.
        needs: A package that the case imports, and that may be missing.
    """

    name: str
    group: str
    title: str
    rtol: float
    atol: float
    backends: tuple[str, ...]
    why_not_all: str
    needs: str = ""


def case(
    title: str,
    rtol: float = RTOL,
    atol: float = ATOL,
    backends: tuple[str, ...] = ("tensorflow", "jax", "torch"),
    why_not_all: str = "",
    needs: str = "",
) -> Callable[[Callable[[], Numbers]], Callable[[], Numbers]]:
    """Marks a function as a case. All arguments must be literals, because they are read from the source."""
    return lambda function: function


def _read(group: str) -> Iterator[Case]:
    source = Path(__file__).with_name(f"{group}.py").read_text(encoding="utf-8")
    for function in [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]:
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "case":
                named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
                options = inspect.signature(case).bind(*map(ast.literal_eval, call.args), **named)
                options.apply_defaults()
                yield Case(function.name, group, **options.arguments)


_ALL = [case for group in MODULES for case in _read(group)]
CASES = {case.name: case for case in _ALL}
assert len(CASES) == len(_ALL), "two cases have the same name"


def run_case(name: str, strategy: Any = None) -> Numbers:
    """Runs a case, in the scope of a strategy or without a strategy.

    Args:
        name: The name of the case.
        strategy: A kdist strategy; `None` for plain Keras on one device.

    Returns:
        The numbers, as NumPy arrays.
    """
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    policy = keras.config.dtype_policy()
    module = importlib.import_module(f"tests.contract.{CASES[name].group}")
    try:
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            numbers = getattr(module, name)()
    finally:
        keras.config.set_dtype_policy(policy)
    return {key: np.asarray(value) for key, value in numbers.items()}


def compare(case: Case, expected: Numbers, actual: Numbers) -> None:
    """Raises an `AssertionError` that names the number if both runs differ by more than the tolerances.

    Args:
        case: The case.
            expected: The results of one device. All must be finite, because NaN would match NaN.
        actual: The numbers under a strategy.
    """
    assert expected.keys() == actual.keys(), f"{case.name}: {sorted(expected)} != {sorted(actual)}"
    for key, value in expected.items():
        assert np.isfinite(value).all(), f"{case.name}: {key} of one device is {value}"
        np.testing.assert_allclose(
            actual[key], value, rtol=case.rtol, atol=case.atol, err_msg=f"{case.name}: {key}", verbose=True
        )
