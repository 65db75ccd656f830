"""Functions that a user names on the command line."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from kdist.errors import InvalidArgumentError


def call_function(model: str) -> Any:
    """Calls a function by its name "module:function", and returns the result. Raises an error if it does not exist."""
    module, _, function = model.partition(":")
    sys.path.insert(0, os.getcwd())  # where `python -m` looks first
    try:
        found = getattr(importlib.import_module(module or model), function)
        if not callable(found):
            raise AttributeError(f"{function!r} is not a function")
        return found()
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(
            f"Cannot create the model: {error}",
            received={"model": model},
            hint="Pass a module and a function that returns the model: --model train:make_model",
        ) from error
    finally:
        del sys.path[0]
