"""`InputContext` and `ValueContext`, the arguments of users' input functions."""

from __future__ import annotations

from dataclasses import dataclass

from kdist.errors import InvalidArgumentError


@dataclass(frozen=True)
class InputContext:
    """The argument that `distribute_datasets_from_function` passes to the input function.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputContext

    Args:
        num_input_pipelines: The number of input pipelines in the job: one per worker, or one per replica.
        input_pipeline_id: Pipeline index, from 0. Starting there, read every `num_input_pipelines`-th row.
        num_replicas_in_sync: The number of replicas over all workers.

    Example:

    >>> from kdist import InputContext
    >>> context = InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(128)
    32
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of rows in one replica's batch.

        Args:
            global_batch_size: The number of rows in a global batch, a multiple of the number of replicas.

        Raises:
            InvalidArgumentError: If it is not such a multiple. The error is also a `ValueError`.
        """
        size, left = divmod(global_batch_size, self.num_replicas_in_sync)
        if left:
            raise InvalidArgumentError(
                "global_batch_size is not divisible by the number of replicas.",
                received={
                    "global_batch_size": global_batch_size,
                    "num_replicas_in_sync": self.num_replicas_in_sync,
                },
                hint=f"Use global_batch_size={(size + 1) * self.num_replicas_in_sync}, or pass the global batches "
                "to `experimental_distribute_dataset`, which splits any number of rows.",
            )
        return size


@dataclass(frozen=True)
class ValueContext:
    """The argument that `experimental_distribute_values_from_function` passes to the function.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/ValueContext

    Args:
        replica_id_in_sync_group: The index of the replica over all workers, from 0.
        num_replicas_in_sync: The number of replicas over all workers.

    Example:

    >>> from kdist.experimental import ValueContext
    >>> context = ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)
    >>> context.replica_id_in_sync_group / context.num_replicas_in_sync
    0.5
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
