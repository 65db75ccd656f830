"""`RunLog`, a callback that records the progress of training on each worker for `kdist plot`."""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from collections.abc import Mapping
from typing import IO, Any

import keras
import numpy as np

from kdist.errors import InvalidArgumentError, check_whole
from kdist.tracing import Meter
from kdist.training.session import progress_of
from kdist.whole_files import is_remote


class RunLog(keras.callbacks.Callback):
    """Records the loss, step times and waiting times of each worker in a directory, for `kdist plot`.

    Each worker appends to a separate file, such as `worker-0.jsonl`, with one JSON object per line. A
    restarted job appends to the same files. If a step is trained twice, the last record counts.

    Args:
        directory: The directory for the files. It is created if necessary, and workers need not share it.
        every: The number of steps between records. The end of each epoch also has a record. To read the
            loss, each record waits for its step to finish, as the progress bar does.

    Raises:
        InvalidArgumentError: If `every` is not a positive number of steps, or the directory cannot be used.

    Example:

    ```python
    model.fit(x, y, epochs=10, callbacks=[kdist.callbacks.RunLog("runs/first")])
    ```

    ```console
    $ kdist plot runs/first
    ```
    """

    def __init__(self, directory: str | os.PathLike[str], every: int = 10) -> None:
        super().__init__()
        check_whole("every", every, 'Pass a number of steps: kdist.callbacks.RunLog("runs/first", every=10)')
        if not os.fspath(directory) or is_remote(os.fspath(directory)):
            raise InvalidArgumentError(
                "`directory` is empty or in an object store, which cannot append records to a file.",
                received={"directory": directory},
                hint='Pass a directory of a file system: kdist.callbacks.RunLog("runs/first")',
            )
        self.directory = os.fspath(directory)
        self.every = every
        self._file: IO[str] | None = None

    def on_train_begin(self, logs: Mapping[str, object] | None = None) -> None:
        """Opens the file of this worker, and writes a description of the worker."""
        self._progress = progress_of(self.model)
        runtime = self._progress.runtime
        try:
            os.makedirs(self.directory, exist_ok=True)
            self._file = _open(os.path.join(self.directory, f"worker-{runtime.worker_index}.jsonl"))
        except OSError as error:
            raise InvalidArgumentError(
                "RunLog cannot write to its directory.",
                received={"directory": self.directory, "error": str(error)},
                hint="Pass a directory that the worker can write to.",
            ) from error
        self._progress.at_end.callback(self._close)
        self._write(
            {
                "start": True,
                "worker": runtime.worker_index,
                "num_workers": runtime.num_workers,
                "devices": list(runtime.devices),
                "backend": keras.backend.backend(),
                "exchanges_in_programs": runtime.exchanges_in_programs,
                "host": socket.gethostname(),
                "process": os.getpid(),
            }
        )
        self._noted = self._progress.num_steps
        self._meter = self._progress.at_end.enter_context(Meter())

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        """Excludes the time between epochs from the measurement."""
        self._step = self._progress.step  # a resumed epoch may have no steps left
        self._meter.take()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        """Writes a record every `every` steps."""
        self._step = batch + 1
        if self._progress.num_steps - self._noted >= self.every:
            self._record(self._progress.epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        """Writes a record with the remaining steps and the logs of the epoch."""
        self._record(epoch, logs, epoch_end=True)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _record(self, epoch: int, logs: Mapping[str, object] | None, epoch_end: bool = False) -> None:
        self._noted = self._progress.num_steps
        numbers = {name: _as_json(value) for name, value in (logs or {}).items()}
        where = {"epoch": epoch + 1, "step": self._step, "epoch_end": epoch_end}
        self._write(where | self._meter.take().as_json() | {"logs": numbers})

    def _write(self, record: Mapping[str, object]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({**record, "time": round(time.time(), 3)}) + "\n")
            self._file.flush()
        except OSError as error:  # for example a full disk, which must not stop training
            self._file = None
            warnings.warn(
                f"kdist.callbacks.RunLog stopped writing to {self.directory}: {error}. Training continues without "
                "further records. Check the disk space and the permissions of the directory."
            )


def _open(path: str) -> IO[str]:
    """Opens a file to append to. Ends a partial last line, which a killed process may have left."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
    return open(path, "a", encoding="utf-8")


def _as_json(value: Any) -> object:
    """Converts a log value to JSON: `None` if it is not finite, text if it is not a number."""
    try:
        value = keras.ops.convert_to_numpy(value).tolist()
        return value if np.isfinite(value).all() else None
    except (TypeError, ValueError):  # callbacks may add any value to the logs
        return str(value)
