"""What a strategy cannot do on a backend, and what to use instead: the one place that errors, tables and pages read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kdist.errors import KdistError, UnsupportedError

CAPABILITIES = {
    "create": "the strategy itself",
    "devices": "several devices in one process",
    "workers": "several workers",
    "fit": "`fit` on arrays",
    "evaluate": "`evaluate`",
    "predict": "`predict`",
    "loop": "a loop of your own",
    "tf_data": "`tf.data.Dataset`",
    "data_loader": "PyTorch's `DataLoader`",
    "py_dataset": "`keras.utils.PyDataset`",
    "generator": "a generator",
    "distribute_dataset": "`experimental_distribute_dataset`",
    "from_function": "`distribute_datasets_from_function`",
    "numpy_dataset": "`make_experimental_numpy_dataset`",
    "save": "`model.save`",
    "checkpoint": "`kdist.Checkpoint`",
    "distribution": "`strategy.keras_distribution`",
}


@dataclass(frozen=True)
class Gap:
    """One thing that a strategy cannot do on one backend.

    Args:
        strategy: Name of its class; "Strategy" for all.
        backend: "tensorflow", "jax" or "torch".
        capability: A key of `CAPABILITIES`; without "create" there is nothing else.
        reason: Why, in one sentence.
        remedy: What to use instead, ready to be pasted where that is possible.
    """

    strategy: str
    backend: str
    capability: str
    reason: str
    remedy: str

    def error(
        self, received: Mapping[str, object] | None = None, kind: type[KdistError] = UnsupportedError
    ) -> KdistError:
        """Returns the error that says so."""
        return kind(self.reason, received=received, hint=self.remedy)


_NO_SHARDS = "On TensorFlow a variable of Keras 3 is whole on every replica: nothing there divides it."
_OTHER_BACKEND = (
    "Choose another backend, such as KERAS_BACKEND=jax, or kdist.experimental.CentralStorageStrategy()."
)

GAPS = (
    *(
        Gap(strategy, "tensorflow", "create", _NO_SHARDS, _OTHER_BACKEND)
        for strategy in ("FullyShardedStrategy", "ModelParallelStrategy")
    ),
    Gap(
        "KerasDistributionStrategy",
        "tensorflow",
        "create",
        "On TensorFlow keras.distribution does nothing.",
        "Use kdist.MirroredStrategy() or kdist.MultiWorkerMirroredStrategy(), or KERAS_BACKEND=jax.",
    ),
    *(
        Gap(
            strategy,
            "torch",
            "devices",
            "On PyTorch each process holds the shards of one device.",
            "Start a worker for each device: kdist run --num-workers 2 train.py",
        )
        for strategy in ("FullyShardedStrategy", "ModelParallelStrategy", "KerasDistributionStrategy")
    ),
    Gap(
        "Strategy",
        "tensorflow",
        "distribution",
        "On TensorFlow keras.distribution does nothing, so no strategy amounts to one.",
        "Ask the strategy itself, or choose KERAS_BACKEND=jax.",
    ),
    *(
        Gap(
            "CentralStorageStrategy",
            backend,
            "distribution",
            "No keras.distribution holds its variables on one device alone.",
            "Ask the strategy itself, or use kdist.MirroredStrategy().",
        )
        for backend in ("tensorflow", "jax", "torch")
    ),
    Gap(
        "TPUStrategy",
        "tensorflow",
        "create",
        "On TensorFlow a TPU runs one program for all replicas, which kdist traces one by one.",
        "Use KERAS_BACKEND=jax, or tf.distribute.TPUStrategy itself, with the numbers that it gives.",
    ),
    Gap(
        "TPUStrategy",
        "torch",
        "create",
        "Keras on PyTorch knows CPUs and GPUs, no TPUs.",
        "Use KERAS_BACKEND=jax: the same script runs there.",
    ),
    Gap(
        "MultiWorkerMirroredStrategy",
        "tensorflow",
        "devices",
        "On TensorFlow a worker of MultiWorkerMirroredStrategy has its GPUs or one CPU.",
        "Start one worker a CPU device instead: kdist run --num-workers 2 train.py",
    ),
)
_BY_KEY = {(gap.strategy, gap.backend, gap.capability): gap for gap in GAPS}


def find(strategy: str, backend: str, capability: str) -> Gap | None:
    """Returns the gap that keeps a strategy from something on a backend, or `None`."""
    keys = ((strategy, backend, "create"), (strategy, backend, capability), ("Strategy", backend, capability))
    return next((_BY_KEY[key] for key in keys if key in _BY_KEY), None)


def require(
    strategy: str, backend: str, capability: str = "create", received: Mapping[str, object] | None = None
) -> None:
    """Raises an `UnsupportedError` if there is such a gap."""
    gap = find(strategy, backend, capability)
    if gap is not None:
        raise gap.error({"strategy": strategy, "backend": backend, **(received or {})})
