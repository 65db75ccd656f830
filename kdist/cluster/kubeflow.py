"""Resolvers for variables that Kubeflow sets in pods: variables of JAX, and torchrun's options (`PET_*`).

Kubeflow's `TFJob` sets `TF_CONFIG`, and `PyTorchJob` sets torchrun's variables. Other resolvers read them.
"""

from __future__ import annotations

from collections.abc import Mapping

from kdist.cluster.addresses import split_address
from kdist.cluster.process_variables import (
    ProcessClusterResolver,
    ProcessLayout,
    read_address,
    read_count,
    read_index,
)
from kdist.cluster.resolver import require

# Trainer's TrainJob and jax.distributed.initialize use JAX_NAMES. The older JAXJob uses JAXJOB_NAMES.
JAX_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
JAXJOB_NAMES = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")
PET_NAMES = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


def jax_names(environ: Mapping[str, str]) -> tuple[str, str, str, str] | None:
    """Returns the names of the variables that describe JAX processes, or `None` if they are not set."""
    for names in (JAX_NAMES, JAXJOB_NAMES):
        numbered = [name for name in names[2:] if name in environ]
        # If only an address is set, jax.distributed may get the other values from elsewhere.
        if len(numbered) == 2 or (numbered and names[0] in environ):
            return names
    return None


class JAXClusterResolver(ProcessClusterResolver):
    """Reads the cluster from the variables of JAX programs, on every backend.

    Kubeflow Trainer sets `JAX_COORDINATOR_ADDRESS` (`host:port`, or only the host with
    `JAX_COORDINATOR_PORT`), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. Kubeflow's older `JAXJob` sets them
    without `JAX_`. If both are set, the resolver reads the names with `JAX_`.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster import JAXClusterResolver
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

    def read_layout(self, environ: Mapping[str, str]) -> ProcessLayout:
        """Reads the variables of JAX programs; see the base class."""
        address_name, port_name, count_name, index_name = jax_names(environ) or JAX_NAMES
        index, count = read_index(environ, index_name, count_name, self._HINT)
        first = None
        if count > 1:
            first = environ.get(address_name, "").strip()
            if not first or ":" not in first:
                first = read_address(environ, address_name, port_name, self._HINT)
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

    >>> from kdist.cluster import PETClusterResolver
    >>> resolver = PETClusterResolver(environ={
    ...     "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1",
    ...     "PET_MASTER_ADDR": "digits-node-0-0.digits", "PET_MASTER_PORT": "29400"})
    >>> resolver.task_id, resolver.master()
    (1, 'digits-node-0-0.digits:29400')
    """

    _HINT = "Start the script with torchrun, which reads these variables:\ntorchrun train.py"

    def read_layout(self, environ: Mapping[str, str]) -> ProcessLayout:
        """Reads torchrun's options; see the base class."""
        listed = environ.get("PET_NNODES", "").strip()
        least, _, most = listed.partition(":")
        require(
            not most or least == most,
            "`PET_NNODES` is a range, from which only torchrun can choose the number of nodes.",
            self._HINT,
            PET_NNODES=listed,
        )
        counted = {**environ, "PET_NNODES": least}
        if read_count(counted, "PET_NNODES", self._HINT) == 1:
            return ProcessLayout(1, 0, (None,))
        index, count = read_index(counted, "PET_NODE_RANK", "PET_NNODES", self._HINT)
        prefix = "PET_" if "PET_MASTER_ADDR" in environ else ""
        first = read_address(environ, f"{prefix}MASTER_ADDR", f"{prefix}MASTER_PORT", self._HINT)
        return ProcessLayout(count, index, (first, *[None] * (count - 1)))
