"""`CheckpointManager`: keeps the newest checkpoints of a directory and deletes the others."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdist.checkpoint import layout, storage
from kdist.checkpoint.folders import gather_from, remove
from kdist.errors import (
    CheckpointError,
    CheckpointMismatchError,
    InvalidArgumentError,
    check_positive,
    check_whole,
)
from kdist.whole_files import is_remote

if TYPE_CHECKING:
    import keras

    from kdist.checkpoint.checkpoint import Checkpoint


class CheckpointManager:
    """Keeps the newest checkpoints of a directory, and deletes older ones when a new checkpoint is complete.

    All workers must create the manager with the same arguments and make the same calls.

    Source: https://www.tensorflow.org/api_docs/python/tf/train/CheckpointManager

    Args:
        checkpoint: The `kdist.Checkpoint` to save and restore.
        directory: The directory of the checkpoints, or a URL such as `"s3://bucket/run"`.
        max_to_keep: The number of checkpoints to keep, or `None` to keep all.
        keep_checkpoint_every_n_hours: If set, also keep one old checkpoint per this many hours.
        checkpoint_name: The part of the name before the number.
        step_counter: The source of the current step for `checkpoint_interval`: the name of a number in the
            checkpoint (such as "step"), a function, or a variable such as `optimizer.iterations`.
        checkpoint_interval: The minimum number of steps between checkpoints. Earlier saves are skipped.
        init_fn: A function that `restore_or_initialize` calls if there is no checkpoint.

    Raises:
        InvalidArgumentError: If an argument is invalid or `checkpoint_interval` has no `step_counter`.

    Example:

    ```python
    checkpoint = kdist.Checkpoint(model=model, step=0)
    manager = kdist.CheckpointManager(
        checkpoint, "checkpoints", max_to_keep=3, step_counter="step", checkpoint_interval=100
    )
    manager.restore_or_initialize()
    for batch in batches:
        train_step(batch)
        checkpoint.step += 1
        manager.save()  # every 100 steps
    manager.wait()
    ```
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: str | Callable[[], int] | keras.Variable | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
    ) -> None:
        if max_to_keep is not None:
            hint = "Pass max_to_keep=3, or max_to_keep=None to keep all checkpoints."
            check_whole("max_to_keep", max_to_keep, hint)
        if keep_checkpoint_every_n_hours is not None:
            hint = "Pass a number of hours: keep_checkpoint_every_n_hours=2"
            check_positive("keep_checkpoint_every_n_hours", keep_checkpoint_every_n_hours, hint)
        if checkpoint_interval is not None and step_counter is None:
            raise InvalidArgumentError(
                "`checkpoint_interval` is set, but `step_counter` is not.",
                received={"checkpoint_interval": checkpoint_interval, "step_counter": None},
                hint='Count steps in kdist.Checkpoint(model=model, step=0), and pass step_counter="step".',
            )
        known = step_counter is None or isinstance(step_counter, str) or callable(step_counter)
        if not (known or hasattr(step_counter, "assign")):
            raise InvalidArgumentError(
                "`step_counter` is not a variable, a function or the name of a number in the checkpoint.",
                received={"step_counter": step_counter},
                hint="If the optimizer accumulates gradients, `optimizer.iterations` is a constant. Pass a function: "
                "step_counter=lambda: optimizer.iterations",
            )
        is_found = layout.prefix_of(layout.numbered(checkpoint_name, 1)) == checkpoint_name
        if not is_found or "/" in checkpoint_name or checkpoint_name.startswith("."):
            raise InvalidArgumentError(
                "`checkpoint_name` is empty, contains a slash or a line break, or starts with a dot.",
                received={"checkpoint_name": checkpoint_name},
                hint='Pass a plain name: checkpoint_name="ckpt"',
            )
        self._checkpoint = checkpoint
        self._directory = storage.absolute(directory)
        self._max_to_keep = max_to_keep
        self._every = None if keep_checkpoint_every_n_hours is None else keep_checkpoint_every_n_hours * 3600
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._init_fn = init_fn
        self._last_step: int | None = None
        self._made = time.time()
        self._is_noted = False

    @property
    def checkpoint(self) -> Checkpoint:
        """The `kdist.Checkpoint` that this manager saves and restores."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The absolute path of the directory, or its URL."""
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        """The minimum number of steps between two checkpoints, or `None`."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of complete checkpoints, oldest first. Omits checkpoints kept per n hours."""
        return [found.path for found in self._managed(self._read_kept())]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest complete checkpoint, or `None`. Ignores unfinished saves."""
        return layout.latest_checkpoint(self._directory, self._name)

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        asynchronous: bool | None = None,
    ) -> str | None:
        """Saves a checkpoint if `checkpoint_interval` steps have passed. All workers must call it.

        Args:
            checkpoint_number: The number of the checkpoint. Defaults to the next number.
            check_interval: Whether to respect `checkpoint_interval`. If false, always save.
            asynchronous: As in `Checkpoint.save`. Defaults to true.

        Returns:
            The path of the checkpoint, or `None` if nothing was saved.

        Raises:
            CheckpointError: As in `Checkpoint.save`.
            InvalidArgumentError: If `checkpoint_number` is not a whole number of at least 0.
        """
        number = checkpoint_number
        if number is not None:
            number = int(number) if hasattr(number, "assign") else number  # such as `optimizer.iterations`
            hint = "Pass a number for the name of the checkpoint, or None for the next number."
            number = check_whole("checkpoint_number", number, hint, least=0)
        step = self._step()
        if check_interval and self._is_too_early(step):
            return None
        path = self._checkpoint.save_as(
            self._directory,
            self._name,
            number,
            asynchronous=True if asynchronous is None else asynchronous,
            after=self._delete_old,
        )
        self._last_step = step
        return path

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint, or calls `init_fn` if there is none. All workers must call it.

        Returns:
            The path of the restored checkpoint, or `None` if there was none.

        Raises:
            CheckpointError: As in `Checkpoint.restore`, or if workers have different newest checkpoints.
        """
        self._checkpoint.settle()
        path = self.latest_checkpoint
        runtime = self._checkpoint.runtime()
        names = gather_from(runtime, os.path.basename(path) if path else None)
        for index, name in enumerate(names):
            if name != names[0]:
                raise CheckpointMismatchError(
                    f"Worker 0 and worker {index} have different newest checkpoints.",
                    received={"worker_0": names[0], f"worker_{index}": name, "directory": self._directory},
                    hint="Use a directory that all workers share, or copy the newest checkpoint to every worker.",
                )
        if path is not None:
            try:
                self._checkpoint.restore(path)
            except CheckpointError:
                # Another process may delete it at this moment, for example because of its `max_to_keep`.
                if all(gather_from(runtime, storage.of(path).exists(os.path.join(path, layout.INDEX)))):
                    raise
                return self.restore_or_initialize()
            self._last_step = self._step()
        elif self._init_fn is not None:
            self._init_fn()
        return path

    def wait(self) -> None:
        """Waits until the last save is complete on all workers. All workers must call it.

        Raises:
            CheckpointError: On all workers, if the save failed on any worker.
        """
        self._checkpoint.wait()

    # ----------------------------------------------------------------------------------------------------------

    def _step(self) -> int | None:
        counter = self._step_counter
        if counter is None:
            return None
        if isinstance(counter, str):
            return int(getattr(self._checkpoint, counter))
        self._checkpoint.sync()
        if callable(counter):
            return int(counter())
        from kdist.checkpoint import state

        return int(state.to_host(counter))

    def _is_too_early(self, step: int | None) -> bool:
        if self._interval is None or step is None or self._last_step is None:
            return False
        # The step is smaller than the last one if the script has restored an earlier checkpoint.
        return 0 <= step - self._last_step < self._interval

    def _managed(self, state: dict[str, Any]) -> list[layout.Found]:
        # If a user deletes a kept checkpoint, the hidden file still lists its number, which a new checkpoint can get.
        return [
            found
            for found in layout.find(self._directory, self._name)
            if found.number not in state["kept"] or found.saved_at > state["last"]
        ]

    def _delete_old(self) -> None:
        """Runs on the committing worker after the commit, so that a failed save deletes nothing."""
        if self._max_to_keep is None:
            return
        state = self._read_kept()
        if self._every is not None and not self._is_noted:
            # Otherwise, a job that restarts more often than every n hours would keep nothing.
            self._write_kept(state)
            self._is_noted = True
        for found in self._managed(state)[: -self._max_to_keep]:
            if self._every is not None and found.saved_at - state["last"] >= self._every:
                state["kept"].append(found.number)
                state["last"] = found.saved_at
                self._write_kept(state)
                continue
            _delete(found.path)

    @property
    def _kept_path(self) -> str:
        return os.path.join(self._directory, f".{self._name}.kept.json")

    def _read_kept(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            state = json.loads(storage.of(self._directory).read(self._kept_path))
            return {"last": float(state["last"]), "kept": list(state["kept"])}
        return {"last": self._made, "kept": []}

    def _write_kept(self, state: dict[str, Any]) -> None:
        storage.of(self._directory).put(self._kept_path, json.dumps(state).encode())

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._directory!r}>"


def _delete(path: str) -> None:
    """Renames a checkpoint to a hidden name, so that it vanishes at once, and then removes its files."""
    if not layout.is_checkpoint(path):
        return  # a foreign directory with a matching name
    if is_remote(path):
        remove(path)
        return
    directory, name = os.path.split(path)
    going = os.path.join(directory, layout.temporary(name, secrets.token_hex(8)))
    with contextlib.suppress(OSError):
        os.rename(path, going)
        remove(going)
