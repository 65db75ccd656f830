"""What is said about a name that a module of kdist does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SYNCHRONOUS = "Use kdist.MultiWorkerMirroredStrategy, which trains on all workers synchronously."

# Names of `tf.distribute` that kdist does not have yet, and what to use instead.
_INSTEAD = {
    "ClusterCoordinator": _SYNCHRONOUS,
    "ParameterServerStrategy": _SYNCHRONOUS,
    "PreemptionWatcher": "Use kdist.experimental.PreemptionCheckpointHandler.",
    "Server": _SYNCHRONOUS,
    "coordinator": _SYNCHRONOUS,
    "partitioners": _SYNCHRONOUS,
}


def no_such_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Returns the error for a name that a module does not have: with what to use instead, or the nearest name.

    Args:
        module: The module's name.
        name: What it was asked for.
        known: The names that it has.
    """
    message = f"module {module!r} has no attribute {name!r}"
    if name in _INSTEAD:
        return AttributeError(f"{message} yet. {_INSTEAD[name]}")
    near = difflib.get_close_matches(name, known, n=1)
    return AttributeError(f"{message}. Did you mean {near[0]!r}?" if near else message, name=name)
