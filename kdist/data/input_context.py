"""`InputContext` and `ValueContext`: what a user's input function learns about the job."""

from __future__ import annotations

from kdist.errors import InvalidArgumentError


class InputContext:
    """What `distribute_datasets_from_function` tells the input function of a worker.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputContext

    Args:
        num_input_pipelines: Number of input pipelines in the job: one a worker, or one a replica.
        input_pipeline_id: Which of them this is, from 0.
        num_replicas_in_sync: Number of replicas over all workers.

    Example:

    >>> from kdist import InputContext
    >>> context = InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(128)
    32
    """

    def __init__(
        self, num_input_pipelines: int = 1, input_pipeline_id: int = 0, num_replicas_in_sync: int = 1
    ) -> None:
        self._num_input_pipelines = num_input_pipelines
        self._input_pipeline_id = input_pipeline_id
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def num_input_pipelines(self) -> int:
        """Number of input pipelines in the job."""
        return self._num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        """Which pipeline this is, from 0: take every `num_input_pipelines`-th row, starting here."""
        return self._input_pipeline_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over all workers."""
        return self._num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the rows of one replica's batch.

        Args:
            global_batch_size: Rows of a global batch; the number of replicas must divide it.

        Raises:
            InvalidArgumentError: The replicas do not divide the batch (a `ValueError`).
        """
        if global_batch_size % self._num_replicas_in_sync:
            larger = -(-global_batch_size // self._num_replicas_in_sync) * self._num_replicas_in_sync
            raise InvalidArgumentError(
                "num_replicas_in_sync must divide global_batch_size.",
                received={
                    "global_batch_size": global_batch_size,
                    "num_replicas_in_sync": self._num_replicas_in_sync,
                },
                hint=f"Use global_batch_size={larger}, or hand the global batches to "
                "`experimental_distribute_dataset`, which splits any number of rows.",
            )
        return global_batch_size // self._num_replicas_in_sync

    def __repr__(self) -> str:
        return (
            f"InputContext(input_pipeline_id={self._input_pipeline_id}, "
            f"num_input_pipelines={self._num_input_pipelines}, "
            f"num_replicas_in_sync={self._num_replicas_in_sync})"
        )


class ValueContext:
    """What `experimental_distribute_values_from_function` tells the function of one replica.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/ValueContext

    Args:
        replica_id_in_sync_group: Index of the replica over all workers, from 0.
        num_replicas_in_sync: Number of replicas over all workers.

    Example:

    >>> from kdist.experimental import ValueContext
    >>> context = ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)
    >>> context.replica_id_in_sync_group / context.num_replicas_in_sync
    0.5
    """

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1) -> None:
        self._replica_id_in_sync_group = replica_id_in_sync_group
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """Index of the replica over all workers, from 0."""
        return self._replica_id_in_sync_group

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over all workers."""
        return self._num_replicas_in_sync

    def __repr__(self) -> str:
        return (
            f"ValueContext(replica_id_in_sync_group={self._replica_id_in_sync_group}, "
            f"num_replicas_in_sync={self._num_replicas_in_sync})"
        )
