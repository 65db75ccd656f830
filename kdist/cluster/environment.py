"""Reads and sets environment variables, on behalf of all packages outside `kdist.cluster`."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Iterator, Mapping

TOKEN_VARIABLE = "KDIST_CLUSTER_TOKEN"
_GPU_FILES = "/dev/nvidia[0-9]*"


def get(name: str, default: str | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the value of an environment variable, or `default` if it is not set."""
    return (os.environ if environ is None else environ).get(name, default)


def set_default(name: str, value: object) -> str:
    """Sets an environment variable unless it is already set. Returns its value."""
    return os.environ.setdefault(name, str(value))


@contextlib.contextmanager
def patched(**variables: object) -> Iterator[None]:
    """Sets environment variables in a `with` block, and restores them afterwards. `None` unsets a variable.

    Example:

    >>> from kdist.cluster import environment
    >>> with environment.patched(KDIST_EXAMPLE=1):
    ...     environment.get("KDIST_EXAMPLE")
    '1'
    >>> environment.get("KDIST_EXAMPLE")
    """
    before = {name: os.environ.get(name) for name in variables}
    try:
        _write(variables)
        yield
    finally:
        _write(before)


def _write(variables: Mapping[str, object]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


def cluster_token(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the secret that the tasks of a job share, or `None` if it is not set.

    A server accepts only clients with the same secret. Unless it is set, `kdist run` creates one per job.

    Example:

    >>> from kdist.cluster import environment
    >>> environment.cluster_token({"KDIST_CLUSTER_TOKEN": "a secret"})
    'a secret'
    """
    return (os.environ if environ is None else environ).get(TOKEN_VARIABLE, "").strip() or None


def keras_backend_choice(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Returns the name of the Keras backend that will be used, and the reason as a phrase.

    This function does not import Keras. As in Keras, the variable `KERAS_BACKEND` comes first, then the
    configuration file, then "tensorflow". The name is in lower case and is not validated.

    Example:

    >>> from kdist.cluster import environment
    >>> environment.keras_backend_choice({"KERAS_BACKEND": "JAX"})
    ('jax', 'KERAS_BACKEND is set')
    """
    environ = os.environ if environ is None else environ
    named = environ.get("KERAS_BACKEND", "").strip()
    if named:
        return named.lower(), "KERAS_BACKEND is set"
    home = environ.get("KERAS_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".keras")
    path = os.path.join(home, "keras.json")
    try:
        with open(path, encoding="utf-8") as file:
            configured = json.load(file).get("backend")
    except (OSError, ValueError, AttributeError):  # no file, not JSON or not an object: Keras also ignores it
        configured = None
    if isinstance(configured, str) and configured.strip():
        return configured.strip().lower(), f"set in {path}"
    return "tensorflow", "the default of Keras"


def keras_backend_name(environ: Mapping[str, str] | None = None) -> str:
    """Returns the name of the Keras backend that will be used. See `keras_backend_choice`."""
    return keras_backend_choice(environ)[0]


def visible_gpus(environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns the GPUs that this process may use, as entries of `CUDA_VISIBLE_DEVICES`.

    If the variable is not set, this function counts the driver's device files. It does not use a framework,
    because a framework could hold the GPUs.

    Example:

    >>> from kdist.cluster import environment
    >>> environment.visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"})
    ['2', '3']
    """
    environ = os.environ if environ is None else environ
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(index) for index in range(len(glob.glob(_GPU_FILES)))]
    gpus: list[str] = []
    for gpu in (part.strip() for part in chosen.split(",")):
        if not gpu or gpu.startswith("-") or gpu.lower() in ("nodevfiles", "none", "void"):
            break  # CUDA also ignores everything after the first entry that is not a device
        gpus.append(gpu)
    return gpus
