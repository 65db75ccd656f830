"""Selects the kdist backend that matches the Keras backend."""

from __future__ import annotations

import functools
import importlib

from kdist.backends.contract import Backend
from kdist.cluster import logs
from kdist.cluster.environment import keras_backend_name
from kdist.cluster.keras_backends import added_backends, check_backend
from kdist.errors import BackendError

# In kdist/backends/NAME/backend.py.
_CLASSES = {"tensorflow": "TensorFlowBackend", "jax": "JaxBackend", "torch": "TorchBackend"}


def get_backend() -> Backend:
    """Returns the backend that Keras uses in this process.

    Raises:
        BackendError: If kdist does not support the backend, or it is not installed.
    """
    logs.set_up()
    check_backend(keras_backend_name())
    import keras

    return _create(keras.backend.backend())


@functools.cache
def _create(name: str) -> Backend:
    check_backend(name)
    if name in _CLASSES:
        return getattr(importlib.import_module(f"kdist.backends.{name}.backend"), _CLASSES[name])()
    added = list(added_backends(name))
    if len(added) > 1:
        raise BackendError(
            f"Several packages add the backend {name!r}.",
            received={"entry_points": [point.value for point in added]},
            hint="Uninstall all of them except one.",
        )
    return added[0].load()()
