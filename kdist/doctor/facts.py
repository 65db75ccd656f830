"""Facts that a worker collects about itself and its machine before joining, without using a framework."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import shutil
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
_RESOLVING = 5.0  # seconds for all names; a name server that does not respond takes longer


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts about one worker, as JSON values that workers can exchange."""

    name: str  # for messages
    host: str  # of its machine
    python: str  # the version
    executable: str  # of Python
    versions: dict[str, str]  # the version of each package, or "not installed"
    backend: tuple[str, str]  # the Keras backend, and the reason for this choice
    # For each source with variables that are set: its name, its result, and whether kdist uses it.
    sources: list[tuple[str, str, bool]]
    resolved: dict[str, str]  # the IP address of each host in the cluster
    unresolved: dict[str, str]  # the hosts that could not be resolved, and the reasons
    address: str  # at which the worker should listen; empty if it is unknown
    port: str  # the reason why it cannot listen there; empty if it can
    cores: list[int]  # that it may use; `mpirun` and Slurm assign separate cores to each worker
    threads: int  # that compute
    open_files: int  # the maximum number of open files, or -1 if it is unlimited or unknown
    shared_memory: int  # the size of /dev/shm in bytes, or -1 if it does not exist
    gpus: int  # that the process may use
    token: str  # a fingerprint of the job's secret; empty if there is no secret
    import_error: str = ""  # the reason why Keras or the framework cannot be imported
    devices: tuple[str, ...] = ()  # the devices of the framework, one entry per replica
    accelerators: int = 0  # the number of these devices that are not CPUs

    def of_another(self, text: str) -> Facts:
        """Parses the facts of another worker. Fields that its version of kdist lacks keep their values."""
        said, known = json.loads(text), {field.name for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: said[name] for name in known & said.keys()})


def gather(cluster: Cluster, environ: Mapping[str, str] | None = None) -> Facts:
    """Collects the facts about this process, a worker of `cluster`."""
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
    """Resolves hosts in parallel. Returns their IP addresses, and the reasons for hosts that failed."""
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
    """Returns why this process cannot listen at its address, or "" if it can or does not need to."""
    if not address:
        return ""
    try:
        check_port_free(address)
    except ClusterConfigError as error:
        return "" if "resolved" in error.problem else error.problem  # another line of the report covers names
    return ""


def reach(address: str | None, timeout: float = 2.0) -> str:
    """Tries to connect to an address, and returns the result as a sentence."""
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
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").total
    return -1
