"""Reads the description of this machine's TPU slice: its hosts, and the index of this host.

On Kubernetes, the TPU runtime sets environment variables. On a TPU VM, kdist reads the metadata server and
converts its entries into these variables. With one process per host, each host is a worker. The hosts are
numbered slice by slice.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from kdist.cluster.addresses import join_address, split_address
from kdist.cluster.errors import ClusterRuntimeError
from kdist.cluster.metadata_server import Fetch
from kdist.cluster.process_variables import MOST_WORKERS, Variables
from kdist.cluster.resolver import require

# JAX connects to this port of the first host. The TPU runtime uses 8431 and above, and 8470 to 8480.
PORT = 8482
HOSTS, PROCESSES = "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"
SLICES, SLICE, FIRST = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"
NAMES = (HOSTS, PROCESSES, "TPU_WORKER_ID", SLICES, SLICE, FIRST)
_HINT = "Set the variables of the TPU runtime, for example:\nTPU_WORKER_HOSTNAMES=host0,host1 TPU_WORKER_ID=0"
_SLICES_HINT = f"Set the variables of the slices, for example:\n{SLICES}=2 {SLICE}=0 {FIRST}=slice0-host0"
# Names of the metadata server that differ from the names of the variables.
_OTHER_NAMES = {
    "ACCELERATOR_TYPE": "TPU_ACCELERATOR_TYPE",
    "CHIPS_PER_HOST_BOUNDS": "TPU_CHIPS_PER_HOST_BOUNDS",
    "TOPOLOGY": "TPU_TOPOLOGY",
    "WORKER_ID": "TPU_WORKER_ID",
}
# Devices per chip, and the ratio of the number in a type such as "v4-32" to the number of chips.
_GENERATIONS = {
    "v2": (2, 2),
    "v3": (2, 2),
    "v4": (1, 2),
    "v5p": (1, 2),
    "v5e": (1, 1),
    "v5litepod": (1, 1),
    "v6e": (1, 1),
    "v7x": (2, 2),
}


@dataclasses.dataclass(frozen=True)
class TPUSlice:
    """A slice of TPUs, as one of its hosts sees it."""

    # The hosts of the slice, in order. A host is repeated if it runs several processes.
    hosts: tuple[str, ...]
    worker_id: int  # the index of this process in `hosts`
    num_slices: int  # the number of slices that train together
    slice_id: int
    first_host: str  # of the first slice
    topology: str  # the chips along each axis, such as "2x2x4"; empty if it is unknown
    devices: int | None  # the number of devices per process, or `None` if it is unknown

    @property
    def num_workers(self) -> int:
        return len(self.hosts) * self.num_slices

    @property
    def worker_index(self) -> int:
        """The index of this worker among the workers of all slices."""
        return self.slice_id * len(self.hosts) + self.worker_id

    @property
    def addresses(self) -> tuple[str | None, ...]:
        """The workers' addresses. With several slices, only the first, because all lists must be equal."""
        if self.num_workers == 1:
            return (None,)
        if self.num_slices > 1:
            return (join_address(self.first_host, PORT), *[None] * (self.num_workers - 1))
        seen = [self.hosts[:position].count(host) for position, host in enumerate(self.hosts)]
        return tuple(join_address(host, PORT + others) for host, others in zip(self.hosts, seen, strict=True))


def describes_slice(environ: Mapping[str, str]) -> bool:
    """Returns whether the environment describes a slice, so that the metadata server is not needed."""
    if environ.get(HOSTS, "").strip() or environ.get(PROCESSES, "").strip():
        return True
    # JAX also sets TPU_SKIP_MDS_QUERY on machines without a TPU, so another variable must be set.
    alone = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID")
    return bool(environ.get("TPU_SKIP_MDS_QUERY")) and any(environ.get(name) for name in alone)


def read_slice(environ: Mapping[str, str]) -> TPUSlice:
    """Reads the variables of the TPU runtime.

    Raises:
        ClusterConfigError: If a variable is missing or invalid. The message contains its name.

    Example:

    >>> from kdist.cluster.tpu_slice import read_slice
    >>> found = read_slice({"TPU_WORKER_HOSTNAMES": "t-0,t-1", "TPU_WORKER_ID": "1",
    ...                     "TPU_ACCELERATOR_TYPE": "v4-16"})
    >>> found.worker_index, found.num_workers, found.addresses[0], found.devices
    (1, 2, 't-0:8482', 4)
    """
    hosts = _read_hosts(environ)
    # With several processes per host, torch_xla sets this index of the process. Otherwise, use the host's.
    named = "CLOUD_TPU_TASK_ID" if environ.get("CLOUD_TPU_TASK_ID") else "TPU_WORKER_ID"
    worker_id = Variables(environ, _HINT).count(named, default=0 if len(hosts) == 1 else None)
    require(
        worker_id < len(hosts),
        f"`{named}` is not smaller than the number of hosts.",
        _HINT,
        **{named: worker_id, "hosts": hosts},
    )
    num_slices, slice_id, first = 1, 0, hosts[0]
    if environ.get(SLICES, "").strip() not in ("", "1"):
        slice_id, num_slices = Variables(environ, _SLICES_HINT).index(SLICE, SLICES)
        given = environ.get(FIRST, "").strip()
        require(bool(given), f"`{FIRST}`, the first host, is not set.", _SLICES_HINT, **{FIRST: given})
        first = _host_of(given, FIRST)  # without its port, which is for the runtime
    require(
        num_slices * len(hosts) <= MOST_WORKERS,
        f"The slices have more than {MOST_WORKERS} hosts.",
        _SLICES_HINT,
        **{SLICES: num_slices},
    )
    kind = environ.get("TPU_ACCELERATOR_TYPE", "").strip()
    return TPUSlice(
        hosts,
        worker_id,
        num_slices,
        slice_id,
        first,
        environ.get("TPU_TOPOLOGY", "").strip(),
        _count_devices(kind, len(hosts), _read_chips(environ)),
    )


