"""kdist: `tf.distribute` for Keras 3, on TensorFlow, JAX and PyTorch.

Names are loaded when they are first used. Therefore `import kdist` imports neither Keras nor a framework, and
a launcher does not occupy a GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kdist import handlers
from kdist.names import no_such_name
from kdist.version import __version__

_CONTENTS = {
    "kdist.checkpoint.checkpoint": ("Checkpoint",),
    "kdist.checkpoint.layout": ("latest_checkpoint",),
    "kdist.checkpoint.manager": ("CheckpointManager",),
    "kdist.collectives": ("all_gather_object", "barrier", "broadcast"),
    "kdist.context": (
        "ReplicaContext",
        "experimental_set_strategy",
        "has_strategy",
        "in_cross_replica_context",
    ),
    "kdist.coordinator.server": ("Server",),
    "kdist.coordinator.strategy": ("ParameterServerStrategy",),
    "kdist.coordinator.evaluator": ("SidecarEvaluator",),
    "kdist.data.distributed_dataset": ("DistributedDataset", "DistributedIterator"),
    "kdist.data.input_context": ("InputContext",),
    "kdist.data.input_options": ("AutoShardPolicy", "InputOptions", "InputReplicationMode"),
    "kdist.functions": ("function", "value_and_grad"),
    "kdist.strategies.default": ("get_replica_context", "get_strategy"),
    "kdist.strategies.extended": ("StrategyExtended",),
    "kdist.strategies.running": ("RunOptions",),
    "kdist.strategies.strategy": ("Strategy",),
    "kdist.strategies.fully_sharded": ("FullyShardedStrategy",),
    "kdist.strategies.keras_distribution": ("KerasDistributionStrategy",),
    "kdist.strategies.mirrored": ("MirroredStrategy",),
    "kdist.strategies.model_parallel": ("ModelParallelStrategy",),
    "kdist.strategies.multi_worker_mirrored": ("MultiWorkerMirroredStrategy",),
    "kdist.strategies.one_device": ("OneDeviceStrategy",),
    "kdist.strategies.tpu": ("TPUStrategy",),
    "kdist.strategies.visualization": ("visualize",),
    "kdist.communication.cross_device_ops": (
        "CrossDeviceOps",
        "HierarchicalCopyAllReduce",
        "NcclAllReduce",
        "ReductionToOneDevice",
    ),
    "kdist.values": ("DistributedValues", "ReduceOp"),
}
_MODULES = (
    "callbacks",
    "cluster_resolver",
    "coordinator",
    "errors",
    "estimator",
    "experimental",
    "launch",
    "nn",
)
_HOME = {name: module for module, names in _CONTENTS.items() for name in names}

# Keras's own methods call these handlers for a model that was created under a strategy.
handlers.register(
    {
        "kdist.training.batches": ("refuse_distributed", "refuse_to_adapt"),
        "kdist.training.methods": (
            "fit",
            "evaluate",
            "predict",
            "train_on_batch",
            "test_on_batch",
            "predict_on_batch",
        ),
        "kdist.training.saving": ("keeping_files", "save", "whole"),
        "kdist.training.session": ("note_loaded",),
    }
)

# Written out, because type checkers treat only literal entries as public. A test compares the three lists.
__all__ = [
    "AutoShardPolicy",
    "Checkpoint",
    "CheckpointManager",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "FullyShardedStrategy",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "KerasDistributionStrategy",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "SidecarEvaluator",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "__version__",
    "all_gather_object",
    "barrier",
    "broadcast",
    "callbacks",
    "cluster_resolver",
    "coordinator",
    "errors",
    "estimator",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "latest_checkpoint",
    "launch",
    "nn",
    "value_and_grad",
    "visualize",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"kdist.{name}")
    else:
        raise no_such_name("kdist", name, __all__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from kdist import callbacks, cluster_resolver, coordinator, errors, estimator, experimental, nn
    from kdist.checkpoint.checkpoint import Checkpoint
    from kdist.checkpoint.layout import latest_checkpoint
    from kdist.checkpoint.manager import CheckpointManager
    from kdist.collectives import all_gather_object, barrier, broadcast
    from kdist.communication.cross_device_ops import (
        CrossDeviceOps,
        HierarchicalCopyAllReduce,
        NcclAllReduce,
        ReductionToOneDevice,
    )
    from kdist.context import (
        ReplicaContext,
        experimental_set_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from kdist.coordinator.evaluator import SidecarEvaluator
    from kdist.coordinator.server import Server
    from kdist.coordinator.strategy import ParameterServerStrategy
    from kdist.data.distributed_dataset import DistributedDataset, DistributedIterator
    from kdist.data.input_context import InputContext
    from kdist.data.input_options import AutoShardPolicy, InputOptions, InputReplicationMode
    from kdist.functions import function, value_and_grad
    from kdist.launch.function import launch  # at runtime it is the package, which is also callable
    from kdist.strategies.default import get_replica_context, get_strategy
    from kdist.strategies.extended import StrategyExtended
    from kdist.strategies.fully_sharded import FullyShardedStrategy
    from kdist.strategies.keras_distribution import KerasDistributionStrategy
    from kdist.strategies.mirrored import MirroredStrategy
    from kdist.strategies.model_parallel import ModelParallelStrategy
    from kdist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
    from kdist.strategies.one_device import OneDeviceStrategy
    from kdist.strategies.running import RunOptions
    from kdist.strategies.strategy import Strategy
    from kdist.strategies.tpu import TPUStrategy
    from kdist.strategies.visualization import visualize
    from kdist.values import DistributedValues, ReduceOp
