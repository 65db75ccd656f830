"""`TPUClusterResolver`: the workers on the hosts of TPU slices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.metadata_server import Fetch, fetch_metadata
from kdist.cluster.process_variables import ProcessClusterResolver, ProcessLayout
from kdist.cluster.resolver import require
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

    The script runs on every host of the TPU, and each process is a worker. The resolver reads the variables of the TPU
    runtime (`TPU_WORKER_HOSTNAMES`, `TPU_WORKER_ID`); without them it asks the metadata server of the TPU VM. Worker 0
    of slice 0 is the chief. `MEGASCALE_NUM_SLICES`, `MEGASCALE_SLICE_ID` and `MEGASCALE_COORDINATOR_ADDRESS` join
    several slices. No backend of kdist reaches a TPU over the network, so the address of one is an error.

    Args:
        tpu: "local" for the TPU of this machine alone. A name changes nothing: the hosts know their TPU.
        zone: Unused; accepted as `tf.distribute` does.
        project: Unused, likewise.
        job_name: The job that the TPU's workers belong to.
        coordinator_name: A job that is added to the cluster, for the task at `coordinator_address`.
        coordinator_address: The address of that task.
        credentials: Unused, likewise.
        service: Unused, likewise.
        discovery_url: Unused, likewise.
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
        # A machine's metadata stays as it is.
        self._fetch = fetch or functools.cache(functools.partial(fetch_metadata, environ=self._environ))
        self._job = job_name
        self._task_type = job_name
        self._coordinator = {coordinator_name: [coordinator_address]} if coordinator_name else {}
        self._is_local = names[0] == "local"
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
            ClusterConfigError: If there is no TPU.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        resolver.cluster_spec()
        return resolver

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # which task it is, Google may have to be asked

    def _slice(self, environ: Mapping[str, str]) -> TPUSlice:
        """Returns the slice of which this machine is a host."""
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
            ClusterRuntimeError: If the metadata server does not answer. It is a `RuntimeError`.
        """
        known = {index: address for index, address in enumerate(self.layout.addresses) if address is not None}
        return ClusterSpec(({self._job: known} if known else {}) | self._coordinator)

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
        return {"TPU": found.devices} if found.devices else {}

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Returns what is known of the TPUs before their devices are opened.

        Returns:
            A `TPUSystemMetadata`.
        """
        found = self._slice(self._environ)
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
