"""`SidecarEvaluator`: evaluates new checkpoints while other processes train."""

from __future__ import annotations

import os
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdist import keras_hooks
from kdist.checkpoint import end_of_training
from kdist.cluster.logs import logger
from kdist.coordinator.watching import Folder, Watched
from kdist.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    WorkerTimeoutError,
    check_positive,
    check_whole,
)
from kdist.whole_files import is_remote

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating one checkpoint.

    Args:
        path: The path of the checkpoint.
        number: The number in its name, or `None`; for example 3 for "ckpt-3" and "model-03.keras".
        iterations: The optimizer's step counter in the checkpoint. It counts batches, even if the optimizer
            accumulates gradients.
        logs: The loss and the metrics, by name.
    """

    path: str
    number: int | None
    iterations: int
    logs: dict[str, float]


class SidecarEvaluator:
    """Evaluates new checkpoints while other processes train.

    It runs in a separate process that can read the checkpoint directory, for example the task "evaluator" of
    `TF_CONFIG`. It reads checkpoints of `kdist.Checkpoint`, `kdist.CheckpointManager` and
    `kdist.callbacks.BackupAndRestore`, and files of `keras.callbacks.ModelCheckpoint` (`.keras`,
    `.weights.h5`). It takes the newest checkpoint, and skips older, corrupt and incomplete checkpoints.

    It stops after the last checkpoint, when training has ended. A successful `fit` under a strategy writes a
    file `.training-ended` to the checkpoint directory if an evaluator is running, or if `TF_CONFIG` contains
    an evaluator. The next `fit` removes the file, so the evaluator waits for `end_delay`. In a custom loop and in
    plain Keras, call `SidecarEvaluator.announce_end(checkpoint_dir)`.

    Source: https://www.tensorflow.org/api_docs/python/tf/keras/utils/SidecarEvaluator

    Args:
        model: A compiled model with the architecture of the trained model. A model that was created in the
            scope of a strategy is evaluated under this strategy.
        data: The `x` of `model.evaluate`, or a tuple `(x, y)` or `(x, y, sample_weight)`, which is read again
            for each checkpoint. Or a function without arguments that returns such data or a generator; it is
            called for each evaluation.
        checkpoint_dir: The directory to watch. It need not exist yet.
        steps: The number of batches per evaluation; `None` for all.
        max_evaluations: Stop after the checkpoint with this or a higher number, for example after
            "ckpt-10". If checkpoints have no number, stop after this many evaluations.
        callbacks: Keras callbacks, whose `on_test_…` methods are called, such as
            `keras.callbacks.TensorBoard` and `kdist.callbacks.SidecarEvaluatorModelExport`.
        batch_size: The number of rows per batch, if `data` are arrays.
        verbose: 1 to print a line per checkpoint, 0 to print nothing.
        poll_seconds: Seconds between two checks of the directory.
        first_timeout: Seconds to wait for the first checkpoint; `None` for no limit.
        timeout: Seconds to wait for each later checkpoint; `None` for no limit.
        end_delay: Seconds for which `.training-ended` must exist, because `fit` may be called again.
        start_delay: Seconds before the first evaluation, unless training ends earlier.
        throttle_seconds: Minimum seconds between the starts of two evaluations, until training has ended.

    Raises:
        InvalidArgumentError: If an argument is invalid.

    Example:

    ```python
    best = kdist.callbacks.SidecarEvaluatorModelExport("best.keras")
    evaluator = kdist.SidecarEvaluator(model, (x_test, y_test), "checkpoints", callbacks=[best])
    evaluator.start()
    ```
    """

    def __init__(
        self,
        model: keras.Model,
        data: object,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None = None,
        *,
        batch_size: int | None = None,
        verbose: int = 1,
        poll_seconds: float = 1.0,
        first_timeout: float | None = 3600.0,
        timeout: float | None = 21600.0,
        end_delay: float = 3.0,
        start_delay: float = 0.0,
        throttle_seconds: float = 0.0,
    ) -> None:
        import keras

        from kdist.coordinator.export import SidecarEvaluatorModelExport

        keras_hooks.require_compiled(model, "evaluate")
        _check(data, checkpoint_dir, max_evaluations, poll_seconds)
        self._model = model
        self._data = data
        self._options = {"steps": steps, "batch_size": batch_size}
        self._folder = Folder(os.path.abspath(checkpoint_dir), poll_seconds)
        self._max_evaluations = max_evaluations
        self._callbacks = [] if callbacks is None else keras.tree.flatten(callbacks)
        self._exports = [one for one in self._callbacks if isinstance(one, SidecarEvaluatorModelExport)]
        self._folder.excluded = [export.exported for export in self._exports]
        self._verbose = verbose
        self._poll_seconds = poll_seconds
        self._first_timeout = first_timeout
        self._timeout = timeout
        self._end_delay = end_delay
        self._start_delay = start_delay
        self._throttle_seconds = throttle_seconds
        self._evaluations: list[Evaluation] = []
        self._sign_seen: float | None = None  # time.monotonic() when the file was first seen

    @staticmethod
    def announce_end(checkpoint_dir: str | os.PathLike[str]) -> None:
        """Notifies the evaluator of a directory that training has ended. Call it in the process that trains.

        `fit` under a strategy does this itself. The next kdist checkpoint in the directory, or the next `fit`
        under a strategy that saves there, revokes it.

        Args:
            checkpoint_dir: The directory of the checkpoints, which must all be complete.
        """
        end_of_training.end([os.path.abspath(checkpoint_dir)])

    def start(self) -> list[Evaluation]:
        """Evaluates each new checkpoint until training has ended.

        Returns:
            A list with one `Evaluation` per evaluated checkpoint.

        Raises:
            WorkerTimeoutError: If no checkpoint appears within `first_timeout`, or later within `timeout`.
            CheckpointMismatchError: If a checkpoint does not match the model.
        """
        with end_of_training.watched(self._folder.path):
            self._watch()
        return self._evaluations

    def _watch(self) -> None:
        self._evaluations, self._sign_seen = [], None
        since = time.monotonic()
        not_before = since + self._start_delay
        while True:
            # Checked before the directory, so that a checkpoint saved before `.training-ended` is found.
            has_ended = self._has_ended(time.monotonic() - since)
            found = self._folder.newest()
            now = time.monotonic()
            if found is not None and (has_ended or now >= not_before):
                if self._evaluate(found):
                    since, not_before = time.monotonic(), now + self._throttle_seconds
                    if self._is_last(found):
                        break
                continue
            if found is None and not self._folder.is_waiting:
                if has_ended:
                    break
                self._check_time(now - since)
            time.sleep(self._poll_seconds)

    def _evaluate(self, found: Watched) -> bool:
        """Evaluates a checkpoint, and returns whether it was readable."""
        import keras

        from kdist.coordinator.loading import load

        model = self._model
        if not keras_hooks.layers_are_built(model):
            model.evaluate(**self._arguments() | {"steps": 1}, verbose=0)
        try:
            load(found, model)
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            logger.warning("the evaluator skips a checkpoint: %s", error)
            self._folder.pass_over(found)
            return False
        for export in self._exports:
            export.checkpoint_number = found.number
        logs = model.evaluate(**self._arguments(), callbacks=self._callbacks, verbose=0, return_dict=True)
        self._folder.done_with(found)
        optimizer = getattr(model, "optimizer", None)
        iterations = 0 if optimizer is None else keras_hooks.step_variable(optimizer)
        done = Evaluation(found.path, found.number, int(keras.ops.convert_to_numpy(iterations)), logs)
        self._evaluations.append(done)
        if self._verbose:
            told = ", ".join(f"{name}: {value:.4f}" for name, value in logs.items())
            print(f"{os.path.basename(done.path)}, step {done.iterations}: {told}", flush=True)
        return True

    def _arguments(self) -> dict[str, Any]:
        """Returns the arguments of `model.evaluate` for one evaluation."""
        import keras

        data = self._data() if callable(self._data) else self._data
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return {"x": x, "y": y, "sample_weight": sample_weight, **self._options}

    def _is_last(self, found: Watched) -> bool:
        number = len(self._evaluations) if found.number is None else found.number
        return self._max_evaluations is not None and number >= self._max_evaluations

    def _has_ended(self, waited: float) -> bool:
        """Returns whether training has ended, not only one of several calls of `fit`."""
        now = time.monotonic()
        if not end_of_training.has_ended(self._folder.path):
            self._sign_seen = None
            return False
        self._sign_seen = self._sign_seen or now
        if end_of_training.is_of_now(self._folder.path):
            return now - self._sign_seen >= self._end_delay
        # The file may be left from an earlier training, and the current one may not have started.
        return self._first_timeout is not None and waited >= self._first_timeout

    def _check_time(self, waited: float) -> None:
        limit = self._timeout if self._evaluations else self._first_timeout
        if limit is None or waited < limit:
            return
        received = {
            "checkpoint_dir": self._folder.path,
            "seconds": limit,
            "evaluated": len(self._evaluations),
        }
        if self._evaluations:
            raise WorkerTimeoutError(
                f"No new checkpoint appeared within {limit:g} s, and the training did not announce its end.",
                received=received | {"last": self._evaluations[-1].path},
                hint="Check that the training is still running. If it needs longer, pass a larger `timeout`. At the "
                "end of a custom training loop, call kdist.SidecarEvaluator.announce_end(checkpoint_dir).",
            )
        raise WorkerTimeoutError(
            f"No checkpoint appeared within {limit:g} s.",
            received=received,
            hint="Check that the training saves to this directory, with kdist.CheckpointManager or "
            "keras.callbacks.ModelCheckpoint, and that both machines share the directory. If the training needs "
            "longer, pass a larger `first_timeout`.",
        )


def _check(
    data: object, checkpoint_dir: str | os.PathLike[str], max_evaluations: int | None, poll_seconds: float
) -> None:
    if isinstance(data, types.GeneratorType):
        raise InvalidArgumentError(
            "`data` is a generator, which the evaluator can read only once.",
            received={"data": data},
            hint="Pass the function that creates the generator. The evaluator calls it for each evaluation.",
        )
    directory = os.fspath(checkpoint_dir)
    if not directory or is_remote(directory) or os.path.isfile(directory):
        raise InvalidArgumentError(
            "`checkpoint_dir` is not a directory of a mounted file system.",
            received={"checkpoint_dir": checkpoint_dir},
            hint="Pass the directory to which the training saves, by its path on this machine.",
        )
    if max_evaluations is not None:
        check_whole("max_evaluations", max_evaluations, "Pass a positive integer, or None for no limit.")
    hint = "Pass the seconds between two checks of the directory, for example poll_seconds=1.0."
    check_positive("poll_seconds", poll_seconds, hint)
