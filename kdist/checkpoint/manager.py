"""`CheckpointManager`: keeps the newest checkpoints of a directory and deletes the others."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdist.checkpoint import layout
from kdist.checkpoint.folders import gather_from, remove
from kdist.errors import CheckpointMismatchError, InvalidArgumentError
from kdist.whole_files import whole_file

if TYPE_CHECKING:
    from kdist.checkpoint.checkpoint import Checkpoint


class CheckpointManager:
    """Keeps the newest checkpoints of a directory, and deletes older ones once a newer one is complete.

    All workers must make it and call its methods alike.

    Source: https://www.tensorflow.org/api_docs/python/tf/train/CheckpointManager

    Args:
        checkpoint: The `kdist.Checkpoint` to save and restore.
        directory: Where.
        max_to_keep: How many checkpoints to keep; `None` for all.
        keep_checkpoint_every_n_hours: Of those that would be deleted, keep one for every so many hours.
        checkpoint_name: What comes before the number.
        step_counter: Says which step it is, for `checkpoint_interval`: the name of a number of the checkpoint
            ("step"), a function, or a variable such as `optimizer.iterations`.
        checkpoint_interval: `save` does nothing until so many steps have passed since the last checkpoint.
        init_fn: Called by `restore_or_initialize` where there is no checkpoint.

    Raises:
        InvalidArgumentError: An argument cannot work.

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
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
    ) -> None:
        if max_to_keep is not None and (not isinstance(max_to_keep, int) or max_to_keep < 1):
            raise InvalidArgumentError(
                "`max_to_keep` is not a positive integer or None.",
                received={"max_to_keep": max_to_keep},
                hint="Pass max_to_keep=3, or max_to_keep=None to keep all checkpoints.",
            )
        if checkpoint_interval is not None and step_counter is None:
            raise InvalidArgumentError(
                "`checkpoint_interval` is set, but `step_counter` is not.",
                received={"checkpoint_interval": checkpoint_interval, "step_counter": None},
                hint='Count steps in kdist.Checkpoint(model=model, step=0), and pass step_counter="step".',
            )
        if not checkpoint_name or "/" in checkpoint_name or checkpoint_name.startswith("."):
            raise InvalidArgumentError(
                "`checkpoint_name` is empty, contains a slash or starts with a dot.",
                received={"checkpoint_name": checkpoint_name},
                hint='Pass a plain name: checkpoint_name="ckpt"',
            )
        self._checkpoint = checkpoint
        self._directory = os.path.abspath(directory)
        self._max_to_keep = max_to_keep
        self._every = None if keep_checkpoint_every_n_hours is None else keep_checkpoint_every_n_hours * 3600
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._init_fn = init_fn
        self._last_step: int | None = None
        self._made = time.time()

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that is saved and restored."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        """Steps between two checkpoints."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the complete checkpoints, the oldest first, without those kept for every n hours."""
        kept = self._read_kept()["kept"]
        return [found.path for found in self._find() if found.number not in kept]

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest complete checkpoint; one that is still being written does not count."""
        return layout.latest_checkpoint(self._directory, self._name)

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        asynchronous: bool | None = None,
    ) -> str | None:
        """Saves a checkpoint, unless it is too early for the next one. All workers must call it.

        Args:
            checkpoint_number: Its number; by default one more than the last.
            check_interval: Whether to do nothing until `checkpoint_interval` steps have passed.
            asynchronous: As in `Checkpoint.save`.

        Returns:
            The path of the checkpoint; `None` if it is too early.

        Raises:
            CheckpointError: As `Checkpoint.save`.
        """
        step = self._step()
        if check_interval and self._is_too_early(step):
            return None
        path = self._checkpoint.save_as(
            self._directory,
            self._name,
            None if checkpoint_number is None else int(checkpoint_number),
            asynchronous=True if asynchronous is None else asynchronous,
            after=self._delete_old,
        )
        self._last_step = step
        return path

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint; where there is none, calls `init_fn`. All workers must call it.

        Returns:
            The path of what was restored; `None` where there was nothing.

        Raises:
            CheckpointError: As `Checkpoint.restore`; or some workers have a checkpoint and others have none.
        """
        self._checkpoint.settle()
        path = self.latest_checkpoint
        names = gather_from(self._checkpoint.runtime(), os.path.basename(path) if path else None)
        for index, name in enumerate(names):
            if name != names[0]:
                raise CheckpointMismatchError(
                    f"Worker 0 and worker {index} have different newest checkpoints.",
                    received={"worker_0": names[0], f"worker_{index}": name, "directory": self._directory},
                    hint="Use a directory that all workers share, or copy the newest checkpoint to every worker.",
                )
        if path is not None:
            self._checkpoint.restore(path)
            self._last_step = self._step()
        elif self._init_fn is not None:
            self._init_fn()
        return path

    def wait(self) -> None:
        """Waits until the last save is visible on all workers. All workers must call it.

        Raises:
            CheckpointError: It failed on some worker; on all workers.
        """
        self._checkpoint.wait()

    # ----------------------------------------------------------------------------------------------------------

    def _step(self) -> int | None:
        counter = self._step_counter
        if counter is None:
            return None
        if isinstance(counter, str):
            return int(getattr(self._checkpoint, counter))
        if callable(counter):
            return int(counter())
        from kdist.checkpoint import state

        self._checkpoint.sync()
        return int(state.to_host(counter))

    def _is_too_early(self, step: int | None) -> bool:
        if self._interval is None or step is None or self._last_step is None:
            return False
        return step - self._last_step < self._interval

    def _find(self) -> list[layout.Found]:
        return layout.find(self._directory, self._name)

    def _delete_old(self) -> None:
        """Runs where the checkpoint was made visible, after that: nothing is deleted for one that failed."""
        if self._max_to_keep is None:
            return
        state = self._read_kept()
        managed = [found for found in self._find() if found.number not in state["kept"]]
        for found in managed[: -self._max_to_keep]:
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
            with open(self._kept_path, encoding="utf-8") as file:
                state = json.load(file)
            return {"last": float(state["last"]), "kept": list(state["kept"])}
        return {"last": self._made, "kept": []}

    def _write_kept(self, state: dict[str, Any]) -> None:
        with whole_file(self._kept_path) as file:
            file.write(json.dumps(state).encode())

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._directory!r}>"


def _delete(path: str) -> None:
    """Deletes a checkpoint: it is gone at once, and its files a moment later."""
    if not layout.is_checkpoint(path):
        return  # somebody else's, with a name that looks like ours
    directory, name = os.path.split(path)
    going = os.path.join(directory, layout.temporary(name, secrets.token_hex(8)))
    with contextlib.suppress(OSError):
        os.rename(path, going)
        remove(going)
