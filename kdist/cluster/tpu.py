"""`TPUClusterResolver`, which finds the workers on the hosts of TPU slices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.metadata_server import Fetch, fetch_metadata
from kdist.cluster.process_variables import ProcessClusterResolver, ProcessLayout, Variables
from kdist.cluster.resolver import require
from kdist.cluster.tpu_slice import TPUSlice, describes_slice, read_slice, variables_of_metadata


@dataclasses.dataclass(frozen=True)
class TPUSystemMetadata:
    """The properties of a TPU system that are available before its devices are opened.

    Args:
        num_cores: The total number of devices, or 0 if it is unknown.
        num_hosts: The number of workers.
        num_of_cores_per_host: The number of devices per worker, or 0 if it is unknown.
        topology: The chips of a slice along each axis, such as "2x2x4", or `None` if it is unknown.
        devices: Always empty, because only the backend has the names of its devices.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: str | None
    devices: tuple[Any, ...] = ()


class TPUClusterResolver(ProcessClusterResolver):
    """Finds the workers of a TPU and the index of this worker.

    Start the script on every host of the TPU. Each process is a worker, and worker 0 of slice 0 is the chief.
    The resolver reads the variables of the TPU runtime (`TPU_WORKER_HOSTNAMES`, `TPU_WORKER_ID`), or else the
    metadata server of the TPU VM. Several slices need `MEGASCALE_NUM_SLICES`, `MEGASCALE_SLICE_ID` and
    `MEGASCALE_COORDINATOR_ADDRESS`. Network addresses are errors, because no backend supports remote TPUs.

    Args:
        tpu: "local" to use only the TPU of this machine. Any other name is ignored.
        zone: Ignored. Accepted for compatibility with `tf.distribute`.
        project: Ignored, like `zone`.
        job_name: The job of the TPU workers.
        coordinator_name: A job to add to the cluster, with one task at `coordinator_address`.
        coordinator_address: The address of that task.
        credentials: Ignored, like `zone`.
        service: Ignored, like `zone`.
        discovery_url: Ignored, like `zone`.
        environ: The environment variables. Defaults to `os.environ`.
        fetch: A function that reads from the metadata server. By default, it sends requests over the network.

    Raises:
        ClusterConfigError: If there is no TPU, or a variable is invalid. It is also a `ValueError`.
        ClusterRuntimeError: If the metadata server does not respond. It is also a `RuntimeError`.

    Example:

    >>> from kdist.cluster_resolver import TPUClusterResolver
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
            "`coordinator_name` was passed without `coordinator_address`.",
            'Pass the address of the coordinator, for example: coordinator_address="host0:2222"',
            coordinator_name=coordinator_name,
        )
        names = [str(one) for one in tpu] if isinstance(tpu, (list, tuple)) else [str(tpu or "")]
        require(
            len(names) == 1,
            "`tpu` does not name exactly one TPU.",
            'Pass one name, for example: tpu="local"',
            tpu=tpu,
        )
        require(
            "://" not in names[0],
            "`tpu` is a network address, but no backend can reach a TPU over the network.",
            "Start the script on every host of the TPU, with TPUClusterResolver().",
            tpu=tpu,
        )
        # The metadata of a machine does not change.
        self._fetch = fetch or functools.cache(functools.partial(fetch_metadata, environ=self._environ))
        self._job = job_name
        self._task_type = job_name
        self._coordinator = {coordinator_name: [coordinator_address]} if coordinator_name else {}
        self._is_local = names[0] == "local"
        self._slice(self._environ)  # scripts detect a missing TPU by this error

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """Creates a resolver and reads its cluster. The strategy opens the devices later.

        Args:
            tpu: See the constructor.
            zone: See the constructor.
            project: See the constructor.

        Returns:
            A `TPUClusterResolver`.

        Raises:
            ClusterConfigError: If there is no TPU.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        resolver.cluster_spec()
        return resolver

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # without the task, which may need a request to the metadata server

    def _slice(self, environ: Mapping[str, str]) -> TPUSlice:
        """Returns the slice of this machine."""
        if self._is_local:
            here = read_slice(environ)
            return dataclasses.replace(here, hosts=("localhost",), worker_id=0, num_slices=1, slice_id=0)
        if describes_slice(environ):
            return read_slice(environ)
        several = {name: value for name, value in environ.items() if name.startswith("MEGASCALE_")}
        return read_slice(variables_of_metadata(self._fetch) | several)

    def _read(self, variables: Variables) -> ProcessLayout:
        found = self._slice(variables.environ)
        host = found.hosts[found.worker_id]
        return ProcessLayout(
            found.num_workers,
            found.worker_index,
            found.addresses,
            found.hosts[: found.worker_id].count(host),
            found.hosts.count(host),
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the TPU workers with a known address.

        Returns:
            A `ClusterSpec` with their job, which is missing for a single host, and the coordinator's job.

        Raises:
            ClusterRuntimeError: If the metadata server does not respond. It is also a `RuntimeError`.
        """
        known = {index: address for index, address in enumerate(self.layout.addresses) if address is not None}
        return ClusterSpec(({self._job: known} if known else {}) | self._coordinator)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Returns the number of TPU devices per worker, from the TPU type, without opening a device.

        Args:
            task_type: Ignored, because all workers have the same number.
            task_id: Ignored, for the same reason.
            config_proto: Ignored. Accepted for compatibility with `tf.distribute`.

        Returns:
            A dictionary such as `{"TPU": 4}`. It is empty if the number is unknown.
        """
        found = self._slice(self._environ)
        return {"TPU": found.devices} if found.devices else {}

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Returns the properties of the TPU system, without opening its devices.

        Returns:
            A `TPUSystemMetadata`.
        """
        found = self._slice(self._environ)
        devices = found.devices or 0
        return TPUSystemMetadata(
            devices * found.num_workers, found.num_workers, devices, found.topology or None
        )

    def get_master(self) -> str:
        """Returns the same address as `master()`."""
        return self.master()

    def get_job_name(self) -> str:
        """Returns the job of the TPU workers."""
        return self._job

    def get_coordination_service_leader(self) -> str:
        """Returns the TensorFlow name of the leading task."""
        return f"/job:{self._job}/task:0"

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Does nothing. Exists for compatibility with TensorFlow's resolver.

        Args:
            serialized_tpu_topology: Ignored.
        """

    @property
    def tpu_hardware_feature(self) -> None:
        """Always `None`. Only TensorFlow's resolver provides a value."""
        return None

    def __enter__(self) -> TPUClusterResolver:
        return self

    def __exit__(self, *_: object) -> None:
        return None
