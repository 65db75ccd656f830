"""Resolvers for launchers that set each process's index and the first address: torchrun, MPI, Keras."""

from __future__ import annotations

import abc
import dataclasses
import zlib
from collections.abc import Iterable, Mapping

from kdist.cluster.addresses import join_address, split_address
from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.resolver import ClusterResolver, Task, format_master, require

KERAS_NAMES = tuple(f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID"))
MOST_WORKERS = 100_000  # a WORLD_SIZE of 999999999 is a mistake, and its list of addresses would be too large


@dataclasses.dataclass(frozen=True)
class ProcessLayout:
    """The contents of a launcher's variables: the number of workers, the addresses, this worker's index."""

    num_workers: int
    worker_index: int
    addresses: tuple[str | None, ...]
    local_rank: int = 0
    local_workers: int = 1
    coordinator_taken: bool = False

    @property
    def coordinator(self) -> str | None:
        """The address of worker 0, or `None` if it is unknown."""
        return self.addresses[0]


class ProcessClusterResolver(ClusterResolver):
    """Base class of resolvers for sources that number the processes. Every process is a worker."""

    _task_type: str | None = "worker"  # fixed, so that it is available without reading a variable
    _HINT = ""  # of all errors about the variables

    def __init__(self, rpc_layer: str | None = None, *, environ: Mapping[str, str] | None = None) -> None:
        self._rpc_layer = rpc_layer
        if environ is not None:
            self._environ = environ

    def _described(self) -> Task:
        return Task(task_type="worker", task_id=self.layout.worker_index)

    @abc.abstractmethod
    def _read(self, variables: Variables) -> ProcessLayout:
        """Reads and validates the variables of the source."""

    @property
    def layout(self) -> ProcessLayout:
        """The current contents of the variables, read at each access. An error names the invalid variable."""
        return self._read(Variables(self._environ, self._HINT))

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster, with the addresses that the variables contain.

        Returns:
            A `ClusterSpec` with the job "worker". It is sparse if only the first address is known, and empty
            for a single worker without an address.
        """
        known = {i: address for i, address in enumerate(self.layout.addresses) if address is not None}
        return ClusterSpec({"worker": known} if known else {})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the given task. Defaults to worker 0."""
        if task_type is not None and task_id is not None:
            return format_master(
                self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer
            )
        coordinator = self.layout.coordinator
        return format_master(coordinator, rpc_layer or self.rpc_layer) if coordinator else ""


@dataclasses.dataclass(frozen=True)
class Variables:
    """Reads and validates the variables of a source. Errors contain their names and the hint of the source."""

    environ: Mapping[str, str]
    hint: str

    def text(self, name: str) -> str:
        """Returns the value of a variable without spaces around it, or "" if it is not set."""
        return self.environ.get(name, "").strip()

    def require(self, condition: bool, problem: str, **received: object) -> None:
        """Raises `ClusterConfigError` unless a condition holds."""
        require(condition, problem, self.hint, **received)

    def count(self, name: str, default: int | None = None) -> int:
        given = self.environ.get(name)
        if given is None and default is not None:
            return default
        self.require(given is not None, f"`{name}` is not set.", **{name: given})
        text = self.text(name)
        valid = text.isascii() and text.isdigit() and len(text) < 10
        self.require(valid, f"`{name}` is not a non-negative integer.", **{name: given})
        return int(text)

    def index(self, index_name: str, count_name: str) -> tuple[int, int]:
        """Reads the index of a process and the number of processes, and checks that they are consistent."""
        index, count = self.count(index_name), self.count(count_name)
        in_range = 1 <= count <= MOST_WORKERS
        self.require(in_range, f"`{count_name}` is not between 1 and {MOST_WORKERS}.", **{count_name: count})
        received = {index_name: index, count_name: count}
        self.require(index < count, f"`{index_name}` is not smaller than `{count_name}`.", **received)
        return index, count

    def place(
        self, index_name: str, count_name: str, local_index_name: str, local_count_name: str
    ) -> tuple[int, int, int, int]:
        """Reads the index, count, local index and local count, and checks that they are consistent."""
        index, count = self.index(index_name, count_name)
        local_index = self.count(local_index_name, default=0)
        local_count = self.count(local_count_name, default=max(1, local_index + 1))
        self.require(
            local_index < local_count <= count,
            f"The variables do not match: `{local_index_name}` must be smaller than `{local_count_name}`, which must "
            f"be at most `{count_name}`.",
            **{local_index_name: local_index, local_count_name: local_count, count_name: count},
        )
        return index, count, local_index, local_count

    def address(self, host_name: str = "MASTER_ADDR", port_name: str = "MASTER_PORT") -> str:
        """Reads the address of worker 0 from two variables with its host and port."""
        host = self.text(host_name)
        received = {host_name: self.environ.get(host_name)}
        self.require(bool(host), f"`{host_name}`, the host of worker 0, is not set.", **received)
        port = self.count(port_name)
        address = join_address(host, port) if not host.startswith("[") else f"{host}:{port}"
        split_address(address, f"{host_name}:{port_name}")
        return address

    def address_or(self, host: str, job_names: Iterable[str]) -> str:
        """Like `address`, but the default is `host`, with a port derived from names of the job."""
        given = {"MASTER_ADDR": host, "MASTER_PORT": str(stable_port(job_names)), **self.environ}
        return Variables(given, self.hint).address()


class TorchrunClusterResolver(ProcessClusterResolver):
    """Reads the cluster from the variables of torchrun, Kubeflow's `PyTorchJob` and Ray's `TorchTrainer`.

    These are `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. With several workers per machine,
    `LOCAL_RANK` and `LOCAL_WORLD_SIZE` are also set. They contain only the address of worker 0. To get the
    other addresses, use `kdist.control.rendezvous.connect_workers`.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster_resolver import TorchrunClusterResolver
    >>> resolver = TorchrunClusterResolver(
    ...     environ={"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"})
    >>> resolver.task_type, resolver.task_id, resolver.master()
    ('worker', 1, 'host0:29500')
    """

    _HINT = "Start the script with torchrun:\ntorchrun --nproc-per-node=2 train.py"

    def _read(self, variables: Variables) -> ProcessLayout:
        environ = variables.environ
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        index, count, local_index, local_count = variables.place(*names)
        first = variables.address() if count > 1 else None
        # torchrun's agent listens at MASTER_PORT itself, so no worker can. The process group of Ray's
        # TorchTrainer does the same, and only Ray sets both of the other variables.
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
        taken = count > 1 and (agent or {"RAY_RAYLET_PID", "ACCELERATE_TORCH_DEVICE"} <= environ.keys())
        return ProcessLayout(count, index, (first, *[None] * (count - 1)), local_index, local_count, taken)


class MPIClusterResolver(ProcessClusterResolver):
    """Reads the cluster from the variables that `mpirun` sets, with Open MPI or PMI.

    MPICH, Intel MPI and similar packages use PMI. MPI does not provide the address of rank 0. On one machine,
    kdist uses a loopback port derived from the job's name. On several machines, set `MASTER_ADDR` and
    `MASTER_PORT`. Without them, kdist uses the machine of `mpirun`, if Open MPI 4 provides it.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster_resolver import MPIClusterResolver
    >>> resolver = MPIClusterResolver(environ={
    ...     "PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "2222"})
    >>> resolver.task_id, resolver.master()
    (1, 'host0:2222')
    """

    _HINT = "Pass the address of rank 0:\nmpirun -x MASTER_ADDR=host0 -x MASTER_PORT=2222 python train.py"
    _OPEN_MPI = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    _PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    _JOB_NAMES = (
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "PMI_JOBID",
        "PMI_PORT",
        "SLURM_JOB_ID",
        "PBS_JOBID",
    )

    def _read(self, variables: Variables) -> ProcessLayout:
        environ = variables.environ
        names = self._OPEN_MPI if any(name in environ for name in self._OPEN_MPI[:2]) else self._PMI
        index, count, local_index, local_count = variables.place(*names)
        if count == 1:
            return ProcessLayout(count, index, (None,), local_index, local_count)
        if local_count == count and names[3] in environ:
            host = "127.0.0.1"
        else:
            # "1234.0;tcp://10.0.0.1,172.17.0.1:39000" contains the interfaces of the machine where mpirun runs
            _, _, where = environ.get("OMPI_MCA_orte_hnp_uri", "").partition("tcp://")
            host = where.partition(",")[0].partition(":")[0].partition(";")[0]
        variables.require(
            bool(host) or "MASTER_ADDR" in environ,
            "The address of rank 0 is unknown. MPI does not set it on several machines.",
            MASTER_ADDR=None,
        )
        first = variables.address_or(host, (environ.get(name, "") for name in self._JOB_NAMES))
        return ProcessLayout(count, index, (first, *[None] * (count - 1)), local_index, local_count)


def stable_port(names: Iterable[str]) -> int:
    """Returns a port derived from names of the job. It is the same in all processes of the job.

    Other jobs probably get a different port. The port is even, between 20000 and 29998, below the range for
    outgoing connections. The next port stays free for the exchange of addresses.
    """
    return 20000 + 2 * (zlib.crc32("\n".join(names).encode("utf-8", "surrogateescape")) % 5000)


class KerasClusterResolver(ProcessClusterResolver):
    """Reads the cluster from the variables of `keras.distribution.initialize`.

    These are `KERAS_DISTRIBUTION_JOB_ADDRESSES` (the address of worker 0, or one address per process,
    separated by commas), `KERAS_DISTRIBUTION_NUM_PROCESSES` and `KERAS_DISTRIBUTION_PROCESS_ID`.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster_resolver import KerasClusterResolver
    >>> resolver = KerasClusterResolver(environ={
    ...     "KERAS_DISTRIBUTION_JOB_ADDRESSES": "host0:2222,host1:2222",
    ...     "KERAS_DISTRIBUTION_PROCESS_ID": "1"})
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['host0:2222', 'host1:2222']})
    """

    _HINT = (
        "Set the variables of each process, for example:\n"
        "KERAS_DISTRIBUTION_JOB_ADDRESSES=host0:2222 KERAS_DISTRIBUTION_NUM_PROCESSES=2 "
        "KERAS_DISTRIBUTION_PROCESS_ID=0"
    )

    def _read(self, variables: Variables) -> ProcessLayout:
        addresses_name, count_name, index_name = KERAS_NAMES
        listed = variables.text(addresses_name)
        addresses = tuple(part.strip() for part in listed.split(",")) if listed else ()
        for position, address in enumerate(addresses):
            split_address(address, f"{addresses_name}[{position}]")
        given = dict(variables.environ)
        if len(addresses) != 1:
            given.setdefault(count_name, str(max(1, len(addresses))))
        if given.get(count_name, "").strip() == "1":
            given.setdefault(index_name, "0")
        index, count = Variables(given, self._HINT).index(index_name, count_name)
        variables.require(
            len(addresses) in ((0, 1) if count == 1 else (1, count))
            and len(set(addresses)) == len(addresses),
            f"`{addresses_name}` contains neither one address nor a different address for each process.",
            **{addresses_name: listed, count_name: count},
        )
        return ProcessLayout(count, index, (*addresses, *[None] * (count - len(addresses))))
