"""`Checkpoint`: saves objects in parallel on all workers, and restores them."""

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
from kdist.backends.contract import Runtime
from kdist.checkpoint import end_of_training, folders, layout, storage, writing
from kdist.checkpoint.folders import gather_from
from kdist.cluster import logs
from kdist.context import StrategyLike, current_strategy, joined_strategy
from kdist.errors import CheckpointError, InvalidArgumentError, WorkerMismatchError

if TYPE_CHECKING:
    from kdist.checkpoint.restoring import RestoreStatus

# The last save of each `Checkpoint` until its result was checked, by the serial number of the `Checkpoint`.
# All workers create and save checkpoints in the same order, so the keys are the same on all workers.
_open: dict[int, writing.Save] = {}
_serials = itertools.count()


class Checkpoint:
    """Saves and restores the state of a job: models, optimizers, metrics, datasets and numbers.

    Each worker writes a share of the bytes, in parallel and in the background. The checkpoint becomes visible
    when its last byte is on disk. You can restore it on any number of workers and on any backend. All workers
    must make the same calls.

    Source: https://www.tensorflow.org/api_docs/python/tf/train/Checkpoint

    Args:
        root: An optional object that gets the name "root".
        random: Whether to include the random state of each worker: Python, NumPy, Keras's global seed and the
            backend.
        **objects: Named objects: Keras models (with optimizer and metrics from `compile`), layers,
            optimizers, metrics, variables and seed generators; distributed datasets and other objects with
            `get_state()` and `set_state(state)`; numbers, strings, arrays; lists and dictionaries of these.
            Each is an attribute of the checkpoint. To change a number, set it, as in `checkpoint.epoch = 3`.

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

    def __init__(self, root: object = None, *, random: bool = True, **objects: object) -> None:
        if not isinstance(random, bool):
            raise InvalidArgumentError(
                "`random` is not a boolean: it sets whether the checkpoint contains the global random state.",
                received={"random": random},
                hint="Pass a seed generator under another name.",
            )
        for name in objects:
            if name.startswith("_"):
                raise InvalidArgumentError(
                    "The name of an object in the checkpoint starts with an underscore.",
                    received={"name": name},
                    hint="Pass the object under another name.",
                )
        self._objects: dict[str, object] = {}
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

    def __setattr__(self, name: str, value: object) -> None:
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
        """The number of the last checkpoint from `save`. A save with an explicit number adds one."""
        return self._counter

    def save(self, directory: str | os.PathLike[str], *, asynchronous: bool = True) -> str:
        """Saves a new checkpoint in a directory. All workers must call it.

        The names are numbered: "ckpt-1", "ckpt-2", and so on. Existing checkpoints are never replaced.

        Args:
            directory: The directory of the checkpoints, or a URL such as `"s3://bucket/run"`. Workers that
                share it write one checkpoint together. A worker that does not share it writes a whole
                checkpoint.
            asynchronous: Whether to return when the values are copied, and to write in the background. If
                writing fails, the next `save` or `wait`, or the end of `fit`, raises the error.

        Returns:
            The path of the checkpoint, for `restore`.

        Raises:
            CheckpointError: On all workers, if a worker cannot write or if the last asynchronous save failed.
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
        """Saves a checkpoint like `save`, with a custom name and number.

        Args:
            directory: As in `save`.
            prefix: The part of the name before the number.
            number: The number of the checkpoint, which replaces an existing checkpoint. Defaults to the next number.
            asynchronous: As in `save`.
            after: A function that the committing worker calls when the checkpoint is visible.
        """
        if not os.fspath(directory):
            raise InvalidArgumentError(
                "The directory of the checkpoints is empty.",
                received={"directory": directory},
                hint='Pass a directory: checkpoint.save("checkpoints")',
            )
        directory = storage.absolute(directory)

        def choose() -> int:
            if number is not None:
                return number
            there = [found.number for found in layout.find(directory, prefix)]
            # Other objects of this process may be saving to the same directory.
            folders_in_use = [save.folder for save in _open.values()]
            there += [
                folder.number
                for folder in folders_in_use
                if folder.number is not None
                and folder.final == os.path.join(directory, layout.numbered(prefix, folder.number))
            ]
            return max([self._counter, *there]) + 1

        with tracing.span("beginning a save", "save"):
            return self._save(directory, prefix, choose, asynchronous, number is not None, after)

    def write(self, path: str | os.PathLike[str], *, asynchronous: bool = True) -> str:
        """Saves a checkpoint to a path and replaces an existing checkpoint there. All workers must call it.

        Args:
            path: The path of the checkpoint, such as `"checkpoints/best"`, or a URL.
            asynchronous: As in `save`.

        Returns:
            The path, for `read`.

        Raises:
            CheckpointError: As in `save`.
        """
        directory, name = storage.split(storage.absolute(path))
        with tracing.span("beginning a save", "save"):
            return self._save(directory, name, None, asynchronous)

    def wait(self) -> None:
        """Waits until the last save is complete on all workers. All workers must call it.

        Raises:
            CheckpointError: On all workers, if the save failed on any worker.
        """
        if self._serial in _open:
            _wait_for(self.runtime(), [self._serial])

    def restore(self, path: str | os.PathLike[str] | None) -> RestoreStatus:
        """Restores all objects that both the checkpoint and this object contain. All workers must call it.

        The number of workers and the backend may differ from the save. kdist checks every byte that it needs
        before it assigns a value. It creates missing optimizer variables first.

        Args:
            path: The path from `save` or `kdist.latest_checkpoint(directory)`. If there are no checkpoints
                yet and the path is `None`, nothing is restored.

        Returns:
            A status. Its method `assert_consumed()` raises an error if an object was not restored.

        Raises:
            CheckpointNotFoundError: If the path is not a complete checkpoint.
            CheckpointCorruptError: If the checkpoint is corrupt. The hint contains the previous checkpoint.
            CheckpointMismatchError: If an object does not match the saved object. The message contains the
                first variable that differs.
        """
        status, self._counter = self._restore(path)
        return status

    def read(self, path: str | os.PathLike[str]) -> RestoreStatus:
        """Restores a checkpoint from `write`. Does the same as `restore`, but does not change `save_counter`.

        Args:
            path: The path that `write` returned.

        Returns:
            The same status as `restore`.
        """
        return self._restore(path)[0]

    # ----------------------------------------------------------------------------------------------------------

    def _strategy(self) -> StrategyLike | None:
        from kdist.checkpoint import state

        return state.strategy_of(self._objects) or current_strategy() or joined_strategy()

    def settle(self) -> None:
        """Waits for unfinished saves on all workers. The next `save` or `wait` raises their errors, if any."""
        settle_all(self.runtime())

    def sync(self) -> None:
        """Copies the state of models in training to their variables. On JAX, `fit` keeps it elsewhere."""
        from kdist.checkpoint import state

        state.sync(self._objects)

    def runtime(self) -> Runtime | None:
        """Returns the runtime whose workers save and restore together, or `None` for this process only."""
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
            with contextlib.suppress(CheckpointError):  # the other workers wait for this exchange
                folders.prepare(runtime, folders.Wish(directory, prefix, None, True, None, problem))
            raise
        faults.point("save-begin")
        facts = f"{len(contents.sources)} tensors, {zlib.crc32(json.dumps(contents.facts()).encode()):08x}"
        wish = folders.Wish(directory, prefix, choose, explicit or choose is None, facts, told)
        try:
            folder, save_id, number = folders.prepare(runtime, wish)
        except CheckpointError as error:
            raise error from None if last is None else last.error
        if runtime is None or runtime.worker_index == 0:
            end_of_training.note_saved(directory)
        logs.logger.debug("saving %s", folder.final)
        save = _open[self._serial] = writing.Save(folder, after)
        if choose is not None:
            self._counter = self._counter + 1 if explicit or number is None else number
        try:
            share = snapshot.take(contents, folder, runtime, save_id, number, self._counter)
            if asynchronous:
                snapshot.copy(share)
            save.start(share, background=asynchronous)
        except BaseException as error:  # also Ctrl-C during a synchronous save
            # The other workers already write. They find the failure in the temporary directory.
            writing.abandon(folder, error)
            raise
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
            storage.absolute(path), self._objects, self._strategy(), runtime, self._random
        )

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self._objects)}>"


def settle_all(runtime: Runtime | None) -> None:
    """Waits on all workers for saves of all objects, because the caller may restore them."""
    for save in _open.values():
        save.join()
    gather_from(runtime, None)


def wait_for_all(runtime: Runtime) -> None:
    """Waits for all saves, and raises on all workers if a worker could not write. `fit` calls it at its end.

    It uses a single exchange, because after a failed save the workers may have different saves to wait for.
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
    """Logs failed saves that were never waited for, at the end of the process."""
    for save in _open.values():
        if problem := save.join():
            logs.logger.error("%s", problem)
