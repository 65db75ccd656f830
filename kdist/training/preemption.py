"""Preemption: before a machine is taken away, all workers save after the same step and exit.

The names and meanings are the same as in `tf.distribute.experimental.PreemptionCheckpointHandler`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from kdist.arrays.types import R
from kdist.backends.contract import Runtime
from kdist.checkpoint.checkpoint import Checkpoint
from kdist.checkpoint.folders import gather_from
from kdist.checkpoint.manager import CheckpointManager
from kdist.cluster import logs, timeouts
from kdist.errors import InvalidArgumentError, check_function, check_positive
from kdist.training.voting import RegularExchange

_EXCHANGE_SECONDS = 0.5
_LOOK_SECONDS = 1.0
_SAME_SECONDS = 1.0  # the launcher and a scheduler may both send the signal


@dataclass(frozen=True)
class TerminationConfig:
    """Configures how kdist detects and handles the termination of a worker.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/TerminationConfig

    Args:
        termination_watcher_fn: A function that returns `True` when this worker will be terminated. A separate
            thread calls it about once per second. By default, kdist watches for SIGTERM.
        exit_fn: Called after the save, without arguments. By default, the process exits with code 75.
        grace_period: The number of seconds to continue training after the notice. By default, the workers
            save and exit immediately.
        save_fn: Called instead of the checkpoint's `save`, without arguments.

    Example:

    >>> import kdist
    >>> kdist.experimental.TerminationConfig(grace_period=60).grace_period
    60
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], None] | None = None
    grace_period: float | None = None
    save_fn: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        # An error at the end would lose the work since the last backup.
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            function = getattr(self, name)
            if function is not None:
                hint = f"Pass the function, not its result: TerminationConfig({name}=function)"
                check_function(name, function, hint)
        if self.grace_period not in (None, 0):
            check_positive("grace_period", self.grace_period, "Pass a number of seconds: grace_period=60")


class TerminationWatch:
    """Detects a termination, so that all workers (without a runtime: this process) exit at the same step."""

    def __init__(self, runtime: Runtime | None, config: TerminationConfig) -> None:
        self._runtime = runtime
        self._config = config
        self._exchange = RegularExchange(runtime, _EXCHANGE_SECONDS)
        self._noticed: float | None = None
        self._closed = threading.Event()
        self._earlier: Callable[[int, FrameType | None], object] | int | None = None
        self._handles = config.termination_watcher_fn is None
        if not self._handles:
            threading.Thread(target=self._look, name="kdist termination", daemon=True).start()
        elif threading.current_thread() is threading.main_thread():
            self._earlier = signal.signal(signal.SIGTERM, self._on_signal)
        else:
            logs.logger.warning(
                "cannot watch for SIGTERM, because this is not the main thread. "
                "Pass a termination_watcher_fn to kdist.experimental.TerminationConfig."
            )

    def must_leave(self, num_steps: int | None = None) -> bool:
        """Returns whether all workers save and exit. The result is equal on all.

        After a step, pass the number of steps, because the workers ask each other only after some steps.
        """
        if num_steps is not None and not self._exchange.is_due(num_steps):
            return False
        mine = None if self._noticed is None else time.monotonic() - self._noticed
        if num_steps is None:
            everyone = gather_from(self._runtime, mine)
        else:
            everyone = self._exchange.exchange(num_steps, mine)
        said = [seconds for seconds in everyone if seconds is not None]
        return bool(said) and max(said) >= (self._config.grace_period or 0.0)

    def leave(self, save: Callable[[], object]) -> None:
        """Calls `save_fn` or `save`, which must wait until the files are complete, and exits."""
        logs.logger.warning("a worker will be terminated: all workers save a checkpoint and exit.")
        (self._config.save_fn or save)()
        self.close()
        self._noticed = None  # if `exit_fn` returns, the next steps do not save again
        if self._config.exit_fn is not None:
            self._config.exit_fn()
        else:
            sys.exit(timeouts.PREEMPTED)

    def close(self) -> None:
        """Stops watching, and restores the previous handler of SIGTERM."""
        self._closed.set()
        if self._earlier is not None:
            signal.signal(signal.SIGTERM, self._earlier)
            self._earlier = None

    def end(self) -> None:
        """Stops watching. If SIGTERM came after the last `must_leave`, it has its usual effect now."""
        is_late = self._earlier is not None and self._noticed is not None and not self._config.grace_period
        self.close()
        if is_late:
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._noticed is None:
            self._noticed = now
        elif now - self._noticed > _SAME_SECONDS:
            # A second SIGTERM terminates at once, because training has not stopped since the first.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _look(self) -> None:
        watch, has_failed = self._config.termination_watcher_fn, False
        assert watch is not None
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                is_noticed = watch()
            except Exception:  # for example a request that timed out
                if not has_failed:
                    logs.logger.warning("the termination_watcher_fn fails. kdist repeats it.", exc_info=True)
                is_noticed, has_failed = False, True
            if is_noticed:
                self._noticed = time.monotonic()
                return


