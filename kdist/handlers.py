"""Handlers in higher layers for kdist's hooks in Keras, and for the end of the process.

The hooks are in a low layer and cannot import their handlers. `kdist/__init__.py` registers the names of the
handlers here. A handler is loaded when a hook first calls it.
"""

from __future__ import annotations

import atexit
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_homes: dict[str, str] = {}
_last: list[Callable[[], object]] = []


def register(names: Mapping[str, Sequence[str]]) -> None:
    """Registers handlers. `names` maps each module to the names of its handlers."""
    _homes.update({name: module for module, handlers in names.items() for name in handlers})


def call(name: str, *args: object, **kwargs: object) -> Any:
    """Calls a handler by its name in its module, and returns the result."""
    return getattr(importlib.import_module(_homes[name]), name)(*args, **kwargs)


def call_last(function: Callable[[], object]) -> None:
    """Calls a function at the end of the process, after exit handlers that were registered after `import kdist`."""
    _last.append(function)


@atexit.register
def _call_last() -> None:
    for function in _last:
        function()
