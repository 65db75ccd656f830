"""Resolvers for what starts one process per worker on a cluster: Flux, LSF's `jsrun`, and a LeaderWorkerSet.

Flux's manual page flux-environment(7), LSF's reference of environment variables, and the reference of labels and
variables of LeaderWorkerSet describe the variables.
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
    """Reads the cluster of a job of Flux: every task is a worker.

    Flux numbers the tasks in `FLUX_TASK_RANK` and counts them in `FLUX_JOB_SIZE`. It does not say where task 0 runs: on
    several nodes, pass `MASTER_ADDR`.

    Args:
        rpc_layer: The protocol that TensorFlow's tasks speak.
        environ: The environment to read; by default the process's own.

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
        # Flux does not say how many tasks share a node; usually all nodes have as many.
        local = {"tasks per node": str(count // nodes)} if nodes == 1 or count % nodes == 0 else {}
        index, count, local_index, local_count = read_place(
            {**environ, **local}, (*FLUX_NAMES[:3], "tasks per node"), self._HINT
        )
        job = [environ.get("FLUX_JOB_ID", "")]
        first = _first_address(environ, count, "127.0.0.1" if nodes == 1 else "", job, self._HINT)
        return ProcessLayout(count, index, first, local_index, local_count)


class LSFClusterResolver(ProcessClusterResolver):
    """Reads the cluster of a job step of LSF that `jsrun` started: every task is a worker.

    `JSM_NAMESPACE_RANK` numbers the tasks and `JSM_NAMESPACE_SIZE` counts them. `LSB_MCPU_HOSTS`, or the file
    `LSB_DJOB_HOSTFILE`, lists the hosts of the job. The first of several is the launch node, where no task runs, so
    task 0 is taken to be on the second. If it is elsewhere, pass `MASTER_ADDR`.

    Args:
        rpc_layer: The protocol that TensorFlow's tasks speak.
        environ: The environment to read; by default the process's own.

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
    """Returns the hosts of a job of LSF, each once, in LSF's order; none where it does not list them.

    Example:

    >>> from kdist.cluster.schedulers import lsf_hosts
    >>> lsf_hosts({"LSB_MCPU_HOSTS": "batch1 1 node1 42 node2 42"})
    ['batch1', 'node1', 'node2']
    """
    names = environ.get(LSF_HOSTS[0], "").split()[::2]
    path = environ.get(LSF_HOSTS[1], "")
    if not names and os.path.isfile(path):  # a pipe would hang
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            names = file.read(1 << 20).split()  # a line per slot
    return list(dict.fromkeys(names))


def _first_address(
    environ: Mapping[str, str], count: int, host: str, job: list[str], hint: str
) -> tuple[str | None, ...]:
    """Returns the addresses: of worker 0, which the user may give, and no others."""
    if count == 1:
        return (None,)
    given = {"MASTER_ADDR": host, "MASTER_PORT": str(stable_port(job)), **environ}
    return (read_address(given, "MASTER_ADDR", "MASTER_PORT", hint), *[None] * (count - 1))


class LeaderWorkerSetClusterResolver(ProcessClusterResolver):
    """Reads the cluster of a group of a Kubernetes LeaderWorkerSet: every pod is a worker, the leader is worker 0.

    `LWS_WORKER_INDEX` numbers the pods of a group, `LWS_GROUP_SIZE` counts them, and `LWS_LEADER_ADDRESS` names the
    leader. Keras Kinetic starts scripts this way.

    Args:
        rpc_layer: The protocol that TensorFlow's tasks speak.
        environ: The environment to read; by default the process's own.

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
