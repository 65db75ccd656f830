"""Handlers in higher layers for kdist's hooks in Keras.

The hooks are in a low layer and cannot import their handlers. `kdist/__init__.py` registers the names of the handlers
here; a handler is loaded when a hook first calls it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

_homes: dict[str, str] = {}


def register(names: Mapping[str, Sequence[str]]) -> None:
    """Notes which module each handler is in.

    Args:
        names: The handlers of each module.
    """
    _homes.update({name: module for module, handlers in names.items() for name in handlers})


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a handler.

    Args:
        name: What it is called in its module.
        *args: What it is given.
        **kwargs: As `args`.

    Returns:
        What it returns.
    """
    return getattr(importlib.import_module(_homes[name]), name)(*args, **kwargs)
