"""Features that a strategy does not support on a backend, with alternatives, for errors, tables and pages."""

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
    "loop": "custom training loops",
    "tf_data": "`tf.data.Dataset`",
    "data_loader": "PyTorch's `DataLoader`",
    "py_dataset": "`keras.utils.PyDataset`",
    "generator": "generators",
    "distribute_dataset": "`experimental_distribute_dataset`",
    "from_function": "`distribute_datasets_from_function`",
    "numpy_dataset": "`make_experimental_numpy_dataset`",
    "save": "`model.save`",
    "checkpoint": "`kdist.Checkpoint`",
    "distribution": "`strategy.keras_distribution`",
}


@dataclass(frozen=True)
class Gap:
    """A feature that a strategy does not support on one backend.

    Args:
        strategy: The class name of the strategy; "Strategy" for all strategies.
        backend: "tensorflow", "jax" or "torch".
        capability: A key of `CAPABILITIES`. If "create" is missing, all other capabilities are also missing.
        reason: The reason, in one sentence.
        remedy: The alternative; if possible, code that the user can paste.
    """

    strategy: str
    backend: str
    capability: str
    reason: str
    remedy: str

    def error(
        self, received: Mapping[str, object] | None = None, kind: type[KdistError] = UnsupportedError
    ) -> KdistError:
        return kind(self.reason, received=received, hint=self.remedy)


_NO_SHARDS = "TensorFlow cannot shard the variables of a Keras 3 model."
_OTHER_BACKEND = (
    "Use KERAS_BACKEND=jax or KERAS_BACKEND=torch. To store all variables on one device, use "
    "kdist.experimental.CentralStorageStrategy()."
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
        "TensorFlow ignores keras.distribution.",
        "Use kdist.MirroredStrategy() or kdist.MultiWorkerMirroredStrategy(), or KERAS_BACKEND=jax.",
    ),
    *(
        Gap(
            strategy,
            "torch",
            "devices",
            "On PyTorch, each worker holds the shards of one device.",
            "Start one worker per device: kdist run --num-workers 2 train.py",
        )
        for strategy in ("FullyShardedStrategy", "ModelParallelStrategy", "KerasDistributionStrategy")
    ),
    Gap(
        "Strategy",
        "tensorflow",
        "distribution",
        "TensorFlow ignores keras.distribution, so no strategy has an equivalent distribution.",
        "Use the attributes of the strategy, or KERAS_BACKEND=jax.",
    ),
    *(
        Gap(
            "CentralStorageStrategy",
            backend,
            "distribution",
            "No keras.distribution stores all variables on one device.",
            "Use the attributes of the strategy, or kdist.MirroredStrategy().",
        )
        for backend in ("tensorflow", "jax", "torch")
    ),
    Gap(
        "TPUStrategy",
        "tensorflow",
        "create",
        "kdist does not support TPUs on TensorFlow: it traces each replica separately, but a TPU runs one program.",
        "Use KERAS_BACKEND=jax. The script stays the same.",
    ),
    Gap(
        "TPUStrategy",
        "torch",
        "create",
        "Keras on PyTorch supports CPUs and GPUs, but not TPUs.",
        "Use KERAS_BACKEND=jax. The script stays the same.",
    ),
    Gap(
        "MultiWorkerMirroredStrategy",
        "tensorflow",
        "devices",
        "On TensorFlow, a worker of MultiWorkerMirroredStrategy uses its GPUs or one CPU device.",
        "Start one worker per CPU device: kdist run --num-workers 2 train.py",
    ),
)
_BY_KEY = {(gap.strategy, gap.backend, gap.capability): gap for gap in GAPS}


def find(strategy: str, backend: str, capability: str) -> Gap | None:
    """Returns the gap if a strategy does not have a capability on a backend, or `None`."""
    keys = ((strategy, backend, "create"), (strategy, backend, capability), ("Strategy", backend, capability))
    return next((_BY_KEY[key] for key in keys if key in _BY_KEY), None)


def check(
    strategy: str, backend: str, capability: str = "create", received: Mapping[str, object] | None = None
) -> None:
    """Raises an `UnsupportedError` if a strategy does not have a capability on a backend."""
    gap = find(strategy, backend, capability)
    if gap is not None:
        raise gap.error({"strategy": strategy, "backend": backend, **(received or {})})
