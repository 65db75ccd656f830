"""Defines the strategies of the conformance suite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Without(NamedTuple):
    """A case that cannot pass under a strategy, on some backends.

    Args:
        case: The name of the case.
        backends: The backends.
        why: The reason.
        is_error: Whether the case raises an `UnsupportedError`; otherwise its numbers differ.
    """

    case: str
    backends: tuple[str, ...]
    why: str
    is_error: bool = True


@dataclass(frozen=True)
class Configuration:
    """A strategy, with the number of worker processes and of devices per worker.

    Args:
        name: A short name, for tests.
        title: The name in the support table.
        num_workers: The number of worker processes.
        devices_per_worker: The number of logical CPU devices per worker.
        strategy: The kind of strategy.
        backends: The backends that support it.
        why_not_all: The reason if `backends` do not contain all backends.
        without: The cases that cannot pass.
    """

    name: str
    title: str
    num_workers: int
    devices_per_worker: int
    strategy: str = "Mirrored"
    backends: tuple[str, ...] = ("tensorflow", "jax", "torch")
    why_not_all: str = ""
    without: tuple[Without, ...] = ()

    def can(self, case: str, backend: str) -> bool:
        """Returns whether a case can pass on a backend."""
        return backend in self.backends and not any(
            one.case == case and backend in one.backends for one in self.without
        )

    @property
    def num_replicas(self) -> int:
        """The number of replicas over all workers."""
        return self.num_workers * self.devices_per_worker


_OWN_SERVERS = ("jax", "torch")
_LOSS_SCALING = (
    "`LossScaleOptimizer` needs all gradients, but each server receives a part; kdist raises an error"
)
# Cases that fail if servers make the optimizer's steps, because each server has only a part of the variables.
_NOT_ELSEWHERE = (
    Without(
        "newer_optimizers",
        _OWN_SERVERS,
        "`Lamb` and `Muon` need whole variables, but each server holds a part; kdist raises an error",
    ),
    Without("loss_scaling", _OWN_SERVERS, _LOSS_SCALING),
    Without("embedding_wrapped", _OWN_SERVERS, _LOSS_SCALING),
    Without("mixed_precision", _OWN_SERVERS, _LOSS_SCALING),
    Without("overflow", _OWN_SERVERS, _LOSS_SCALING),
    Without(
        "custom_train_step",
        ("tensorflow", "jax", "torch"),
        "the tested step reads the weights after its update, but servers update them when the step ends",
        is_error=False,
    ),
)
_NO_SHARDS = "TensorFlow cannot shard the variables of a Keras 3 model"
_ONE_DEVICE = f"{_NO_SHARDS}; on PyTorch, a worker of this strategy has one device"

CONFIGURATIONS = {
    c.name: c
    for c in (
        Configuration("mirrored-2", "`MirroredStrategy`, 2 devices", 1, 2),
        Configuration("mirrored-3", "`MirroredStrategy`, 3 devices", 1, 3),
        Configuration("workers-2", "`MultiWorkerMirroredStrategy`, 2 workers", 2, 1),
        Configuration("workers-3", "`MultiWorkerMirroredStrategy`, 3 workers", 3, 1),
        Configuration(
            "workers-2x2",
            "`MultiWorkerMirroredStrategy`, 2 workers with 2 devices each",
            2,
            2,
            backends=("jax", "torch"),
            why_not_all="on TensorFlow, a worker of this strategy uses one CPU device",
        ),
        Configuration("central-2", "`CentralStorageStrategy`, 2 devices", 1, 2, "CentralStorage"),
        Configuration(
            "fully-sharded-2",
            "`FullyShardedStrategy`, 1 worker with 2 devices",
            1,
            2,
            "FullySharded",
            ("jax",),
            _ONE_DEVICE,
        ),
        Configuration(
            "fully-sharded-2x1",
            "`FullyShardedStrategy`, 2 workers",
            2,
            1,
            "FullySharded",
            ("jax", "torch"),
            _NO_SHARDS,
        ),
        Configuration(
            "model-parallel-2x1",
            "`ModelParallelStrategy`, 2 workers",
            2,
            1,
            "ModelParallel",
            ("jax", "torch"),
            _NO_SHARDS,
        ),
        Configuration(
            "model-parallel-2x2",
            "`ModelParallelStrategy`, 2 workers with 2 devices each",
            2,
            2,
            "ModelParallel",
            ("jax",),
            _ONE_DEVICE,
        ),
        # A coordinator, two workers, two servers.
        Configuration(
            "servers-2",
            "`ParameterServerStrategy(synchronous=True)`, 2 workers and 2 servers",
            5,
            1,
            "ParameterServer",
        ),
        # A coordinator, a worker, two servers.
        Configuration(
            "servers-in-turn",
            "`ParameterServerStrategy(max_staleness=0)`, 1 worker and 2 servers",
            4,
            1,
            "ParameterServer",
            without=_NOT_ELSEWHERE,
        ),
    )
}

_strategies: dict[str, Any] = {}
_servers: list[Any] = []


def _along_the_model(path: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Shards the last axis over "model" and the other axes over "batch", if their lengths are even."""
    *others, last = shape
    first = ("batch" if axis == 0 and length % 2 == 0 else None for axis, length in enumerate(others))
    return (*first, "model" if last % 2 == 0 else None)


def _parameter_server(configuration: Configuration) -> Any:
    """Returns the strategy in the first process. The others work for it; the last two are servers."""
    import kdist

    resolver = kdist.cluster_resolver.TFConfigClusterResolver()
    addresses = resolver.cluster_spec().job_tasks("worker")
    task, num_workers = resolver.task_id or 0, configuration.num_workers - 3
    cluster = {"chief": addresses[:1], "worker": addresses[1:-2], "ps": addresses[-2:]}
    if task == 0:
        spec = kdist.cluster_resolver.ClusterSpec(cluster)
        partitioner = kdist.experimental.partitioners.FixedShardsPartitioner(2)
        chief = kdist.cluster_resolver.SimpleClusterResolver(spec, task_type="chief", task_id=0)
        mode: dict[str, Any] = {"synchronous": True} if num_workers > 1 else {"max_staleness": 0}
        return kdist.ParameterServerStrategy(chief, partitioner, **mode)
    job, index = ("worker", task - 1) if task <= num_workers else ("ps", task - 1 - num_workers)
    _servers.append(kdist.Server(cluster, job, index))
    return None


def make_strategy(name: str) -> Any:
    """Returns the strategy of a configuration. The first call in each process makes it.

    Returns `None` in a process that works for another process's strategy.
    """
    import kdist

    configuration = CONFIGURATIONS[name]
    if name not in _strategies:
        devices = [f"cpu:{i}" for i in range(configuration.devices_per_worker)]
        if configuration.strategy == "CentralStorage":
            _strategies[name] = kdist.experimental.CentralStorageStrategy(devices, "cpu:0")
        elif configuration.strategy == "FullySharded":
            _strategies[name] = kdist.FullyShardedStrategy(devices, min_size=2)
        elif configuration.strategy == "ModelParallel":
            mesh = {"batch": configuration.num_replicas // 2, "model": 2}
            _strategies[name] = kdist.ModelParallelStrategy(_along_the_model, mesh=mesh, devices=devices)
        elif configuration.strategy == "ParameterServer":
            _strategies[name] = _parameter_server(configuration)
        elif configuration.num_workers == 1:
            _strategies[name] = kdist.MirroredStrategy(devices)
        else:
            _strategies[name] = kdist.MultiWorkerMirroredStrategy(devices=devices)
    return _strategies[name]
