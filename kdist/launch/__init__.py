"""Starting the workers of a job: the command line, and `kdist.launch(fn)` for Python and notebooks.

Standard library only; nothing here imports Keras or a framework, so the launcher never holds a device.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from kdist.launch.function import launch

__all__ = ["launch"]


class _CallableModule(types.ModuleType):
    """Lets `kdist.launch` be both this package and the function: `kdist.launch(fn, num_workers=2)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