class PreemptionCheckpointHandler:
    """Saves a checkpoint before a worker is terminated, and restores it at the next start.

    Use it in custom loops; in `fit`, use `kdist.callbacks.BackupAndRestore(…, save_before_preemption=True)`.
    The constructor restores the checkpoint. All workers must create a handler, and call `run` the same number of times.

    Source:
    https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionCheckpointHandler

    Args:
        cluster_resolver: Ignored, because the strategy defines the workers.
        checkpoint_or_checkpoint_manager: The checkpoint to save, or its manager.
        checkpoint_dir: The directory for the checkpoint, or a URL. Only valid with a `Checkpoint`.
        termination_config: How to detect and handle a termination. The default is SIGTERM.

    Example:

    ```python
    checkpoint = kdist.Checkpoint(model=model, optimizer=optimizer, dataset=dataset, step=0)
    handler = kdist.experimental.PreemptionCheckpointHandler(None, checkpoint, "preempted")
    iterator = iter(dataset)
    while checkpoint.step < 10_000:
        handler.run(train_step, iterator)
        checkpoint.step += 1
    ```
    """

    def __init__(
        self,
        cluster_resolver: object,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        given = checkpoint_or_checkpoint_manager
        if isinstance(given, CheckpointManager):
            if checkpoint_dir is not None:
                raise InvalidArgumentError(
                    "`checkpoint_dir` cannot be combined with a CheckpointManager, which has its own directory.",
                    received={"checkpoint_dir": checkpoint_dir},
                    hint="Remove `checkpoint_dir`.",
                )
            self._manager = given
        elif isinstance(given, Checkpoint) and checkpoint_dir is not None:
            self._manager = CheckpointManager(given, checkpoint_dir, max_to_keep=1)
        else:
            raise InvalidArgumentError(
                "PreemptionCheckpointHandler received neither a CheckpointManager nor a Checkpoint with a directory.",
                received={"checkpoint": type(given).__name__, "checkpoint_dir": checkpoint_dir},
                hint="Pass a checkpoint and a directory: "
                'kdist.experimental.PreemptionCheckpointHandler(None, checkpoint, "preempted")',
            )
        # `tf.distribute` saves the number of calls under the same name.
        self._manager.checkpoint.checkpointed_runs = 0
        self._manager.restore_or_initialize()
        self._config = termination_config or TerminationConfig()
        self._watch = TerminationWatch(self._manager.checkpoint.runtime(), self._config)
        self._watches = True

    @property
    def total_run_calls(self) -> int:
        """The number of calls of `run` and `save_checkpoint_if_preempted`, also before the restored checkpoint."""
        return int(self._manager.checkpoint.checkpointed_runs)

    def run(self, distributed_train_function: Callable[..., R], *args: object, **kwargs: object) -> R:
        """Calls a function that runs one step. If a worker will be terminated, saves and exits instead.

        Args:
            distributed_train_function: A function that calls `strategy.run`.
            *args: The positional arguments of the function. Pass an iterator instead of its next batch, so that
                the batch is not lost if `run` saves the position of the dataset and exits.
            **kwargs: The keyword arguments of the function.

        Returns:
            The result of the function.
        """
        self._leave_if_told()
        result = distributed_train_function(*args, **kwargs)
        self._manager.checkpoint.checkpointed_runs += 1
        return result

    def save_checkpoint_if_preempted(self, *args: object, **kwargs: object) -> None:
        """Saves and exits if a worker will be terminated. Call it after each step instead of `run`.

        Args:
            *args: Ignored, for compatibility with `tf.distribute`.
            **kwargs: Ignored, as `args`.
        """
        self._manager.checkpoint.checkpointed_runs += 1
        self._leave_if_told()

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Checks for a termination until the end of a `with` block. Without a block, `run` always checks."""
        try:
            yield
            if self._watches and self._watch.must_leave():
                self._watch.leave(self._save)
        finally:
            self.close()

    def close(self) -> None:
        """Stops watching, and restores the previous handler of SIGTERM."""
        self._watches = False
        self._watch.close()

    def _leave_if_told(self) -> None:
        if self._watches and self._watch.must_leave(self.total_run_calls):
            self._watch.leave(self._save)

    def _save(self) -> None:
        self._manager.save(check_interval=False)
        self._manager.wait()
