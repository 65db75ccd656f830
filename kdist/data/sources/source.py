"""`Source`: a dataset of any kind, as batches that can be read epoch after epoch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from kdist.arrays import rows
from kdist.data.input_options import AutoShardPolicy
from kdist.errors import DatasetError

# From the number of rows of a global batch to the rows that this worker needs; `None` for all of them.
Choice = Callable[[int], tuple[int, int] | None]


class Source:
    """A dataset that somebody gave to kdist. One subclass a kind."""

    kind: str
    """What users call it, for messages."""
    can_read_ahead = True
    """Whether batches that are read and not used can be read again."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch; `None` where unknown or without end."""
        return None

    @property
    def is_infinite(self) -> bool:
        """Whether an epoch is known to have no end."""
        return False

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yields the batches of an epoch, as the dataset gives them.

        Args:
            epoch: Which epoch, from 0; epochs may be asked for out of order, as when a job is resumed.
            start: How many batches to leave out, as cheaply as the kind allows.
        """
        # Those left out are read and forgotten. No generator, which would close the user's as it ends.
        return itertools.islice(self.dataset, start, None)

    def chosen(self, epoch: int, start: int, choose: Choice) -> Iterator[tuple[int, Any, Any]]:
        """Yields for each global batch: its number of rows, and either this worker's rows or the whole batch.

        Kinds that can load single rows override this and load no others.
        """
        for batch in self.batches(epoch, start):
            whole = rows.to_host(batch)
            count = rows.num_rows(whole)
            yield count, None, whole

    @property
    def is_unbatched(self) -> bool:
        """Whether the dataset is known to give single elements, without an axis of rows."""
        return False

    @property
    def inner_shapes(self) -> list[Any] | None:
        """The shape of a row of each array, with `None` for what differs; `None` where the dataset cannot say."""
        return None

    @property
    def policy(self) -> AutoShardPolicy:
        """The policy that the dataset itself asks for."""
        return AutoShardPolicy.AUTO

    @property
    def reads_files(self) -> bool:
        """Whether `AutoShardPolicy.AUTO` means `FILE`."""
        return False

    def share_of_files(self, num_workers: int, worker_index: int) -> Source:
        """Returns a source that reads only this worker's files: every `num_workers`-th of the dataset's `files`."""
        return type(self)(with_share_of_files(self.dataset, self.kind, num_workers, worker_index))

    def hinted(self, num_workers: int, worker_index: int) -> Source:
        """Returns a source that reads what the dataset's own hint leaves to this worker."""
        raise DatasetError(
            "AutoShardPolicy.HINT needs a tf.data.Dataset that calls shard(SHARD_HINT, SHARD_HINT).",
            received={"dataset": self.kind},
            hint="Use AutoShardPolicy.DATA, or `distribute_datasets_from_function`.",
        )


def with_share_of_files(dataset: Any, kind: str, num_workers: int, worker_index: int) -> Any:
    """Returns a copy of a dataset whose attribute `files` is this worker's part."""
    if not hasattr(dataset, "files"):
        raise DatasetError(
            "AutoShardPolicy.FILE cannot shard the dataset: it has no attribute `files`.",
            received={"dataset": kind},
            hint="Add an attribute `files` (a list) that `__iter__` reads, or use AutoShardPolicy.DATA or "
            "`distribute_datasets_from_function`.",
        )
    files = list(dataset.files)
    if len(files) < num_workers:
        raise DatasetError(
            "AutoShardPolicy.FILE cannot shard the dataset: it has fewer files than workers.",
            received={"files": len(files), "workers": num_workers},
            hint="Write the data to more files, or use AutoShardPolicy.DATA.",
        )
    share = copy.copy(dataset)
    share.files = files[worker_index::num_workers]
    return share
