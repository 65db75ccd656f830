"""Decides which GPUs of a machine belong to which of its workers, for all engines. No engine is started."""

from __future__ import annotations

import glob
import sys
from collections.abc import Mapping

from kdist.cluster.discovery import Cluster
from kdist.cluster.environment import get, visible_gpus
from kdist.cluster.process_variables import MPIClusterResolver, TorchrunClusterResolver
from kdist.cluster.slurm import SlurmClusterResolver

# Of NVIDIA, of NVIDIA below Windows, and of AMD.
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")


def own_gpus(cluster: Cluster | None, count: int, environ: Mapping[str, str] | None = None) -> range:
    """Returns the part of the visible GPUs that belongs to this worker.

    Workers of one machine that see the same GPUs share them: each takes an equal part, or one GPU that it shares
    if there are more workers than GPUs. A worker whose launcher gave it GPUs of its own takes all that it sees.

    Args:
        cluster: The cluster of this worker; `None` for a single process.
        count: How many GPUs this process sees.
        environ: The environment to read; by default the process's own.

    Returns:
        The positions of the worker's GPUs among those that the process sees.

    Example:

    >>> from kdist.cluster import discover, own_gpus
    >>> environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    ...            "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    >>> own_gpus(discover(environ=environ), 8, environ)
    range(4, 8)
    """
    if cluster is None or not count or cluster.local_workers < 2 or _are_own(cluster, environ):
        return range(count)
    each = max(1, count // cluster.local_workers)
    first = cluster.local_rank * each % count
    return range(first, first + each)


def _are_own(cluster: Cluster, environ: Mapping[str, str] | None) -> bool:
    """Whether the launcher, or the user, has given each worker GPUs of its own."""
    if isinstance(cluster.resolver, SlurmClusterResolver) and cluster.resolver.has_own_gpus:
        return True
    if get("CUDA_VISIBLE_DEVICES", environ=environ) is None:
        return False
    # These launchers hand one environment to all workers. `kdist run`, and whoever writes TF_CONFIG, does not.
    return not isinstance(
        cluster.resolver, (SlurmClusterResolver, TorchrunClusterResolver, MPIClusterResolver)
    )


def may_have_gpus(environ: Mapping[str, str] | None = None) -> bool:
    """Returns `False` if this machine has no GPU for sure, as far as that can be found without an engine."""
    if get("CUDA_VISIBLE_DEVICES", environ=environ) is not None:
        return bool(visible_gpus(environ))
    return sys.platform != "linux" or any(glob.glob(files) for files in _DEVICE_FILES)
