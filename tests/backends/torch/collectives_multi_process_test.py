"""Collectives of 4,096 workers: PyTorch's `fake` process group shows them without starting all workers.

NCCL waits forever if two workers issue different collectives, or the same collectives in a different order.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.helpers.processes import start_pool

WORLD = 4096
RANKS = (0, 1, 2047, 4095)


def collectives(kind: str, rank: int, rows: int) -> list[tuple]:
    """Returns the collectives that a worker issues in a `fit` of two epochs."""
    import keras
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import kdist
    from kdist.backends.torch import workers
    from kdist.cluster import discover
    from kdist.strategies import places

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    place = {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    cluster = discover(environ=place)

    channel = SimpleNamespace(
        names=cluster.worker_names,
        index=rank,
        on_loss=lambda call: None,
        wait_for_loss=lambda timeout: {},
        lost={},
        died=dict,
        say=lambda text: None,
        waiting=dict,
        close=lambda: None,
        timeout_seconds=None,
        gather_json=lambda value: [value] * WORLD,
    )

    class Workers(workers.JoinedWorkers):
        """Simulates messages: all workers send the same data."""

        def begin_gather_bytes(self, data, timeout=None):
            issued.append(("message",))
            return lambda: [data] * WORLD

    issued: list[tuple] = []
    for name in ("all_reduce", "all_gather", "broadcast", "reduce_scatter"):
        original = getattr(dist, name)

        def log(*args, name=name, original=original, group=None, **kwargs):
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            facts = [(str(tensor.dtype), tensor.numel()) for tensor in tensors]
            issued.append((name, *facts, dist.get_world_size(group)))
            return original(*args, group=group, **kwargs)

        setattr(dist, name, log)
    workers._join = lambda *args: Workers(cluster, channel, nccl=False, shares_memory=False)
    workers.dist.is_initialized = lambda: False
    places.discover = lambda resolver=None: cluster
    made = kdist.MultiWorkerMirroredStrategy() if kind == "mirrored" else kdist.FullyShardedStrategy()
    keras.utils.set_random_seed(5)
    with made.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(16 if kind == "mirrored" else WORLD, "relu"),
                keras.layers.BatchNormalization(synchronized=kind == "mirrored"),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(clipnorm=1.0), "mse", metrics=["mae"])
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(rows, 8)).astype("float32"), rng.normal(size=(rows, 1)).astype("float32")
    model.fit(x, y, batch_size=WORLD, epochs=2, verbose=0, shuffle=False)
    return issued


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("kind", ["mirrored", "divided"])
def test_all_of_4096_workers_issue_the_same_collectives(kind):
    sequences = []
    for rank in RANKS:
        pool = start_pool(1, "torch")
        try:
            # The last batch is so short that most workers receive no row.
            (issued,) = pool.run(collectives, kind, rank, WORLD + 100)
        finally:
            pool.close()
        sequences.append(issued)
    kinds = {entry[0] for entry in sequences[0]}
    assert {"message", "all_reduce", "broadcast"} <= kinds
    for rank, issued in zip(RANKS, sequences, strict=True):
        assert issued == sequences[0], f"worker {rank} differs from worker 0"
