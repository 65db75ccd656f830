"""A user's script for type checkers. `types_multi_process_test.py` checks it; no test runs it."""

import os
from typing import assert_type

import kdist
from kdist import Checkpoint, CheckpointManager, InputContext, MirroredStrategy, ReduceOp, callbacks
from kdist.cluster_resolver import ClusterResolver, ClusterSpec, TFConfigClusterResolver
from kdist.errors import KdistError, LaunchError
from kdist.experimental import CommunicationImplementation, CommunicationOptions


def train(steps: int) -> float:
    """Trains in a worker."""
    options = CommunicationOptions(implementation=CommunicationImplementation.RING)
    resolver = TFConfigClusterResolver()
    assert_type(resolver.cluster_spec(), ClusterSpec)
    strategy = kdist.MultiWorkerMirroredStrategy(resolver, communication_options=options)
    assert_type(strategy.num_replicas_in_sync, int)
    with strategy.scope() as current:
        assert_type(current, kdist.MultiWorkerMirroredStrategy)
    manager = CheckpointManager(Checkpoint(step=steps), os.getcwd(), max_to_keep=3)
    assert_type(manager.latest_checkpoint, str | None)
    assert_type(kdist.latest_checkpoint("backups"), str | None)
    kdist.barrier(timeout=5.0)
    return 0.5


def read(context: InputContext) -> int:
    """Reads the input of a worker."""
    return context.get_per_replica_batch_size(128) + context.input_pipeline_id


def main() -> None:
    """Starts the workers."""
    try:
        results = kdist.launch(train, num_workers=2, args=(5,))
    except LaunchError as error:
        assert_type(error, LaunchError)
        base: KdistError = error
        raise base from None
    assert_type(results, list[float])
    assert_type(kdist.get_strategy(), kdist.Strategy)
    assert_type(kdist.has_strategy(), bool)
    strategy: kdist.Strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    strategy.reduce(ReduceOp.SUM, 1.0, axis=None)
    callbacks.BackupAndRestore("backups", save_freq=10)
    other: ClusterResolver = kdist.cluster_resolver.SlurmClusterResolver()
    print(other, kdist.__version__.split("."))