def _read_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    name = PROCESSES if environ.get(PROCESSES, "").strip() else HOSTS
    listed = environ.get(name, "").strip() or "localhost"
    hosts = tuple(_host_of(part.strip(), name) for part in listed.split(","))
    if name == PROCESSES and not environ.get("CLOUD_TPU_TASK_ID"):
        hosts = tuple(dict.fromkeys(hosts))  # without an index of the process, there is one process per host
    require(
        name == PROCESSES or len(set(hosts)) == len(hosts),
        f"`{name}` contains a host twice.",
        _HINT,
        **{name: listed},
    )
    return hosts


def _host_of(text: str, name: str) -> str:
    """Returns the host of `host` or `host:port`."""
    host = text if re.search(r":\d+$", text) else f"{text}:{PORT}"
    return split_address(host, name)[0]


def _count_devices(kind: str, num_hosts: int, chips: int | None) -> int | None:
    """Returns the number of devices of a process, from its chips or else from a type such as "v4-32"."""
    generation, _, number = kind.lower().removeprefix("tpu").rpartition("-")
    each, counted = _GENERATIONS.get(f"v{generation.removeprefix('v')}", (1, 0))
    if chips is None and counted and re.fullmatch(r"\d{1,6}", number, re.ASCII):
        chips = int(number) // counted // num_hosts
    return chips * each if chips else None


def _read_chips(environ: Mapping[str, str]) -> int | None:
    for name in ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"):
        text = environ.get(name, "").strip()
        if text:
            valid = re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", text, re.ASCII)
            require(
                valid is not None,
                f"`{name}` does not have a form such as 2,2,1.",
                f"Set the number of chips along each axis, for example: {name}=2,2,1",
                **{name: text},
            )
            return math.prod(int(part) for part in text.split(","))
    return None


def variables_of_metadata(fetch: Fetch) -> dict[str, str]:
    """Reads the metadata server of a TPU VM, and returns the equivalent environment variables.

    Raises:
        ClusterRuntimeError: If this machine has no TPU or no metadata server. It is also a `RuntimeError`.
        ClusterConfigError: If a response is invalid.
    """
    number = fetch("instance/attributes/agent-worker-number")
    endpoints = fetch("instance/attributes/worker-network-endpoints")
    if number is None or endpoints is None:
        raise ClusterRuntimeError(
            "This machine is not a TPU VM: its metadata server does not list TPU workers.",
            received={"agent-worker-number": number, "worker-network-endpoints": endpoints},
            hint=_HINT,
        )
    found = parse_tpu_env(fetch("instance/attributes/tpu-env") or "")
    found = {_OTHER_NAMES.get(name, name): value for name, value in found.items()}
    kind = fetch("instance/attributes/accelerator-type")
    if kind:
        found["TPU_ACCELERATOR_TYPE"] = kind
    hosts = ",".join(_endpoint_host(part.strip()) for part in endpoints.split(","))
    # One process per host, so drop the entries for runtimes that start several.
    said = {name: value for name, value in found.items() if name not in (PROCESSES, "CLOUD_TPU_TASK_ID")}
    return said | {HOSTS: hosts, "TPU_WORKER_ID": number}


def _endpoint_host(text: str) -> str:
    """Returns the host of an endpoint: a name, or the address in the older form `name:number:address`."""
    parts = text.split(":")
    require(
        len(parts) in (1, 3) and bool(parts[-1]),
        "An endpoint of the metadata server is neither a host name nor of the form name:number:address.",
        _HINT,
        **{"worker-network-endpoints": text},
    )
    return parts[-1]


def parse_tpu_env(text: str) -> dict[str, str]:
    """Parses `tpu-env` of the metadata server, lines of the form `NAME: 'value'`. Ignores other lines.

    Example:

    >>> from kdist.cluster.tpu_slice import parse_tpu_env
    >>> parse_tpu_env("ACCELERATOR_TYPE: 'v4-32'\\nWORKER_ID: '0'\\n")
    {'ACCELERATOR_TYPE': 'v4-32', 'WORKER_ID': '0'}
    """
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}
