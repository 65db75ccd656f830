"""`Source`, the common interface to read the batches of any kind of dataset."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kdist.arrays import rows
from kdist.data.input_options import AutoShardPolicy
from kdist.errors import DatasetError

if TYPE_CHECKING:
    from kdist.arrays.types import Shape, Structure

# Maps the number of rows of a global batch to the range that this worker needs, or to `None` for all rows.
Choice = Callable[[int], tuple[int, int] | None]


class Source:
    """Reads a user's dataset. Each kind of dataset has a subclass."""

    kind: str
    """The name of the kind in messages."""
    can_read_ahead = True
    """Whether batches that were read but not used can be read again."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @property
    def num_batches(self) -> int | None:
        """The number of batches per epoch, or `None` if it is unknown or infinite."""
        return None

    @property
    def is_infinite(self) -> bool:
        """Whether the dataset is known to repeat forever."""
        return False

    def batches(self, epoch: int, start: int = 0) -> Iterator[Structure]:
        """Yields the batches of an epoch.

        Args:
            epoch: The epoch, from 0. Epochs may be read out of order, for example when a job resumes.
            start: The number of batches to skip, as cheaply as the kind allows.
        """
        # Reads and drops skipped batches. A generator here would close the user's generator when it ends.
        return itertools.islice(self.dataset, start, None)

    def chosen(self, epoch: int, start: int, choose: Choice) -> Iterator[tuple[int, Structure, Structure]]:
        """Yields the number of rows of each global batch, with either this worker's rows or the whole batch.

        Kinds that can load single rows override this method, and load only the chosen rows.
        """
        for batch in self.batches(epoch, start):
            whole = rows.to_host(batch)
            count = rows.num_rows(whole)
            yield count, None, whole

    @property
    def is_unbatched(self) -> bool:
        """Whether the dataset is known to yield single elements, without a row axis."""
        return False

    @property
    def inner_shapes(self) -> list[Shape] | None:
        """The row shape of each array, with `None` for varying axes. `None` if unknown."""
        return None

    @property
    def policy(self) -> AutoShardPolicy:
        return AutoShardPolicy.AUTO

    @property
    def reads_files(self) -> bool:
        """Whether `AutoShardPolicy.AUTO` means `FILE`."""
        return False

    def share_of_files(self, num_workers: int, worker_index: int) -> Source:
        """Returns a source that reads only this worker's files: every `num_workers`-th of `files`."""
        return type(self)(with_share_of_files(self.dataset, self.kind, num_workers, worker_index))

    def hinted(self, num_workers: int, worker_index: int) -> Source:
        """Returns a source that reads this worker's shard, according to the hint in the dataset."""
        raise DatasetError(
            "AutoShardPolicy.HINT needs a tf.data.Dataset that calls shard(SHARD_HINT, SHARD_HINT).",
            received={"dataset": self.kind},
            hint="Use AutoShardPolicy.DATA, or `distribute_datasets_from_function`.",
        )


def with_share_of_files(dataset: Any, kind: str, num_workers: int, worker_index: int) -> Any:
    """Returns a copy of the dataset whose attribute `files` contains only this worker's files."""
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
