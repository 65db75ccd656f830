"""Cluster detection, for the other packages. Users find the resolvers in `kdist.cluster_resolver`.

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
from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.discovery import Cluster, alone_by_mistake, discover, survey
from kdist.cluster.environment import keras_backend_choice, keras_backend_name, visible_gpus
from kdist.cluster.gpus import may_have_gpus, own_gpus
from kdist.cluster.interfaces import choose_nccl_interface, interface_towards
from kdist.cluster.resolver import ClusterResolver, SimpleClusterResolver
from kdist.cluster.tf_config import TFConfigClusterResolver
