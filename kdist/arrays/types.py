"""Types of values whose framework kdist does not know. Only type checkers and readers need this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

from kdist.values import Tensor

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Structure: TypeAlias = object
"""A nested structure: tuples, lists and dictionaries of leaves. A leaf is a tensor, `None` or another object.

Every object is a structure, because a single leaf is one. To take it apart, use `keras.tree` or `rows`.
"""

Function: TypeAlias = Callable[..., Any]
"""A function of the user or of a library, with any arguments."""
Args: TypeAlias = tuple[Any, ...]
"""The positional arguments of a function."""
Kwargs: TypeAlias = dict[str, Any]
"""The named arguments of a function."""
TensorT = TypeVar("TensorT", bound=Tensor)
Scalar: TypeAlias = "float | Tensor"
"""A number, or a tensor without axes if a compiled program computes it."""
Shape: TypeAlias = "tuple[int | None, ...] | None"
"""The lengths of axes, with `None` for axes that vary; `None` if the number of axes is unknown."""
