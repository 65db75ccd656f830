"""What Google Cloud tells a machine about itself: the metadata server, asked with a short patience."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from kdist.cluster.errors import ClusterRuntimeError

# Returns the text at a path such as "instance/zone", or None where the server has none.
Fetch = Callable[[str], "str | None"]

# The server's documented number: its name, metadata.google.internal, may take a resolver elsewhere long to refuse.
_HOST = "169.254.169.254"
_TIMEOUT = 2.0
_TRIES = 3
_MOST_BYTES = 1 << 20


def fetch_metadata(path: str, environ: Mapping[str, str], timeout: float = _TIMEOUT) -> str | None:
    """Asks the metadata server of the machine on which this process runs.

    Args:
        path: What to ask for, below `computeMetadata/v1`.
        environ: The environment, in which `GCE_METADATA_HOST` or `GCE_METADATA_IP` may name another server.
        timeout: How many seconds to wait for an answer.

    Returns:
        The text, or `None` where the server has nothing of that name.

    Raises:
        ClusterRuntimeError: If there is no such server, or it does not answer in time. It is a `RuntimeError`.

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
    # A proxy would answer for another machine.
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
            time.sleep(0.2)  # it is busy, as at the start of a machine
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
