"""Resolvers for the variables of pods: an Indexed Job, Kubeflow (JAX, `PET_*` of torchrun), a LeaderWorkerSet.

Kubeflow's `TFJob` sets `TF_CONFIG`, and `PyTorchJob` sets torchrun's variables. Other resolvers read them.
"""

from __future__ import annotations

from collections.abc import Mapping

from kdist.cluster.addresses import join_address, split_address
from kdist.cluster.process_variables import ProcessClusterResolver, ProcessLayout, Variables
from kdist.cluster.tpu_slice import PORT

JOB_NAMES = INDEX, COUNT, COORDINATOR = (
    "JOB_COMPLETION_INDEX",
    "KDIST_NUM_WORKERS",
    "KDIST_COORDINATOR_ADDRESS",
)
# Trainer's TrainJob and jax.distributed.initialize use JAX_NAMES. The older JAXJob uses JAXJOB_NAMES.
JAX_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
JAXJOB_NAMES = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")
PET_NAMES = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
LWS_NAMES = LEADER, GROUP_SIZE, LWS_INDEX = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")


def jax_names(environ: Mapping[str, str]) -> tuple[str, str, str, str] | None:
    """Returns the names of the variables that describe JAX processes, or `None` if they are not set."""
    for names in (JAX_NAMES, JAXJOB_NAMES):
        numbered = [name for name in names[2:] if name in environ]
        # If only an address is set, jax.distributed may get the other values from elsewhere.
        if len(numbered) == 2 or (numbered and names[0] in environ):
            return names
    return None


class IndexedJobClusterResolver(ProcessClusterResolver):
    """Reads the cluster of a Kubernetes Job with `completionMode: Indexed`. Every pod is a worker.

    Kubernetes sets `JOB_COMPLETION_INDEX`, the index of the pod. In the manifest, set `KDIST_NUM_WORKERS` to
    the number of pods, and `KDIST_COORDINATOR_ADDRESS` to the address of pod 0, `<job>-0.<service>:<port>`.
    The service must be headless and publish the addresses of pods that are not ready yet.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster_resolver import IndexedJobClusterResolver
    >>> resolver = IndexedJobClusterResolver(environ={
    ...     "JOB_COMPLETION_INDEX": "1", "KDIST_NUM_WORKERS": "2",
    ...     "KDIST_COORDINATOR_ADDRESS": "train-0.train:2222"})
    >>> resolver.task_id, resolver.master()
    (1, 'train-0.train:2222')
    """

    _HINT = (
        "Set completionMode: Indexed in the Job. In the env of its container, set KDIST_NUM_WORKERS, and "
        "KDIST_COORDINATOR_ADDRESS, for example to train-0.train:2222."
    )

    def _read(self, variables: Variables) -> ProcessLayout:
        index, count = variables.index(INDEX, COUNT)
        first = variables.text(COORDINATOR) or None
        if first is not None:
            split_address(first, COORDINATOR)
        variables.require(
            first is not None or count == 1,
            f"`{COORDINATOR}`, the address of pod 0, is not set.",
            **{COORDINATOR: variables.environ.get(COORDINATOR), COUNT: count},
        )
        return ProcessLayout(count, index, (first, *[None] * (count - 1)))


class JAXClusterResolver(ProcessClusterResolver):
    """Reads the cluster from the variables of JAX programs, on every backend.

    Kubeflow Trainer sets `JAX_COORDINATOR_ADDRESS` (`host:port`, or only the host with
    `JAX_COORDINATOR_PORT`), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. Kubeflow's older `JAXJob` sets them
    without `JAX_`. If both are set, the resolver reads the names with `JAX_`.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster_resolver import JAXClusterResolver
    >>> resolver = JAXClusterResolver(environ={
    ...     "COORDINATOR_ADDRESS": "digits-worker-0", "COORDINATOR_PORT": "6666",
    ...     "NUM_PROCESSES": "2", "PROCESS_ID": "1"})
    >>> resolver.task_id, resolver.master()
    (1, 'digits-worker-0:6666')
    """

    _HINT = (
        "Set the variables of each process, for example:\n"
        "JAX_COORDINATOR_ADDRESS=host0:2222 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0"
    )

    def _read(self, variables: Variables) -> ProcessLayout:
        address_name, port_name, count_name, index_name = jax_names(variables.environ) or JAX_NAMES
        index, count = variables.index(index_name, count_name)
        first = None
        if count > 1:
            first = variables.text(address_name)
            if not first or ":" not in first:
                first = variables.address(address_name, port_name)
            split_address(first, address_name)
        return ProcessLayout(count, index, (first, *[None] * (count - 1)))


