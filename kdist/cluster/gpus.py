"""Assigns the GPUs of a machine to its workers, for all backends, without importing a framework."""

from __future__ import annotations

import glob
import sys
from collections.abc import Mapping

from kdist.cluster.discovery import Cluster
from kdist.cluster.environment import get, visible_gpus
from kdist.cluster.process_variables import MPIClusterResolver, TorchrunClusterResolver
from kdist.cluster.slurm import SlurmClusterResolver

# Device files of NVIDIA, NVIDIA in WSL, and AMD.
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")


def own_gpus(cluster: Cluster | None, count: int, environ: Mapping[str, str] | None = None) -> range:
    """Returns the positions of the GPUs that this worker uses among the `count` GPUs that it sees.

    If the workers on a machine see the same GPUs, each one uses an equal part. If there are more workers than
    GPUs, they share GPUs. If the launcher assigned GPUs to each worker, or there is no cluster, a worker uses
    all.

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
    """Whether the launcher or the user assigned separate GPUs to each worker."""
    if isinstance(cluster.resolver, SlurmClusterResolver) and cluster.resolver.has_own_gpus:
        return True
    if get("CUDA_VISIBLE_DEVICES", environ=environ) is None:
        return False
    # These launchers pass the same environment to all workers. `kdist run` and TF_CONFIG do not.
    return not isinstance(
        cluster.resolver, (SlurmClusterResolver, TorchrunClusterResolver, MPIClusterResolver)
    )


def may_have_gpus(environ: Mapping[str, str] | None = None) -> bool:
    """Returns `False` if this machine certainly has no GPU, without importing a framework."""
    if get("CUDA_VISIBLE_DEVICES", environ=environ) is not None:
        return bool(visible_gpus(environ))
    return sys.platform != "linux" or any(glob.glob(files) for files in _DEVICE_FILES)
