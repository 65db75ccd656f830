"""The official clients of clouds, which are imported when they are needed, and what is said where one fails."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from kdist.cluster.errors import ClusterImportError, ClusterRuntimeError
from kdist.errors import KdistError


def import_client(module: str, package: str, instead: str) -> Any:
    """Imports a module of a client.

    Args:
        module: The module's name.
        package: The name under which it is installed.
        instead: The argument that makes it unnecessary.

    Raises:
        ClusterImportError: If it is not installed. It is an `ImportError`.

    Example:

    >>> from kdist.cluster.clients import import_client
    >>> import_client("json", "json", "client").loads("[1]")
    [1]
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ClusterImportError(
            f"Cannot import the package {package}, which this resolver needs.",
            received={"module": module, "error": str(error)},
            hint=f"Install it with `pip install {package}`, or pass `{instead}`.",
        ) from error


@contextlib.contextmanager
def asking(problem: str, hint: str) -> Iterator[None]:
    """Turns whatever a client raises (no network, no permission, an answer without a field) into kdist's error.

    Raises:
        ClusterRuntimeError: If it fails. It is a `RuntimeError`.
    """
    try:
        yield
    except KdistError:
        raise
    except Exception as error:
        raise ClusterRuntimeError(
            problem,
            received={"error": f"{type(error).__name__}: {error}"[:500]},
            hint=hint,
        ) from error
