"""`BackupAndRestore`, which resumes an interrupted `fit`, also in the middle of an epoch."""

from __future__ import annotations

import collections
import contextlib
import numbers
import os
import time
from collections.abc import Mapping

import keras

from kdist.checkpoint import storage
from kdist.checkpoint.checkpoint import Checkpoint, settle_all
from kdist.checkpoint.folders import gather_from, remove
from kdist.checkpoint.layout import position
from kdist.checkpoint.manager import CheckpointManager
from kdist.cluster.logs import logger, notice
from kdist.errors import CheckpointCorruptError, InvalidArgumentError, check_positive
from kdist.training.preemption import TerminationConfig, TerminationWatch
from kdist.training.progress import Progress
from kdist.training.session import progress_of
from kdist.training.voting import RegularExchange

# The number of `fit`s that have ended in this process and deleted their backups, by directory.
_ended: collections.Counter[str] = collections.Counter()


class BackupAndRestore(keras.callbacks.Callback):
    """Saves backups during `fit`, and resumes from the last backup when you restart the same script.

    A resumed run ends with the same weights as an uninterrupted run: no sample is repeated or skipped. A
    backup contains the weights, optimizers, metrics, seeds, random states, position in the data, history, and
    the counters of Keras's callbacks. Every worker writes its share in the background. The number of workers
    may change between starts.

    After a restart, the data must come in the same order. Arrays, data loaders and `PyDataset`s meet this
    condition. In a tf.data pipeline, `shuffle` needs a seed. A generator must start from the beginning: kdist
    reads the consumed batches again and skips them.

    Args:
        backup_dir: The directory for the backups: shared by all workers, or a separate directory per worker.
            A URL such as `"s3://bucket/run"` also works.
        save_freq: `"epoch"`, or a number of steps. `None` or `False` disables this trigger.
        every_seconds: The approximate number of seconds between backups, in addition to `save_freq`.
        delete_checkpoint: Whether to delete the backups at the end of training, as Keras's callback does.
        max_to_keep: The number of backups to keep. If the newest is corrupt, kdist restores an older one.
        save_before_preemption: Whether all workers save after the same step and exit with code 75 when any
            worker receives SIGTERM.
        termination_config: Options to detect and handle a termination; see
            `kdist.experimental.TerminationConfig`. Implies `save_before_preemption`.

    Example:

    ```python
    model.fit(x, y, epochs=10, callbacks=[kdist.callbacks.BackupAndRestore("backup", save_freq=100)])
    ```
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: int | str | None = "epoch",
        every_seconds: float | None = None,
        delete_checkpoint: bool = True,
        max_to_keep: int = 2,
        save_before_preemption: bool = False,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        super().__init__()
        is_number = isinstance(save_freq, numbers.Integral) and save_freq > 0 and save_freq is not True
        save_before_preemption = save_before_preemption or termination_config is not None
        none = save_freq in (None, False) and (every_seconds or save_before_preemption)
        if not (is_number or save_freq == "epoch" or none):
            raise InvalidArgumentError(
                '`save_freq` is not "epoch" or a positive number of steps.',
                received={"save_freq": save_freq, "every_seconds": every_seconds},
                hint='Pass save_freq="epoch", save_freq=100, or save_freq=None with every_seconds=60.',
            )
        if every_seconds is not None:
            check_positive("every_seconds", every_seconds, "Pass a number of seconds: every_seconds=60")
        if not os.fspath(backup_dir):
            raise InvalidArgumentError(
                "`backup_dir` is empty.",
                received={"backup_dir": backup_dir},
                hint='Pass a directory: kdist.callbacks.BackupAndRestore("backup")',
            )
        self.backup_dir = os.fspath(backup_dir)
        self.save_freq = save_freq or None
        self.every_seconds = every_seconds
        self.delete_checkpoint = delete_checkpoint
        self.max_to_keep = max_to_keep
        self._termination = (termination_config or TerminationConfig()) if save_before_preemption else None
        self._watch: TerminationWatch | None = None

    def on_train_begin(self, logs: Mapping[str, object] | None = None) -> None:
        """Restores the last backup, if there is one."""
        self._progress = progress_of(self.model)
        # A new process calls `fit` from the first time on, which must not restore the backups of a later call.
        number = _ended[storage.absolute(self.backup_dir)]
        self._manager = CheckpointManager(
            Checkpoint(model=self.model, fit=self._progress),
            self.backup_dir,
            max_to_keep=self.max_to_keep,
            checkpoint_name=f"fit-{number + 1}" if number else "ckpt",
        )
        runtime = self._manager.checkpoint.runtime()
        settle_all(runtime)
        path = _restore_newest(self._manager)
        self._check_epochs(epochs := self.params.get("epochs"))
        epoch, step = self._progress.epoch, self._progress.step
        if path is not None and self._progress.runtime.worker_index == 0:
            if self._progress.has_stopped or (epochs is not None and epoch >= epochs):
                why = "the backup %s is from the end of the training, epoch %d, so `fit` trains nothing. "
                notice(f"{why}To train again, delete the directory.", path, epoch)
            else:
                notice("resuming at %s, from %s", position(epoch, step), path)
        self._saved_at = self._progress.num_steps
        self._saved_time = time.monotonic()
        self._clock = (
            RegularExchange(runtime, min(1.0, self.every_seconds / 4)) if self.every_seconds else None
        )
        if self._termination is not None:
            self._watch = watch = TerminationWatch(runtime, self._termination)
            # Keras does not call `on_train_end` if `fit` fails, and SIGTERM must have its usual effect then.
            self._progress.at_end.push(lambda kind, *_: watch.close() if kind else None)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        """Saves a backup if it is due. Saves and exits if a worker will be terminated."""
        if self._watch is not None and self._watch.must_leave(self._progress.num_steps):
            self._watch.leave(self._save_now)
        elif self._is_time(self._progress):
            self._save()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        """Saves a backup if `save_freq` is `"epoch"`. Saves and exits if a worker will be terminated."""
        if self._watch is not None and self._watch.must_leave():
            self._watch.leave(self._save_now)
        elif self.save_freq == "epoch":
            self._save()

    def on_train_end(self, logs: Mapping[str, object] | None = None) -> None:
        """Waits for the last backup, and deletes all backups if `delete_checkpoint` is set."""
        self._manager.wait()
        self._warn_of_no_backup()
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        if self.delete_checkpoint:
            _delete_all(self._manager)
            _ended[self._manager.directory] += 1

    def _warn_of_no_backup(self) -> None:
        steps = self._progress.num_steps
        if self._progress.runtime.worker_index or self._manager.checkpoints:
            return
        if isinstance(self.save_freq, numbers.Integral) and 0 < steps < self.save_freq:
            logger.warning(
                "`fit` has written no backup, because its %d steps are fewer than save_freq=%d.\n"
                'Pass a smaller number, or save_freq="epoch".',
                steps,
                self.save_freq,
            )

    def _check_epochs(self, epochs: int | None) -> None:
        """Raises an error if this `fit` would train nothing and then delete the backup of another one."""
        here = (self._progress.epoch, self._progress.step)
        if self.delete_checkpoint and epochs is not None and here > (epochs, 0):
            raise InvalidArgumentError(
                "The backup is from a later epoch than the last epoch of this `fit`.",
                received={"backup_dir": self.backup_dir, "epoch": here[0] + (here[1] > 0), "epochs": epochs},
                hint="Pass a separate directory to each call of `fit`, or more epochs, or delete the backup.",
            )

    def _is_time(self, progress: Progress) -> bool:
        due = (
            isinstance(self.save_freq, numbers.Integral)
            and progress.num_steps - self._saved_at >= self.save_freq
        )
        if self._clock is not None and self.every_seconds and self._clock.is_due(progress.num_steps):
            late = time.monotonic() - self._saved_time >= self.every_seconds
            due |= bool(self._clock.exchange(progress.num_steps, late)[0])
        return due

    def _save(self) -> None:
        self._progress.before_save()
        self._manager.save()
        self._saved_at = self._progress.num_steps
        self._saved_time = time.monotonic()

    def _save_now(self) -> None:
        self._save()
        self._manager.wait()


def _delete_all(manager: CheckpointManager) -> None:
    """Deletes the backups when all workers have finished: first the shared ones, on the chief."""
    runtime = manager.checkpoint.runtime()
    for is_turn_of_chief in (True, False):
        gather_from(runtime, None)
        if (runtime is None or runtime.worker_index == 0) == is_turn_of_chief:
            for path in manager.checkpoints:
                remove(path)
            with contextlib.suppress(OSError):  # the directory contains other files
                os.rmdir(manager.directory)


def _restore_newest(manager: CheckpointManager) -> str | None:
    """Restores the newest backup that all workers have and that is not corrupt. Returns its path."""
    # With a separate directory per worker, some may have lost backups, or finished saving one more.
    found = gather_from(manager.checkpoint.runtime(), list(map(os.path.basename, manager.checkpoints)))
    shared = [name for name in found[0] if all(name in theirs for theirs in found)]
    for name in reversed(shared):
        path = os.path.join(manager.directory, name)
        try:
            unused = [n for n in manager.checkpoint.restore(path).unused if not n.endswith(".metrics")]
            if unused:  # for example an optimizer whose weights are not in the model
                logger.warning(
                    "the backup %s contains %s, which kdist cannot restore.", path, ", ".join(unused)
                )
            return path
        except CheckpointCorruptError as error:
            logger.warning(
                "cannot restore the backup %s. kdist tries the previous backup, if there is one. "
                "Check the storage of the directory.\n%s",
                path,
                error,
            )
    if any(found):
        why = "can be restored" if shared else "is on all workers"
        logger.warning("no backup in %s %s. Training starts from the first epoch.", manager.directory, why)
    return None
