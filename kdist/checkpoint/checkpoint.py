"""`Checkpoint`: saves and restores objects, every worker its share."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdist import faults
from kdist.backends.messages import gather
from kdist.checkpoint import layout
from kdist.context import current_strategy, joined_strategy
from kdist.errors import CheckpointError, InvalidArgumentError, WorkerMismatchError

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime
    from kdist.checkpoint.restoring import RestoreStatus
    from kdist.checkpoint.writing import Save
    from kdist.context import StrategyLike

# Those whose last save nobody has waited for, by the order in which they were made, which is that of all workers.
_open: dict[int, Checkpoint] = {}
_serials = itertools.count()


class Checkpoint:
    """Saves and restores models, optimisers, metrics, datasets, numbers: what a job needs to go on.

    Every worker writes its share of the bytes, in parallel and in the background; the checkpoint becomes visible,
    all at once, when the last byte is on disk. Any number of workers restores it, on any backend. All workers must
    save and restore alike.

    Source: https://www.tensorflow.org/api_docs/python/tf/train/Checkpoint

    Args:
        root: An object that is known by the name "root"; usually there is none.
        random: Whether the state of random numbers is saved and restored too: Python's, NumPy's, Keras's global
            seed and the backend's, those of each worker.
        **objects: By name: Keras models (with the optimiser and the metrics that they were compiled with), layers,
            optimisers, metrics, variables and seed generators; distributed datasets and other objects with
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
        self._pending: Save | None = None
        self._failure: tuple[str, Exception] | None = None
        for name, value in {**({} if root is None else {"root": root}), **objects}.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name in objects:
            return objects[name]
        raise AttributeError(f"The checkpoint has no object {name!r}; it has {sorted(objects)}.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        if hasattr(type(self), name):
            raise InvalidArgumentError(
                "An object of a checkpoint must have a name that the checkpoint does not need itself.",
                received={"name": name},
                hint=f"Call it my_{name}.",
            )
        self._objects[name] = value

    @property
    def save_counter(self) -> int:
        """How often `save` was called; the number of the last checkpoint it made."""
        return self._counter

    @property
    def is_saving(self) -> bool:
        """Whether this worker still writes its part of the last save."""
        return self._pending is not None and not self._pending.is_done

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
        return self._save(directory, name, None, asynchronous)

    def wait(self) -> None:
        """Waits until the last save is visible on all workers. All workers must call it.

        Raises:
            CheckpointError: It failed on some worker; on all workers.
        """
        self._join()
        # On all workers alike, as the failure may not be.
        if _open.pop(self._serial, None) is None:
            return
        said = gather_from(self.runtime(), self._told())
        failure, self._failure = self._failure, None
        for index, problem in enumerate(said):
            if problem is not None:
                raise CheckpointError(f"A checkpoint could not be written: worker {index}: {problem}") from (
                    failure and failure[1]
                )

    def restore(self, path: str | os.PathLike[str] | None) -> RestoreStatus:
        """Restores everything that the checkpoint and this object both have. All workers must call it.

        The number of workers and the backend may be others than when it was saved. Every byte is checked before
        anything is assigned; an optimiser without variables gets them first.

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
        return self._restore(path, counter=True)

    def read(self, path: str | os.PathLike[str]) -> RestoreStatus:
        """As `restore`, for what `write` wrote: `save_counter` stays as it is.

        Args:
            path: What `write` returned.

        Returns:
            As `restore`.
        """
        return self._restore(path, counter=False)

    # ----------------------------------------------------------------------------------------------------------

    def _strategy(self) -> StrategyLike | None:
        from kdist import keras_hooks

        def search(values: Any) -> StrategyLike | None:
            for value in values:
                if isinstance(value, (dict, list, tuple)):
                    found = search(value.values() if isinstance(value, dict) else value)
                else:
                    found = None
                    with contextlib.suppress(TypeError):  # what no weak reference can be made to
                        found = keras_hooks.strategy_of(value)
                if found is not None:
                    return found
            return None

        return search(self._objects.values()) or current_strategy() or joined_strategy()

    def settle(self) -> None:
        """Waits for a save under way, if there is one, on all workers; its failure is told at the next one."""
        if self._pending is not None:  # on all workers alike
            self._join()
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
        from kdist.checkpoint import places, snapshot, writing

        self._join()
        runtime = self.runtime()
        failure, told = self._failure, self._told()
        self._failure = None
        _open.pop(self._serial, None)
        try:
            contents = snapshot.describe(self._objects, self._strategy(), self._random)
        except Exception as error:
            problem = told or f"{type(error).__name__}: {error}"
            with contextlib.suppress(CheckpointError):  # the others wait to hear of it
                places.meet(runtime, places.Wish(directory, prefix, None, None, problem))
            raise
        faults.point("save-begin")
        facts = f"{len(contents.sources)} tensors, {zlib.crc32(json.dumps(contents.facts()).encode()):08x}"
        wish = places.Wish(directory, prefix, choose, facts, told)
        try:
            place, save_id, number = places.meet(runtime, wish)
        except CheckpointError as error:
            raise error from failure and failure[1]
        _open[self._serial] = self
        if choose is not None:
            self._counter = self._counter + 1 if explicit or number is None else number
        try:
            share = snapshot.take(contents, place, runtime, save_id, number, self._counter)
            if asynchronous:
                snapshot.copy(share)
        except BaseException as error:
            # The others are writing already; they learn it from the folder.
            writing.abandon(place, error)
            raise
        self._pending = writing.Save(place, share, after, background=asynchronous)
        if not asynchronous:
            self.wait()
        return place.final

    def _join(self) -> None:
        save, self._pending = self._pending, None
        if save is not None:
            save.join()
            if save.error is not None:
                self._failure = (save.path, save.error)

    def _told(self) -> str | None:
        if self._failure is None:
            return None
        path, error = self._failure
        name = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        return f"the save of {path} failed: {name}{error}"

    def _restore(self, path: str | os.PathLike[str] | None, counter: bool) -> RestoreStatus:
        from kdist.checkpoint import restoring

        runtime = self.runtime()
        self.settle()
        found = gather_from(runtime, path is not None)
        if path is None and not any(found):
            return restoring.RestoreStatus("None", [], list(self._objects))
        if path is None or not all(found):
            raise WorkerMismatchError(
                "All workers must restore the same checkpoint, or none.",
                received={f"worker_{i}": "a path" if there else None for i, there in enumerate(found)},
                hint="Is the folder the same one on all hosts?",
            )
        status, saved = restoring.restore(
            os.path.abspath(path), self._objects, self._strategy(), runtime, self._random
        )
        if counter:
            self._counter = saved
        return status

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self._objects)}>"


def gather_from(runtime: Runtime | None, value: Any) -> list[Any]:
    """Gathers a JSON value from every worker; from this process alone where no strategy has joined others."""
    return [value] if runtime is None else gather(runtime, value)


def settle_all(runtime: Runtime | None) -> None:
    """Waits, on all workers, for what a `fit` that was interrupted is still writing: the next one may want it."""
    for checkpoint in list(_open.values()):
        checkpoint._join()
    gather_from(runtime, None)


def wait_for_all(runtime: Runtime) -> None:
    """Waits for all that is still being written, and raises on all workers if one could not write.

    Called at the end of `fit`. All workers must call it, in one exchange: after a `fit` that has failed, not all
    may have the same checkpoints to wait for.

    Args:
        runtime: Whose workers take part.
    """
    problems = []
    for serial in sorted(_open):
        checkpoint = _open.pop(serial)
        checkpoint._join()
        if (told := checkpoint._told()) is not None:
            problems.append(told)
            checkpoint._failure = None
    for index, theirs in enumerate(gather(runtime, problems)):
        if theirs:
            raise CheckpointError(f"A checkpoint could not be written: worker {index}: {theirs[0]}")


@atexit.register
def _report() -> None:
    """Says at the end of the process what nobody has asked for: a save that failed is never passed over."""
    for checkpoint in _open.values():
        checkpoint._join()
        told = checkpoint._told()
        if told is not None:
            print(f"kdist: {told}", file=sys.stderr)
