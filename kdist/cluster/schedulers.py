"""Resolvers for schedulers that start one process per worker: Flux, LSF's `jsrun` and LeaderWorkerSet.

For the variables, see Flux's manual page flux-environment(7), LSF's environment variable reference, and
LeaderWorkerSet's reference of labels and variables.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from kdist.cluster.addresses import join_address, split_address
from kdist.cluster.process_variables import (
    ProcessClusterResolver,
    ProcessLayout,
    read_address,
    read_count,
    read_index,
    read_place,
    stable_port,
)
from kdist.cluster.resolver import require
from kdist.cluster.tpu_slice import PORT

FLUX_NAMES = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
LSF_NAMES = (
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_SIZE",
)
LSF_HOSTS = ("LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE")
LEADER, GROUP_SIZE, INDEX = LWS_NAMES = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")


class FluxClusterResolver(ProcessClusterResolver):
    """Reads the cluster of a Flux job. Every task is a worker.

    `FLUX_TASK_RANK` is the index of the task, and `FLUX_JOB_SIZE` the number of tasks. Flux does not provide
    the host of task 0, so set `MASTER_ADDR` if there are several nodes.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster import FluxClusterResolver
    >>> resolver = FluxClusterResolver(environ={
    ...     "FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_NNODES": "2",
    ...     "MASTER_ADDR": "host0", "MASTER_PORT": "2222"})
    >>> resolver.task_id, resolver.master()
    (1, 'host0:2222')
    """

    _HINT = "Pass the host of task 0:\nflux run --env=MASTER_ADDR=host0 python train.py"

    def read_layout(self, environ: Mapping[str, str]) -> ProcessLayout:
        """Reads Flux's variables; see the base class."""
        count = read_count(environ, FLUX_NAMES[1], self._HINT)
        nodes = max(1, read_count(environ, FLUX_NAMES[3], self._HINT, default=1))
        # Flux does not set the number of tasks per node. Usually it is the same on all nodes.
        local = {"tasks per node": str(count // nodes)} if nodes == 1 or count % nodes == 0 else {}
        index, count, local_index, local_count = read_place(
            {**environ, **local}, (*FLUX_NAMES[:3], "tasks per node"), self._HINT
        )
        job = [environ.get("FLUX_JOB_ID", "")]
        first = _first_address(environ, count, "127.0.0.1" if nodes == 1 else "", job, self._HINT)
        return ProcessLayout(count, index, first, local_index, local_count)


class LSFClusterResolver(ProcessClusterResolver):
    """Reads the cluster of an LSF job step that `jsrun` started. Every task is a worker.

    `JSM_NAMESPACE_RANK` is the index of the task, and `JSM_NAMESPACE_SIZE` the number of tasks. The hosts are
    in `LSB_MCPU_HOSTS` or in the file `LSB_DJOB_HOSTFILE`. If there are several, the first host is the launch
    node without tasks. kdist then assumes that task 0 is on the second host. If not, set `MASTER_ADDR`.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster import LSFClusterResolver
    >>> resolver = LSFClusterResolver(environ={
    ...     "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "LSB_JOBID": "1234",
    ...     "LSB_MCPU_HOSTS": "batch1 1 node1 42 node2 42", "MASTER_PORT": "2222"})
    >>> resolver.task_id, resolver.master()
    (1, 'node1:2222')
    """

    _HINT = "Pass the host of task 0:\njsrun -E MASTER_ADDR=host0 python train.py"

    def read_layout(self, environ: Mapping[str, str]) -> ProcessLayout:
        """Reads the variables of `jsrun` and LSF; see the base class."""
        index, count, local_index, local_count = read_place(environ, LSF_NAMES, self._HINT)
        hosts = lsf_hosts(environ)
        host = hosts[1] if len(hosts) > 1 else "".join(hosts)
        if local_count == count and LSF_NAMES[3] in environ:
            host = "127.0.0.1"
        first = _first_address(environ, count, host, [environ.get("LSB_JOBID", "")], self._HINT)
        return ProcessLayout(count, index, first, local_index, local_count)


def lsf_hosts(environ: Mapping[str, str]) -> list[str]:
    """Returns the distinct hosts of an LSF job in LSF's order. The list may be empty.

    Example:

    >>> from kdist.cluster.schedulers import lsf_hosts
    >>> lsf_hosts({"LSB_MCPU_HOSTS": "batch1 1 node1 42 node2 42"})
    ['batch1', 'node1', 'node2']
    """
    names = environ.get(LSF_HOSTS[0], "").split()[::2]
    path = environ.get(LSF_HOSTS[1], "")
    if not names and os.path.isfile(path):  # reading a pipe would hang
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            names = file.read(1 << 20).split()  # one line per slot
    return list(dict.fromkeys(names))


def _first_address(
    environ: Mapping[str, str], count: int, host: str, job: list[str], hint: str
) -> tuple[str | None, ...]:
    """Returns the address of worker 0, which the user may set, and `None` for the other workers."""
    if count == 1:
        return (None,)
    given = {"MASTER_ADDR": host, "MASTER_PORT": str(stable_port(job)), **environ}
    return (read_address(given, "MASTER_ADDR", "MASTER_PORT", hint), *[None] * (count - 1))


class LeaderWorkerSetClusterResolver(ProcessClusterResolver):
    """Reads the cluster of a group in a Kubernetes LeaderWorkerSet. Every pod is a worker.

    `LWS_WORKER_INDEX` is the index of the pod in its group, and `LWS_GROUP_SIZE` the number of pods.
    `LWS_LEADER_ADDRESS` is the host of the leader, which is worker 0. Keras Kinetic starts scripts this way.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster import LeaderWorkerSetClusterResolver
    >>> resolver = LeaderWorkerSetClusterResolver(environ={
    ...     "LWS_LEADER_ADDRESS": "train-0.train.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "1"})
    >>> resolver.task_id, resolver.master()
    (1, 'train-0.train.default:8482')
    """

    _HINT = (
        "Use LeaderWorkerSet 0.6 or later, which sets LWS_WORKER_INDEX. With older versions, set it in the pod "
        "template from the label leaderworkerset.sigs.k8s.io/worker-index."
    )

    def read_layout(self, environ: Mapping[str, str]) -> ProcessLayout:
        """Reads the variables of the group's pods; see the base class."""
        index, count = read_index(environ, INDEX, GROUP_SIZE, self._HINT)
        host = environ.get(LEADER, "").strip()
        require(
            bool(host) or count == 1,
            f"`{LEADER}`, the host of the leader, is not set.",
            self._HINT,
            **{LEADER: host},
        )
        first = join_address(host, PORT) if host else None
        if first is not None:
            split_address(first, LEADER)
        return ProcessLayout(count, index, (first, *[None] * (count - 1)))