class PETClusterResolver(ProcessClusterResolver):
    """Reads the cluster from torchrun's `PET_*` variables, in a script that torchrun did not start.

    Kubeflow Trainer sets `PET_NNODES`, `PET_NODE_RANK`, `PET_MASTER_ADDR` and `PET_MASTER_PORT` in each pod.
    `PyTorchJob` sets the first two, and `MASTER_ADDR` and `MASTER_PORT`. These variables count nodes, so a
    script without torchrun is one worker per node. It uses all devices and ignores `PET_NPROC_PER_NODE`.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster_resolver import PETClusterResolver
    >>> resolver = PETClusterResolver(environ={
    ...     "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1",
    ...     "PET_MASTER_ADDR": "digits-node-0-0.digits", "PET_MASTER_PORT": "29400"})
    >>> resolver.task_id, resolver.master()
    (1, 'digits-node-0-0.digits:29400')
    """

    _HINT = "Start the script with torchrun, which reads these variables:\ntorchrun train.py"

    def _read(self, variables: Variables) -> ProcessLayout:
        listed = variables.text("PET_NNODES")
        least, _, most = listed.partition(":")
        variables.require(
            not most or least == most,
            "`PET_NNODES` is a range, from which only torchrun can choose the number of nodes.",
            PET_NNODES=listed,
        )
        counted = Variables({**variables.environ, "PET_NNODES": least}, self._HINT)
        if counted.count("PET_NNODES") == 1:
            return ProcessLayout(1, 0, (None,))
        index, count = counted.index("PET_NODE_RANK", "PET_NNODES")
        prefix = "PET_" if "PET_MASTER_ADDR" in variables.environ else ""
        first = variables.address(f"{prefix}MASTER_ADDR", f"{prefix}MASTER_PORT")
        return ProcessLayout(count, index, (first, *[None] * (count - 1)))


class LeaderWorkerSetClusterResolver(ProcessClusterResolver):
    """Reads the cluster of a group in a Kubernetes LeaderWorkerSet. Every pod is a worker.

    `LWS_WORKER_INDEX` is the index of the pod in its group, and `LWS_GROUP_SIZE` the number of pods.
    `LWS_LEADER_ADDRESS` is the host of the leader, which is worker 0. Keras Kinetic starts scripts this way.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster_resolver import LeaderWorkerSetClusterResolver
    >>> resolver = LeaderWorkerSetClusterResolver(environ={
    ...     "LWS_LEADER_ADDRESS": "train-0.train.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "1"})
    >>> resolver.task_id, resolver.master()
    (1, 'train-0.train.default:8482')
    """

    _HINT = (
        "Use LeaderWorkerSet 0.6 or later, which sets LWS_WORKER_INDEX. With older versions, set it in the pod "
        "template from the label leaderworkerset.sigs.k8s.io/worker-index."
    )

    def _read(self, variables: Variables) -> ProcessLayout:
        index, count = variables.index(LWS_INDEX, GROUP_SIZE)
        host = variables.text(LEADER)
        problem = f"`{LEADER}`, the host of the leader, is not set."
        variables.require(bool(host) or count == 1, problem, **{LEADER: host})
        first = join_address(host, PORT) if host else None
        if first is not None:
            split_address(first, LEADER)
        return ProcessLayout(count, index, (first, *[None] * (count - 1)))
