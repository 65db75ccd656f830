"""`Checkpoint`: saves and restores objects, every worker its share."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kdist import faults, tracing
from kdist.checkpoint import ending, folders, layout, writing
from kdist.checkpoint.folders import gather_from
from kdist.cluster import logs
from kdist.context import current_strategy, joined_strategy
from kdist.errors import CheckpointError, InvalidArgumentError, WorkerMismatchError

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime
    from kdist.checkpoint.restoring import RestoreStatus
    from kdist.context import StrategyLike

# The last saves, unless somebody has waited for them, by the order in which their checkpoints were made.
# That is the same on all workers, and so is which of them are here.
_open: dict[int, writing.Save] = {}
_serials = itertools.count()


class Checkpoint:
    """Saves and restores models, optimizers, metrics, datasets, numbers: what a job needs to go on.

    Every worker writes its share of the bytes, in parallel and in the background; the checkpoint becomes visible,
    all at once, when the last byte is on disk. Any number of workers restores it, on any backend. All workers must
    save and restore alike.

    Source: https://www.tensorflow.org/api_docs/python/tf/train/Checkpoint

    Args:
        root: An object that is known by the name "root"; usually there is none.
        random: Whether the state of random numbers is saved and restored too: Python's, NumPy's, Keras's global
            seed and the backend's, those of each worker.
        **objects: By name: Keras models (with the optimizer and the metrics that they were compiled with), layers,
            optimizers, metrics, variables and seed generators; distributed datasets and other objects with
            `get_state()` and `set_state(state)`; numbers, strings, arrays; and lists and dictionaries of these.
            Each is an attribute of the checkpoint; numbers and strings are set anew as `checkpoint.epoch = 3`.

    Example:

    ```python
    checkpoint = kdist.Checkpoint(model=model, epoch=0)
    path = kdist.latest_checkpoint("checkpoints")
    if path:
        checkpoint.restore(path)
    for epoch in range(checkpoint.epoch, 10):
        model.fit(x, y)
        checkpoint.epoch = epoch + 1
        checkpoint.save("checkpoints")
    checkpoint.wait()
    ```
    """

    def __init__(self, root: Any = None, *, random: bool = True, **objects: Any) -> None:
        self._objects: dict[str, Any] = {}
        self._random = random
        self._counter = 0
        self._serial = next(_serials)
        for name, value in {**({} if root is None else {"root": root}), **objects}.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name in objects:
            return objects[name]
        raise AttributeError(f"The checkpoint has no object {name!r}. Its objects are: {sorted(objects)}.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        if hasattr(type(self), name):
            raise InvalidArgumentError(
                f"A checkpoint cannot contain an object named {name!r}, because `kdist.Checkpoint` has an "
                "attribute with this name.",
                received={"name": name},
                hint="Pass the object under another name.",
            )
        self._objects[name] = value

    @property
    def save_counter(self) -> int:
        """How often `save` was called; the number of the last checkpoint it made."""
        return self._counter

    def save(self, directory: str | os.PathLike[str], *, asynchronous: bool = True) -> str:
        """Saves a new checkpoint in a directory. All workers must call it.

        Checkpoints are numbered: "ckpt-1", "ckpt-2", …; none that is there is replaced.

        Args:
            directory: Where. Workers that see the same folder write into it together; one that does not writes
                a whole checkpoint by itself.
            asynchronous: Whether to return as soon as the values are copied, and write in the background. If that
                fails, the next `save` or `wait`, or the end of `fit`, raises.

        Returns:
            The path of the checkpoint, for `restore`.

        Raises:
            CheckpointError: On all workers, if one cannot write; or if the last asynchronous save has failed.
        """
        return self.save_as(directory, "ckpt", asynchronous=asynchronous)

    def save_as(
        self,
        directory: str | os.PathLike[str],
        prefix: str,
        number: int | None = None,
        *,
        asynchronous: bool = True,
        after: Callable[[], None] | None = None,
    ) -> str:
        """As `save`, under a name and, where wanted, a number of one's own. A checkpoint of that name is replaced.

        Args:
            directory: As in `save`.
            prefix: What comes before the number.
            number: By default the next one.
            asynchronous: As in `save`.
            after: Called once the checkpoint is visible, in the thread and by the worker that made it so.
        """
        directory = os.path.abspath(directory)

        def choose() -> int:
            if number is not None:
                return number
            there = [found.number for found in layout.find(directory, prefix)]
            return max([self._counter, *there]) + 1

        with tracing.span("beginning a save", "save"):
            return self._save(directory, prefix, choose, asynchronous, number is not None, after)

    def write(self, path: str | os.PathLike[str], *, asynchronous: bool = True) -> str:
        """Saves a checkpoint under a path of its own; what is there is replaced. All workers must call it.

        Args:
            path: Of the checkpoint, as `"checkpoints/best"`.
            asynchronous: As in `save`.

        Returns:
            The path, for `read`.

        Raises:
            CheckpointError: As in `save`.
        """
        directory, name = os.path.split(os.path.abspath(path))
        with tracing.span("beginning a save", "save"):
            return self._save(directory, name, None, asynchronous)

    def wait(self) -> None:
        """Waits until the last save is visible on all workers. All workers must call it.

        Raises:
            CheckpointError: It failed on some worker; on all workers.
        """
        if self._serial in _open:
            _wait_for(self.runtime(), [self._serial])

    def restore(self, path: str | os.PathLike[str] | None) -> RestoreStatus:
        """Restores everything that the checkpoint and this object both have. All workers must call it.

        The number of workers and the backend may be others than when it was saved. Every byte is checked before
        anything is assigned; an optimizer without variables gets them first.

        Args:
            path: What `save` returned, or `kdist.latest_checkpoint(directory)`; of its `None`, where there is no
                checkpoint yet, nothing is restored.

        Returns:
            A status, whose `assert_consumed()` makes sure that nothing was left over.

        Raises:
            CheckpointNotFoundError: There is no complete checkpoint.
            CheckpointCorruptError: It is damaged; the hint names the one before it.
            CheckpointMismatchError: A model (or another object) is not the one that was saved; names the first
                variable that differs.
        """
        status, self._counter = self._restore(path)
        return status

    def read(self, path: str | os.PathLike[str]) -> RestoreStatus:
        """As `restore`, for what `write` wrote: `save_counter` stays as it is.

        Args:
            path: What `write` returned.

        Returns:
            As `restore`.
        """
        return self._restore(path)[0]

    # ----------------------------------------------------------------------------------------------------------

    def _strategy(self) -> StrategyLike | None:
        from kdist.checkpoint import state

        return state.strategy_of(self._objects) or current_strategy() or joined_strategy()

    def settle(self) -> None:
        """Waits for a save under way, if there is one, on all workers; its failure is told at the next one."""
        if self._serial in _open:
            _open[self._serial].join()
            gather_from(self.runtime(), None)

    def sync(self) -> None:
        """Brings the state of models in training into their variables; on JAX it lives elsewhere."""
        from kdist.checkpoint import state

        state.sync(self._objects)

    def runtime(self) -> Runtime | None:
        """The runtime whose workers save and restore together; `None` for this process alone."""
        strategy = self._strategy()
        return None if strategy is None else strategy.runtime

    def _save(
        self,
        directory: str,
        prefix: str,
        choose: Callable[[], int] | None,
        asynchronous: bool,
        explicit: bool = False,
        after: Callable[[], None] | None = None,
    ) -> str:
        from kdist.checkpoint import snapshot

        last = _open.pop(self._serial, None)
        told = None if last is None else last.join()
        runtime = self.runtime()
        try:
            contents = snapshot.describe(self._objects, self._strategy(), self._random)
        except Exception as error:
            problem = told or f"{type(error).__name__}: {error}"
            with contextlib.suppress(CheckpointError):  # the others wait to hear of it
                folders.prepare(runtime, folders.Wish(directory, prefix, None, None, problem))
            raise
        faults.point("save-begin")
        facts = f"{len(contents.sources)} tensors, {zlib.crc32(json.dumps(contents.facts()).encode()):08x}"
        wish = folders.Wish(directory, prefix, choose, facts, told)
        try:
            folder, save_id, number = folders.prepare(runtime, wish)
        except CheckpointError as error:
            raise error from None if last is None else last.error
        if runtime is None or runtime.worker_index == 0:
            ending.note_saved(directory)
        logs.logger.debug("saving %s", folder.final)
        save = _open[self._serial] = writing.Save(folder, after)
        if choose is not None:
            self._counter = self._counter + 1 if explicit or number is None else number
        try:
            share = snapshot.take(contents, folder, runtime, save_id, number, self._counter)
            if asynchronous:
                snapshot.copy(share)
        except BaseException as error:
            # The others are writing already; they learn it from the folder.
            writing.abandon(folder, error)
            raise
        save.start(share, background=asynchronous)
        if not asynchronous:
            self.wait()
        return folder.final

    def _restore(self, path: str | os.PathLike[str] | None) -> tuple[RestoreStatus, int]:
        from kdist.checkpoint import restoring

        runtime = self.runtime()
        self.settle()
        found = gather_from(runtime, path is not None)
        if path is None and not any(found):
            return restoring.RestoreStatus("None", [], list(self._objects)), self._counter
        if path is None or not all(found):
            raise WorkerMismatchError(
                "Some workers restore a checkpoint, and others have none.",
                received={f"worker_{i}": "a path" if there else None for i, there in enumerate(found)},
                hint="Save to a directory that all workers share, or copy the checkpoint to every worker.",
            )
        logs.logger.debug("restoring %s", path)
        return restoring.restore(
            os.path.abspath(path), self._objects, self._strategy(), runtime, self._random
        )

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self._objects)}>"


def settle_all(runtime: Runtime | None) -> None:
    """Waits, on all workers, for what a `fit` that was interrupted is still writing: the next one may want it."""
    for save in _open.values():
        save.join()
    gather_from(runtime, None)


def wait_for_all(runtime: Runtime) -> None:
    """Waits for all that is still being written, and raises on all workers if one could not write.

    Called at the end of `fit`, in one exchange: after one that has failed, not all may have the same
    checkpoints to wait for.
    """
    _wait_for(runtime, sorted(_open))


def _wait_for(runtime: Runtime | None, serials: Sequence[int]) -> None:
    problems = {told: _open[serial].error for serial in serials if (told := _open[serial].join())}
    for serial in serials:
        del _open[serial]
    for index, theirs in enumerate(gather_from(runtime, list(problems))):
        if theirs:
            error = CheckpointError(
                f"Worker {index} could not write a checkpoint: {theirs[0]}",
                hint="" if "Received:" in theirs[0] else f"Fix the cause on worker {index}, then save again.",
            )
            raise error from next(iter(problems.values()), None)


@atexit.register
def _report() -> None:
    """Says at the end of the process what nobody has asked for: a save that failed is never passed over."""
    for save in _open.values():
        if problem := save.join():
            logs.logger.error("%s", problem)
