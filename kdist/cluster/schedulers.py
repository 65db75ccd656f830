"""Resolvers for schedulers that start one process per worker: Flux and LSF's `jsrun`.

For the variables, see Flux's manual page flux-environment(7) and LSF's environment variable reference.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from kdist.cluster.process_variables import ProcessClusterResolver, ProcessLayout, Variables

FLUX_NAMES = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
LSF_NAMES = (
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_SIZE",
)
LSF_HOSTS = ("LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE")


class FluxClusterResolver(ProcessClusterResolver):
    """Reads the cluster of a Flux job. Every task is a worker.

    `FLUX_TASK_RANK` is the index of the task, and `FLUX_JOB_SIZE` the number of tasks. Flux does not provide
    the host of task 0, so set `MASTER_ADDR` if there are several nodes.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster_resolver import FluxClusterResolver
    >>> resolver = FluxClusterResolver(environ={
    ...     "FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_NNODES": "2",
    ...     "MASTER_ADDR": "host0", "MASTER_PORT": "2222"})
    >>> resolver.task_id, resolver.master()
    (1, 'host0:2222')
    """

    _HINT = "Pass the host of task 0:\nflux run --env=MASTER_ADDR=host0 python train.py"

    def _read(self, variables: Variables) -> ProcessLayout:
        count = variables.count(FLUX_NAMES[1])
        nodes = max(1, variables.count(FLUX_NAMES[3], default=1))
        # Flux does not set the number of tasks per node. Usually it is the same on all nodes.
        local = {"tasks per node": str(count // nodes)} if nodes == 1 or count % nodes == 0 else {}
        place = Variables({**variables.environ, **local}, self._HINT).place(*FLUX_NAMES[:3], "tasks per node")
        host = "127.0.0.1" if nodes == 1 else ""
        return _layout(variables, place, host, variables.environ.get("FLUX_JOB_ID", ""))


class LSFClusterResolver(ProcessClusterResolver):
    """Reads the cluster of an LSF job step that `jsrun` started. Every task is a worker.

    `JSM_NAMESPACE_RANK` is the index of the task, and `JSM_NAMESPACE_SIZE` the number of tasks. The hosts are
    in `LSB_MCPU_HOSTS` or in the file `LSB_DJOB_HOSTFILE`. If there are several, the first host is the launch
    node without tasks. kdist then assumes that task 0 is on the second host. If not, set `MASTER_ADDR`.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster_resolver import LSFClusterResolver
    >>> resolver = LSFClusterResolver(environ={
    ...     "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "LSB_JOBID": "1234",
    ...     "LSB_MCPU_HOSTS": "batch1 1 node1 42 node2 42", "MASTER_PORT": "2222"})
    >>> resolver.task_id, resolver.master()
    (1, 'node1:2222')
    """

    _HINT = "Pass the host of task 0:\njsrun -E MASTER_ADDR=host0 python train.py"

    def _read(self, variables: Variables) -> ProcessLayout:
        place = _, count, _, local_count = variables.place(*LSF_NAMES)
        hosts = lsf_hosts(variables.environ)
        host = hosts[1] if len(hosts) > 1 else "".join(hosts)
        if local_count == count and LSF_NAMES[3] in variables.environ:
            host = "127.0.0.1"
        return _layout(variables, place, host, variables.environ.get("LSB_JOBID", ""))


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


def _layout(variables: Variables, place: tuple[int, int, int, int], host: str, job: str) -> ProcessLayout:
    """Returns the layout with the address of worker 0, which the user may set. Its default host is `host`."""
    index, count, local_index, local_count = place
    first = variables.address_or(host, [job]) if count > 1 else None
    return ProcessLayout(count, index, (first, *[None] * (count - 1)), local_index, local_count)
