"""Selects the kdist backend that matches the Keras backend."""

from __future__ import annotations

import functools
import importlib
import importlib.util

from kdist.backends.contract import Backend
from kdist.cluster import logs
from kdist.cluster.environment import keras_backend_name
from kdist.errors import BackendError

# Maps the name of a Keras backend to the package that must be installed.
BACKENDS = {"tensorflow": "tensorflow", "jax": "jax", "torch": "torch"}


def check_installed(name: str) -> None:
    """Raises a `BackendError` unless kdist supports the backend, and the backend and Keras are installed."""
    if name not in BACKENDS:
        raise BackendError(
            f"kdist does not support the Keras backend {name!r}.",
            received={"KERAS_BACKEND": name},
            hint=f"Choose one of {', '.join(sorted(BACKENDS))}: export KERAS_BACKEND=jax",
        )
    for module in ("keras", BACKENDS[name]):
        if importlib.util.find_spec(module) is None:
            raise BackendError(
                f"Cannot use the backend {name!r}: the package {module!r} is not installed.",
                received={"KERAS_BACKEND": name},
                hint=f"In your checkout of kdist, run: pip install '.[{name}]'",
            )


def get_backend() -> Backend:
    """Returns the backend that Keras uses in this process.

    Raises:
        BackendError: If kdist does not support the backend, or it is not installed.
    """
    logs.set_up()
    check_installed(keras_backend_name())
    import keras

    return _create(keras.backend.backend())


@functools.cache
def _create(name: str) -> Backend:
    check_installed(name)
    return importlib.import_module(f"kdist.backends.{name}").create_backend()
