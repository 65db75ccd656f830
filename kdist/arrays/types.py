"""Types of values whose framework kdist does not know. Only type checkers and readers need this module."""

from __future__ import annotations

from typing import Any, ParamSpec, Protocol, Self, TypeAlias, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Structure: TypeAlias = object
"""A nested structure: tuples, lists and dictionaries of leaves. A leaf is a tensor, `None` or another object.

Every object is a structure, because a single leaf is one. To take it apart, use `keras.tree` or `rows`.
"""


class Tensor(Protocol):
    """A tensor of any framework or a NumPy array: the properties and operators that all of them have."""

    @property
    def shape(self) -> Any:
        """The lengths of the axes: a tuple, `torch.Size` or `tf.TensorShape`."""

    @property
    def dtype(self) -> object:
        """The dtype, an object of the framework; see `rows.dtype_name`."""

    def __getitem__(self, key: Any, /) -> Self: ...
    def __add__(self, other: Any, /) -> Self: ...
    def __sub__(self, other: Any, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...
    def __truediv__(self, other: Any, /) -> Self: ...


TensorT = TypeVar("TensorT", bound=Tensor)
Scalar: TypeAlias = "float | Tensor"
"""A number, or a tensor without axes if a compiled program computes it."""
Shape: TypeAlias = "tuple[int | None, ...] | None"
"""The lengths of axes, with `None` for axes that vary; `None` if the number of axes is unknown."""
