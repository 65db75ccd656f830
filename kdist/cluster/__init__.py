"""Cluster detection: `ClusterSpec`, the resolvers, and `discover`.

This package uses only the standard library. It does not import Keras or a framework, so it holds no device.
"""

from __future__ import annotations

from kdist.cluster import environment
from kdist.cluster.addresses import (
    check_port_free,
    free_ports,
    hold_free_ports,
    is_loopback,
    join_address,
    split_address,
)
from kdist.cluster.cloud import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.discovery import Cluster, alone_by_mistake, discover, survey
from kdist.cluster.environment import keras_backend_choice, keras_backend_name, visible_gpus
from kdist.cluster.errors import ClusterImportError, ClusterKeyError, ClusterRuntimeError, ClusterTypeError
from kdist.cluster.gpus import may_have_gpus, own_gpus
from kdist.cluster.interfaces import choose_nccl_interface, interface_towards
from kdist.cluster.pods import (
    IndexedJobClusterResolver,
    JAXClusterResolver,
    LeaderWorkerSetClusterResolver,
    PETClusterResolver,
)
from kdist.cluster.process_variables import (
    KerasClusterResolver,
    MPIClusterResolver,
    TorchrunClusterResolver,
)
from kdist.cluster.resolver import ClusterResolver, SimpleClusterResolver, UnionResolver
from kdist.cluster.sagemaker import SageMakerClusterResolver
from kdist.cluster.schedulers import FluxClusterResolver, LSFClusterResolver
from kdist.cluster.slurm import SlurmClusterResolver, expand_hostlist, expand_tasks_per_node
from kdist.cluster.tf_config import TFConfigClusterResolver, VertexClusterResolver
from kdist.cluster.tpu import TPUClusterResolver, TPUSystemMetadata

__all__ = [
    "Cluster",
    "ClusterImportError",
    "ClusterKeyError",
    "ClusterResolver",
    "ClusterRuntimeError",
    "ClusterSpec",
    "ClusterTypeError",
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
    "alone_by_mistake",
    "check_port_free",
    "choose_nccl_interface",
    "discover",
    "environment",
    "expand_hostlist",
    "expand_tasks_per_node",
    "free_ports",
    "hold_free_ports",
    "interface_towards",
    "is_loopback",
    "join_address",
    "keras_backend_choice",
    "keras_backend_name",
    "may_have_gpus",
    "own_gpus",
    "split_address",
    "survey",
    "visible_gpus",
]
