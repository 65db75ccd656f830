"""`InputOptions`, `InputReplicationMode` and `AutoShardPolicy`: how a dataset is distributed."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kdist.errors import InvalidArgumentError


class AutoShardPolicy(enum.Enum):
    """Which rows of a dataset of global batches each worker reads.

    The names are those of `tf.data.experimental.AutoShardPolicy`
    (https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutoShardPolicy); members of that class
    are understood too, and a `tf.data.Dataset` says its policy in its own options.

    - `AUTO`: `FILE` for a `tf.data.Dataset` that reads files; else `DATA`.
    - `FILE`: Each worker reads files of its own. For a `tf.data.Dataset` TensorFlow finds the file reader in
      the pipeline; any other dataset says its files in an attribute `files`.
    - `DATA`: All workers agree on every global batch, and each takes its replicas' rows: the numbers are those
      of one device. A map-style `DataLoader` loads only the samples that its worker needs.
    - `OFF`: Each worker goes through the whole dataset.
    - `HINT`: A `tf.data.Dataset` says where to shard, by `shard(SHARD_HINT, SHARD_HINT)`.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class InputReplicationMode(enum.Enum):
    """How often `distribute_datasets_from_function` calls the input function.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputReplicationMode
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """Options of `experimental_distribute_dataset` and `distribute_datasets_from_function`.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputOptions

    Args:
        experimental_fetch_to_device: Whether batches are put on the device ahead of the step that uses them.
            `None` means `True`.
        experimental_replication_mode: Call the input function once a worker, or once a replica (in strategies
            of one process).
        experimental_place_dataset_on_device: Accepted for the sake of scripts that set it, and only together
            with `PER_REPLICA`; the pipeline itself runs on the CPU.
        experimental_per_replica_buffer_size: Batches that are prepared ahead for each replica; 0 prepares
            each batch when it is asked for, in the main thread.
        auto_shard_policy: Not in TensorFlow, where the dataset says it: the policy for datasets of other
            kinds, in `experimental_distribute_dataset`.

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
        if self.experimental_per_replica_buffer_size < 0:
            raise InvalidArgumentError(
                "experimental_per_replica_buffer_size is negative.",
                received={"experimental_per_replica_buffer_size": self.experimental_per_replica_buffer_size},
                hint="Use 0 to read each batch only when a step needs it.",
            )
        # TensorFlow's enumeration has the same names.
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
