"""One parser, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass
class Target:
    """A parser.

    Args:
        name: Its name in reports.
        share: Its part of all inputs.
        make: Makes an input.
        feed: Gives it to the parser, which may raise errors of kdist.
        good: Inputs that it must accept.
    """

    name: str
    share: float
    make: Callable[[Random], Any]
    feed: Callable[[Any], Any]
    good: Sequence[Any]
