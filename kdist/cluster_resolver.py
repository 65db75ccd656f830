"""Resolvers under the names of `tf.distribute.cluster_resolver`."""

from __future__ import annotations

from kdist.cluster import (
    ClusterResolver,
    ClusterSpec,
    KerasClusterResolver,
    MPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    UnionResolver,
)

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "KerasClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "UnionResolver",
]
