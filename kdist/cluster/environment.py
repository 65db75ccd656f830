"""The one place where the rest of kdist reads and writes the process environment."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Iterator, Mapping

TOKEN_VARIABLE = "KDIST_CLUSTER_TOKEN"
_GPU_FILES = "/dev/nvidia[0-9]*"


def get(name: str, default: str | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """Returns an environment variable, or `default` where it is not set.

    Example:

    >>> from kdist.cluster import environment
    >>> environment.get("NO_SUCH_VARIABLE", "nothing")
    'nothing'
    """
    return (os.environ if environ is None else environ).get(name, default)


def set_default(name: str, value: object) -> str:
    """Sets an environment variable unless the user has set it already; returns the value that holds now."""
    return os.environ.setdefault(name, str(value))


@contextlib.contextmanager
def patched(**variables: object) -> Iterator[None]:
    """Sets environment variables for the duration of a `with` block and restores them after it; `None` removes one.

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
    """Returns the secret that the tasks of a job share, `None` where there is none.

    A server lets only those connect that know it. `kdist run` makes one for each job, unless it is set already.

    Example:

    >>> from kdist.cluster import environment
    >>> environment.cluster_token({"KDIST_CLUSTER_TOKEN": "a secret"})
    'a secret'
    """
    return (os.environ if environ is None else environ).get(TOKEN_VARIABLE, "").strip() or None


def keras_backend_choice(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Returns the name of the Keras backend that will be used, and a phrase that says where that was decided.

    Keras itself is not imported. The order is Keras's own: the variable `KERAS_BACKEND`, then the
    configuration file, then "tensorflow". The name is in lower case, and not checked for being a known one.

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
    except (OSError, ValueError, AttributeError):  # no file, not JSON, not an object: Keras ignores it too
        configured = None
    if isinstance(configured, str) and configured.strip():
        return configured.strip().lower(), f"set in {path}"
    return "tensorflow", "the default of Keras"


def keras_backend_name(environ: Mapping[str, str] | None = None) -> str:
    """Returns the name of the Keras backend that will be used, as `keras_backend_choice` does."""
    return keras_backend_choice(environ)[0]


def visible_gpus(environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns the GPUs that this process may use, as they are written in `CUDA_VISIBLE_DEVICES`.

    No framework is asked, so no GPU is held by asking: `CUDA_VISIBLE_DEVICES` is read, and where it is not
    set the driver's device files are counted.

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
            break  # CUDA too ignores everything after the first entry that names no device
        gpus.append(gpu)
    return gpus
