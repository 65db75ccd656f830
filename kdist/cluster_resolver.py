"""Cluster resolvers, with the names of `tf.distribute.cluster_resolver`."""

from __future__ import annotations

from typing import Any

from kdist.cluster import ClusterResolver, ClusterSpec, SimpleClusterResolver, TFConfigClusterResolver
from kdist.cluster.cloud import GCEClusterResolver, KubernetesClusterResolver, KubernetesExecutableLocation
from kdist.cluster.pods import (
    IndexedJobClusterResolver,
    JAXClusterResolver,
    LeaderWorkerSetClusterResolver,
    PETClusterResolver,
)
from kdist.cluster.process_variables import KerasClusterResolver, MPIClusterResolver, TorchrunClusterResolver
from kdist.cluster.resolver import UnionResolver
from kdist.cluster.sagemaker import SageMakerClusterResolver
from kdist.cluster.schedulers import FluxClusterResolver, LSFClusterResolver
from kdist.cluster.slurm import SlurmClusterResolver
from kdist.cluster.tf_config import VertexClusterResolver
from kdist.cluster.tpu import TPUClusterResolver, TPUSystemMetadata
from kdist.names import no_such_name

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "FluxClusterResolver",
    "GCEClusterResolver",
    "IndexedJobClusterResolver",
    "JAXClusterResolver",
    "KerasClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "LSFClusterResolver",
    "LeaderWorkerSetClusterResolver",
    "MPIClusterResolver",
    "PETClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TPUSystemMetadata",
    "TorchrunClusterResolver",
    "UnionResolver",
    "VertexClusterResolver",
]


def __getattr__(name: str) -> Any:
    raise no_such_name(__name__, name, __all__)
