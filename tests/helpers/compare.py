"""Compares nested results, and names the place of a difference."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_close(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 2e-6, where: str = "") -> None:
    """Fails unless two results have the same structure and numbers.

    Args:
        actual: Arrays, numbers and strings, possibly nested in dictionaries, lists and tuples.
        expected: The expected result.
        rtol: The tolerance relative to the expected number; with 0, the numbers must be equal.
        atol: The absolute tolerance.
        where: The name of the result, for the message.
    """
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for name in expected:
            assert_close(actual[name], expected[name], rtol, atol, f"{where}[{name!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_close(one, other, rtol, atol, f"{where}[{index}]")
    elif expected is None or isinstance(expected, str):
        assert actual == expected, where
    else:
        assert np.shape(actual) == np.shape(expected), where
        if rtol:
            np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol, err_msg=where)
        else:
            np.testing.assert_array_equal(actual, expected, err_msg=where)


def assert_equal(actual: Any, expected: Any) -> None:
    """Fails unless two results are the same, to the last bit."""
    assert_close(actual, expected, rtol=0)


def assert_all_equal(results: list[Any]) -> None:
    """Fails unless all workers have the same result."""
    for other in results[1:]:
        assert_equal(other, results[0])
