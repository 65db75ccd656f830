"""Cluster resolvers, with the names of `tf.distribute.cluster_resolver`."""

from __future__ import annotations

from typing import Any

from kdist.cluster import (
    ClusterResolver,
    ClusterSpec,
    FluxClusterResolver,
    GCEClusterResolver,
    IndexedJobClusterResolver,
    JAXClusterResolver,
    KerasClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    LeaderWorkerSetClusterResolver,
    LSFClusterResolver,
    MPIClusterResolver,
    PETClusterResolver,
    SageMakerClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    TPUClusterResolver,
    TPUSystemMetadata,
    UnionResolver,
    VertexClusterResolver,
)
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
