"""`TPUClusterResolver`: the workers of TPUs, for JAX and PyTorch on their hosts, and for TensorFlow from afar."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kdist.cluster.cloud_tpu import CloudTPU, node_config, told_name
from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.errors import ClusterRuntimeError
from kdist.cluster.metadata_server import Fetch, fetch_metadata
from kdist.cluster.process_variables import ProcessClusterResolver, ProcessLayout
from kdist.cluster.resolver import format_master, require
from kdist.cluster.tpu_slice import TPUSlice, describes_slice, read_slice, variables_of_metadata


@dataclasses.dataclass(frozen=True)
class TPUSystemMetadata:
    """What is known of a system of TPUs before its devices are opened.

    Args:
        num_cores: How many devices there are; 0 where it is not known.
        num_hosts: How many workers there are.
        num_of_cores_per_host: How many devices each has; 0 where it is not known.
        topology: The chips of a slice along each axis, such as "2x2x4"; `None` where it is not known.
        devices: Empty: only the backend knows the names of its devices.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: str | None
    devices: tuple[Any, ...] = ()


class TPUClusterResolver(ProcessClusterResolver):
    """Tells which TPUs there are, and which worker this process is.

    Without `tpu`, the first of these that is there is taken: the variables of the TPU runtime
    (`TPU_WORKER_HOSTNAMES`, `TPU_WORKER_ID`), those of TensorFlow (`KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS`, `TPU_NAME`,
    `TPU_CONFIG`), the metadata server of the TPU VM. On the hosts of a slice every process is a worker: worker 0 of
    slice 0 is the chief, and several slices are joined by `MEGASCALE_NUM_SLICES`, `MEGASCALE_SLICE_ID` and
    `MEGASCALE_COORDINATOR_ADDRESS`; a name changes nothing there. Elsewhere a TPU that is named, and anywhere one that
    is given by address, is reached over the network, which TensorFlow alone can: then this process is the only
    worker, and `cluster_spec` has the TPU's own.

    Args:
        tpu: The TPU's name, or its address (`grpc://10.240.1.2:8470`), or "local" for that of this machine alone.
        zone: The TPU's zone; by default this machine's.
        project: The TPU's project; by default this machine's.
        job_name: The job that the TPU's workers belong to.
        coordinator_name: A job that is added to the cluster, for the task at `coordinator_address`.
        coordinator_address: The address of that task.
        credentials: Google's credentials; "default" for those of the machine.
        service: The client of Cloud TPU's API; by default one is made.
        discovery_url: Where the API is described; the variable `TPU_API_DISCOVERY_URL` comes first.
        environ: The environment to read; by default the process's own.
        fetch: Asks the metadata server; by default over the network, for a few seconds.

    Raises:
        ClusterConfigError: If there is no TPU, or a variable is wrong. It is a `ValueError`.
        ClusterRuntimeError: If the metadata server does not answer. It is that, and a `RuntimeError`.

    Example:

    >>> from kdist.cluster import TPUClusterResolver
    >>> resolver = TPUClusterResolver(environ={
    ...     "TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2,t-3", "TPU_WORKER_ID": "2", "TPU_ACCELERATOR_TYPE": "v4-32"})
    >>> resolver.task_id, resolver.master(), resolver.num_accelerators()
    (2, 't-0:8482', {'TPU': 4})
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        super().__init__(environ=environ)
        require(
            not coordinator_name or bool(coordinator_address),
            "A coordinator must have an address; kdist starts no server for it.",
            'Pass coordinator_address="host0:2222".',
            coordinator_name=coordinator_name,
        )
        # A machine's metadata stays as it is.
        self._fetch = fetch or functools.cache(functools.partial(fetch_metadata, environ=self._environ))
        self._job = job_name
        self._task_type = job_name
        self._coordinator = {coordinator_name: [coordinator_address]} if coordinator_name else {}
        self._remote: CloudTPU | None = None
        name = told_name(tpu, self._environ) if tpu or not describes_slice(self._environ) else None
        self._is_local = name == "local"
        if name and not self._is_local and not self._runs_on_hosts(name):
            config = node_config(self._environ)
            self._remote = CloudTPU(
                name,
                project or config.get("project"),
                zone or config.get("zone"),
                credentials,
                service,
                self._environ.get("TPU_API_DISCOVERY_URL") or discovery_url,
                self._fetch,
            )
        else:
            self._slice(self._environ)  # scripts learn from an error here that there is no TPU

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """Makes a resolver and asks it who takes part. The devices are opened by the strategy.

        Args:
            tpu: As in the constructor.
            zone: As in the constructor.
            project: As in the constructor.

        Returns:
            A `TPUClusterResolver`.

        Raises:
            ClusterConfigError: If there is no TPU, or it is not ready.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        resolver.cluster_spec()
        return resolver

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # which task it is, Google may have to be asked

    def _runs_on_hosts(self, name: str) -> bool:
        """Whether this machine is a host of the TPU that is named; then every host runs the script."""
        if "://" in name or describes_slice(self._environ):
            return "://" not in name
        try:
            return self._fetch("instance/attributes/agent-worker-number") is not None
        except ClusterRuntimeError:
            return False

    def _slice(self, environ: Mapping[str, str]) -> TPUSlice | None:
        """Returns the slice of which this machine is a host, `None` where the TPU is elsewhere."""
        if self._remote is not None:
            return None
        if self._is_local:
            here = read_slice(environ)
            return dataclasses.replace(here, hosts=("localhost",), worker_id=0, num_slices=1, slice_id=0)
        if describes_slice(environ):
            return read_slice(environ)
        several = {name: value for name, value in environ.items() if name.startswith("MEGASCALE_")}
        return read_slice(variables_of_metadata(self._fetch) | several)

    def read_layout(self, environ: Mapping[str, str]) -> ProcessLayout:
        """Reads the workers that run this script; see the base class."""
        found = self._slice(environ)
        if found is None:
            return ProcessLayout(1, 0, (None,))
        host = found.hosts[found.worker_id]
        return ProcessLayout(
            found.num_workers,
            found.worker_index,
            found.addresses,
            found.hosts[: found.worker_id].count(host),
            found.hosts.count(host),
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the TPU's workers, as far as their addresses are known.

        Returns:
            A `ClusterSpec` with the one job, and the coordinator's. It is empty for a single host.

        Raises:
            ClusterRuntimeError: If the TPU is not ready, or Google does not answer. It is a `RuntimeError`.
        """
        tasks = self._remote.addresses() if self._remote else self.layout.addresses
        known = {index: address for index, address in enumerate(tasks) if address is not None}
        return ClusterSpec(({self._job: known} if known else {}) | self._coordinator)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of worker 0, or of the task that is named; an empty string for a single host."""
        if self._remote is None:
            return super().master(task_type, task_id, rpc_layer)
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        return format_master(
            self.cluster_spec().task_address(str(task_type), task_id or 0), rpc_layer or "grpc"
        )

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Returns how many TPU devices each worker has, as the type of the TPU says; no device is asked.

        Args:
            task_type: Unused: all workers have as many.
            task_id: Unused, likewise.
            config_proto: Unused; accepted as `tf.distribute` does.

        Returns:
            A dictionary such as `{"TPU": 4}`, empty where the type is not known.
        """
        found = self._slice(self._environ)
        return {"TPU": found.devices} if found is not None and found.devices else {}

    @property
    def is_remote(self) -> bool:
        """Whether the TPU is reached over the network, so that its hosts do not run this script."""
        return self._remote is not None

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Returns what is known of the TPUs before their devices are opened.

        Returns:
            A `TPUSystemMetadata`.
        """
        found = self._slice(self._environ)
        if found is None:
            return TPUSystemMetadata(0, self.cluster_spec().num_tasks(self._job), 0, None)
        devices = found.devices or 0
        return TPUSystemMetadata(
            devices * found.num_workers, found.num_workers, devices, found.topology or None
        )

    def get_master(self) -> str:
        """Returns what `master()` returns."""
        return self.master()

    def get_job_name(self) -> str:
        """Returns the job that the TPU's workers belong to."""
        return self._job

    def get_coordination_service_leader(self) -> str:
        """Returns TensorFlow's name of the task that leads."""
        return f"/job:{self._job}/task:0"

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Does nothing: TensorFlow calls it on its own resolver.

        Args:
            serialized_tpu_topology: Unused.
        """

    @property
    def tpu_hardware_feature(self) -> None:
        """`None`: TensorFlow's own resolver alone knows it."""
        return None

    def __enter__(self) -> TPUClusterResolver:
        return self

    def __exit__(self, *_: object) -> None:
        return None
