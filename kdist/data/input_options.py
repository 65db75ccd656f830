"""`InputOptions`, `InputReplicationMode` and `AutoShardPolicy` control how a dataset is distributed."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kdist.errors import InvalidArgumentError, check_whole


class AutoShardPolicy(enum.Enum):
    """Controls which rows of a dataset of global batches each worker reads.

    The names are the same as in `tf.data.experimental.AutoShardPolicy`
    (https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutoShardPolicy). Members of that class
    are also accepted. The options of a `tf.data.Dataset` contain its policy.

    - `AUTO`: `FILE` for a `tf.data.Dataset` that reads files, otherwise `DATA`.
    - `FILE`: Each worker reads different files. TensorFlow finds the file reader in a `tf.data.Dataset`. All
      other datasets need an attribute `files`, a list.
    - `DATA`: All workers agree on every global batch and take their rows, which gives the results of one
      device. From a map-style `DataLoader`, each worker loads only the samples that it needs.
    - `OFF`: Each worker reads the whole dataset.
    - `HINT`: In a `tf.data.Dataset`, the worker's shard replaces `shard(SHARD_HINT, SHARD_HINT)`.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class InputReplicationMode(enum.Enum):
    """Controls whether `distribute_datasets_from_function` calls its function per worker or per replica.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputReplicationMode
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """Options of `experimental_distribute_dataset` and `distribute_datasets_from_function`.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputOptions

    Args:
        experimental_fetch_to_device: Whether batches are copied to the device before the step that uses them.
            `None` means `True`.
        experimental_replication_mode: Whether to call the input function once per worker or once per replica.
            `PER_REPLICA` needs a single-process strategy.
        experimental_place_dataset_on_device: Has no effect, because the pipeline runs on the CPU. Accepted
            for scripts that set it, but only with `PER_REPLICA`.
        experimental_per_replica_buffer_size: The number of batches to prefetch per replica. With 0, the main
            thread prepares each batch when a step needs it.
        auto_shard_policy: The policy for `experimental_distribute_dataset`. `None` uses the policy of the
            dataset, which is `AUTO` unless a `tf.data.Dataset` sets another policy. Not available in TensorFlow.

    Example:

    >>> from kdist import InputOptions
    >>> InputOptions(experimental_per_replica_buffer_size=4).experimental_per_replica_buffer_size
    4
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    auto_shard_policy: AutoShardPolicy | None = None

    def __post_init__(self) -> None:
        hint = "Use 0 to read each batch only when a step needs it."
        size = self.experimental_per_replica_buffer_size
        check_whole("experimental_per_replica_buffer_size", size, hint, least=0)
        # TensorFlow's enumerations have the same names.
        for field, kind in (
            ("experimental_replication_mode", InputReplicationMode),
            ("auto_shard_policy", AutoShardPolicy),
        ):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, _member(kind, value))
        per_replica = self.experimental_replication_mode is InputReplicationMode.PER_REPLICA
        if self.experimental_place_dataset_on_device and not per_replica:
            raise InvalidArgumentError(
                "experimental_place_dataset_on_device=True needs one pipeline per replica.",
                received={"experimental_replication_mode": self.experimental_replication_mode},
                hint="Set experimental_replication_mode=InputReplicationMode.PER_REPLICA, or remove "
                "experimental_place_dataset_on_device.",
            )
        if self.experimental_fetch_to_device and per_replica:
            raise InvalidArgumentError(
                "experimental_fetch_to_device=True needs one pipeline per worker.",
                received={"experimental_replication_mode": self.experimental_replication_mode},
                hint="Remove experimental_fetch_to_device.",
            )


def _member(kind: type[enum.Enum], value: object) -> enum.Enum:
    name = getattr(value, "name", value)
    if name not in kind.__members__:
        raise InvalidArgumentError(
            f"{kind.__name__} has no member {value!r}.", hint=f"Use one of: {', '.join(kind.__members__)}"
        )
    return kind[str(name)]
