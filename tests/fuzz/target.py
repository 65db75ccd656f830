"""Defines a parser with inputs for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass
class Target:
    """A parser.

    Args:
        name: The name in reports.
        share: The fraction of all inputs.
        make: A function that makes an input.
        feed: A function that passes an input to the parser, and may raise errors of kdist.
        good: Inputs that the parser must accept.
    """

    name: str
    share: float
    make: Callable[[Random], Any]
    feed: Callable[[Any], Any]
    good: Sequence[Any]
