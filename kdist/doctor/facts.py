"""What one worker knows of itself and its machine before it has met the others. No framework is imported for it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.cluster import (
    Cluster,
    check_port_free,
    environment,
    keras_backend_choice,
    split_address,
    survey,
    visible_gpus,
)
from kdist.errors import ClusterConfigError
from kdist.launch.info import version_of
from kdist.launch.plan import THREADS, usable_cores

_PACKAGES = ("kdist", "keras", "numpy")
_RESOLVING = 5.0  # seconds for all names; a name server that does not answer takes longer


@dataclasses.dataclass(frozen=True)
class Facts:
    """What one worker has found, as JSON values: they travel.

    Args:
        name: How messages name the worker.
        host: Its machine.
        python: The version of Python.
        executable: Which Python that is.
        versions: The version of each package, or "not installed".
        backend: The Keras backend, and why it is that one.
        sources: Each source that describes a cluster, what it says, and whether it won.
        resolved: The number of each host of the cluster.
        unresolved: The hosts whose number could not be found, and why.
        address: Where the worker is to listen; empty where nobody says so.
        port: Why it cannot listen there; empty where it can.
        cores: Which cores it may use; `mpirun` and Slurm give each worker its own.
        threads: On how many it computes.
        open_files: How many files it may have open; -1 for as many as it likes.
        shared_memory: Bytes of /dev/shm; -1 where there is none.
        gpus: How many GPUs the driver shows it.
        token: A fingerprint of the job's secret; empty without one.
        import_error: Why Keras or the framework could not be imported.
        devices: What the framework computes on, one entry a replica.
        accelerators: How many of these are none of the CPU's.
    """

    name: str
    host: str
    python: str
    executable: str
    versions: dict[str, str]
    backend: tuple[str, str]
    sources: list[tuple[str, str, bool]]
    resolved: dict[str, str]
    unresolved: dict[str, str]
    address: str
    port: str
    cores: list[int]
    threads: int
    open_files: int
    shared_memory: int
    gpus: int
    token: str
    import_error: str = ""
    devices: tuple[str, ...] = ()
    accelerators: int = 0

    def of_another(self, text: str) -> Facts:
        """Reads another worker's. What its version of kdist does not tell is taken to be as here."""
        said, known = json.loads(text), {field.name for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: said[name] for name in known & said.keys()})


def gather(cluster: Cluster, environ: Mapping[str, str] | None = None) -> Facts:
    """Returns the facts of this process, which is a worker of `cluster`."""
    backend, why = keras_backend_choice(environ)
    hosts = list(dict.fromkeys(split_address(address)[0] for address in cluster.addresses if address))
    resolved, unresolved = resolve(hosts)
    token = environment.cluster_token(environ)
    address = cluster.addresses[cluster.worker_index] or ""
    cores = usable_cores()
    return Facts(
        name=f"worker {cluster.worker_index}",
        host=socket.gethostname(),
        python=platform.python_version(),
        executable=sys.executable,
        versions={package: version_of(package) for package in (*_PACKAGES, backend)},
        backend=(backend, why),
        sources=[(one.source, one.says, one.won) for one in survey(environ)],
        resolved=resolved,
        unresolved=unresolved,
        address=address,
        port=port_problem("" if cluster.coordinator_taken and cluster.is_chief else address),
        cores=cores,
        threads=_threads(len(cores), environ),
        open_files=_open_files(),
        shared_memory=_shared_memory(),
        gpus=len(visible_gpus(environ)),
        token=hashlib.sha256(token.encode()).hexdigest()[:8] if token else "",
    )


def resolve(
    hosts: Sequence[str], timeout: float = _RESOLVING, look_up: Callable[..., Any] = socket.getaddrinfo
) -> tuple[dict[str, str], dict[str, str]]:
    """Looks up the numbers of hosts, all at once; returns those that were found, and why others were not."""
    found: dict[str, str] = {}
    failed: dict[str, str] = {}

    def ask(host: str) -> None:
        try:
            found[host] = look_up(host, None, type=socket.SOCK_STREAM)[0][-1][0]
        except (OSError, UnicodeError) as error:
            failed[host] = getattr(error, "strerror", None) or str(error)

    threads = [threading.Thread(target=ask, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = {host: f"no response within {timeout:g} s" for host in hosts if host not in {**found, **failed}}
    return dict(found), {**failed, **late}


def port_problem(address: str) -> str:
    """Says why this process cannot listen at its address; nothing where it can, or need not."""
    if not address:
        return ""
    try:
        check_port_free(address)
    except ClusterConfigError as error:
        return "" if "resolved" in error.problem else error.problem  # the names have a line of their own
    return ""


def reach(address: str | None, timeout: float = 2.0) -> str:
    """Says in a sentence what comes of a connection to an address."""
    if address is None:
        return ""
    try:
        socket.create_connection(split_address(address), timeout).close()
    except ConnectionRefusedError:
        return f"No process listens at {address}."
    except OSError as error:
        return f"Cannot connect to {address} ({error}): a firewall may block it."
    return f"{address} is reachable."


def _threads(cores: int, environ: Mapping[str, str] | None) -> int:
    chosen = [environment.get(name, environ=environ) or "" for name in THREADS]
    numbers = [int(text) for text in chosen if text.isascii() and text.isdigit() and int(text) > 0]
    return min(numbers, default=cores)


def _open_files() -> int:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return -1 if limit == resource.RLIM_INFINITY else limit
    return -1


def _shared_memory() -> int:
    import shutil

    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").total
    return -1
