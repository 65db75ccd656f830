"""Starts the workers of a job, for the command line and for `kdist.launch(fn)` in Python and notebooks.

It uses only the standard library. It does not import Keras or a framework, so it never occupies a device.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from kdist.launch.function import launch

__all__ = ["launch"]


class _CallableModule(types.ModuleType):
    """Makes this package callable as a function: `kdist.launch(fn, num_workers=2)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return launch(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)  # by name, as other modules


sys.modules[__name__].__class__ = _CallableModule
