"""Reads from the metadata server of Google Cloud, with a short timeout."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from kdist.cluster.errors import ClusterRuntimeError

# Returns the text at a path such as "instance/zone", or None if the server has no such entry.
Fetch = Callable[[str], "str | None"]

# The documented IP address. Outside Google Cloud, looking up metadata.google.internal may take long.
_HOST = "169.254.169.254"
_TIMEOUT = 2.0
_TRIES = 3
_MOST_BYTES = 1 << 20


def fetch_metadata(path: str, environ: Mapping[str, str], timeout: float = _TIMEOUT) -> str | None:
    """Returns an entry of the metadata server of this machine, or `None` if the server has no such entry.

    `path` is below `computeMetadata/v1`. `GCE_METADATA_HOST` or `GCE_METADATA_IP` may set another server.

    Raises:
        ClusterRuntimeError: If there is no server, or it does not respond. It is also a `RuntimeError`.

    Example:

    >>> from kdist.cluster.metadata_server import fetch_metadata
    >>> try:
    ...     fetch_metadata("instance/zone", {"GCE_METADATA_HOST": "127.0.0.1:1"})
    ... except RuntimeError as error:
    ...     print(str(error).partition(" within")[0])
    The metadata server of Google Cloud did not respond
    """
    host = environ.get("GCE_METADATA_HOST") or environ.get("GCE_METADATA_IP") or _HOST
    url = f"http://{host}/computeMetadata/v1/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # A proxy would return the metadata of another machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for tried in range(1, _TRIES + 1):
        try:
            with opener.open(request, timeout=timeout) as answer:
                if answer.headers.get("Metadata-Flavor") != "Google":
                    raise OSError("another kind of server responded")
                return str(answer.read(_MOST_BYTES).decode())
        except urllib.error.HTTPError as error:
            if error.code == 404 and error.headers.get("Metadata-Flavor") == "Google":
                return None
            if error.code < 500 or tried == _TRIES:
                raise _no_answer(url, timeout, error) from error
            time.sleep(0.2)  # the server is busy, for example while the machine boots
        except (OSError, ValueError) as error:
            raise _no_answer(url, timeout, error) from error
    raise AssertionError("unreachable")


def _no_answer(url: str, timeout: float, error: Exception) -> ClusterRuntimeError:
    return ClusterRuntimeError(
        f"The metadata server of Google Cloud did not respond within {timeout:g} s, or refused the request.",
        received={"url": url, "error": str(error)},
        hint="Run the script on a machine of Google Cloud, or set the variables yourself, for example:\n"
        "TPU_WORKER_HOSTNAMES=host0,host1 TPU_WORKER_ID=0",
    )
