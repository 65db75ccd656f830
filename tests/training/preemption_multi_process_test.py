"""Workers before a termination save at the same step and exit. Workers notice weights that drift apart."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.data import make_data
from tests.helpers.models import network
from tests.helpers.processes import each_backend, run, strategy
from tests.helpers.scripts import Script


class Left(Exception):
    """Raised by `exit_fn` instead of the end of the process."""


def leave() -> None:
    raise Left


def make_model(seed: int) -> Any:
    return network(4, 1, optimizer="adam", rate=0.05, seed=seed, scope=strategy().scope())


def data() -> dict[str, Any]:
    x, y = make_data(40)
    return {"x": x, "y": y, "batch_size": 4, "epochs": 2, "verbose": 0}


def callback_at(step: int, worker: int, act: Any) -> Any:
    """Returns a callback that calls a function on one worker, after a step of the first epoch."""
    import keras

    class At(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[int] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps.append(batch)
            if len(self.steps) == step and int(os.environ["RANK"]) == worker:
                act(self.model)

    return At()


def preempted(folder: str) -> Any:
    import kdist

    whole = make_model(1)
    whole.fit(**data())
    backup = {
        "backup_dir": folder,
        "save_freq": False,
        "termination_config": kdist.experimental.TerminationConfig(exit_fn=leave),
    }
    before = signal.getsignal(signal.SIGTERM)
    terminated = callback_at(4, 1, lambda model: os.kill(os.getpid(), signal.SIGTERM))
    failing = callback_at(2, int(os.environ["RANK"]), lambda model: leave())
    with pytest.raises(Left):
        make_model(1).fit(**data(), callbacks=[kdist.callbacks.BackupAndRestore(**backup), failing])
    is_restored = signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(Left):
        make_model(1).fit(**data(), callbacks=[terminated, kdist.callbacks.BackupAndRestore(**backup)])
    after = signal.getsignal(signal.SIGTERM)
    rest = callback_at(1000, 0, None)
    again = make_model(2)
    again.fit(**data(), callbacks=[rest, kdist.callbacks.BackupAndRestore(**backup)])
    weights = [[np.array(w) for w in model.get_weights()] for model in (whole, again)]
    return weights, terminated.steps, rest.steps, is_restored and before == after


@pytest.mark.kills(preemption_of_one_worker="[torch]", preemption_watched_after_a_failure="[torch]")
@each_backend
def test_sigterm_on_one_worker_lets_all_save_and_leave_at_the_same_step(backend: str, tmp_path: Path) -> None:
    results = run(backend, 2, preempted, str(tmp_path))
    for (whole, again), steps, rest, is_restored in results:
        assert len(steps) + len(rest) == 20, "no step is lost or repeated"
        assert 4 <= len(steps) < 20
        assert is_restored, "SIGTERM means again what it meant before"
        assert_close(again, whole)
    assert results[0][1] == results[1][1]


def preempted_in_the_last_validation(folder: str) -> Any:
    import keras

    import kdist

    def terminate(logs: Any) -> None:
        if int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    backup = {
        "backup_dir": folder,
        "save_freq": False,
        "termination_config": kdist.experimental.TerminationConfig(exit_fn=leave),
    }
    arguments = {**data(), "epochs": 1, "validation_data": (data()["x"], data()["y"])}
    whole = make_model(1)
    with pytest.raises(Left):
        terminated = keras.callbacks.LambdaCallback()
        terminated.on_test_begin = terminate
        whole.fit(**arguments, callbacks=[terminated, kdist.callbacks.BackupAndRestore(**backup)])
    rest = callback_at(1000, 0, None)
    again = make_model(2)
    again.fit(**arguments, callbacks=[rest, kdist.callbacks.BackupAndRestore(**backup)])
    return [[np.array(w) for w in model.get_weights()] for model in (whole, again)], rest.steps


@pytest.mark.kills(preemption_after_the_last_step_lost="[torch]")
@each_backend
def test_sigterm_after_the_last_step_is_not_lost(backend: str, tmp_path: Path) -> None:
    for (whole, again), steps in run(backend, 2, preempted_in_the_last_validation, str(tmp_path)):
        assert steps == [], "the backup is from the end"
        assert_close(again, whole)


TERMINATED = """
import os, signal
import keras, kdist, numpy as np

x = np.ones((4, 2))
strategy = kdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
backup = kdist.callbacks.BackupAndRestore("backup", save_before_preemption=True)
terminate = lambda logs: os.kill(os.getpid(), signal.SIGTERM)
model.fit(x, x[:, :1], verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_end=terminate), backup])
print("not terminated")
"""


@pytest.mark.kills("preemption_at_the_end_of_fit_lost")
def test_sigterm_at_the_end_of_fit_is_not_lost(tmp_path: Path) -> None:
    script = Script(tmp_path, "terminated", TERMINATED, {"KERAS_BACKEND": "torch"})
    assert script.finish(code=-signal.SIGTERM).stdout() == ""
    assert (tmp_path / "backup" / "ckpt-1" / "index.json").exists()


def handled(folder: str) -> Any:
    import kdist

    index = int(os.environ["RANK"])
    batch = [data()[name][:4] for name in ("x", "y")]
    model = make_model(1)
    checkpoint = kdist.Checkpoint(model=model, step=0)
    config = kdist.experimental.TerminationConfig(exit_fn=leave)
    handler = kdist.experimental.PreemptionCheckpointHandler(
        None, checkpoint, folder, termination_config=config
    )
    with pytest.raises(Left):
        while checkpoint.step < 10_000:
            if checkpoint.step < 2:
                handler.run(model.train_on_batch, *batch)
                checkpoint.step += 1
            else:
                model.train_on_batch(*batch)
                checkpoint.step += 1
                handler.save_checkpoint_if_preempted()
            if checkpoint.step == 3 and index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    stopped, calls = checkpoint.step, handler.total_run_calls
    saved = [np.array(w) for w in model.get_weights()]
    fresh = make_model(2)
    checkpoint = kdist.Checkpoint(model=fresh, step=0)
    handler = kdist.experimental.PreemptionCheckpointHandler(None, checkpoint, folder)
    handler.close()
    calls_of_both = (calls, handler.total_run_calls)
    return stopped, calls_of_both, checkpoint.step, saved, [np.array(w) for w in fresh.get_weights()]


@pytest.mark.kills("preemption_restarts_its_count")
@each_backend
def test_a_handler_saves_and_restores_for_a_loop_of_one_s_own(backend: str, tmp_path: Path) -> None:
    results = run(backend, 2, handled, str(tmp_path))
    assert results[0][0] == results[1][0]
    for stopped, calls, restored, saved, weights in results:
        assert 3 <= stopped == restored
        assert calls == (stopped, stopped)
        assert_equal(weights, saved)


def drifting(drifts: bool) -> tuple[str, int]:
    import kdist

    def drift(model: Any) -> None:
        kernel = model.layers[1].kernel
        kernel.assign(kernel + 0.25)

    model = make_model(1)
    watch = kdist.callbacks.DriftWatch(every=2)
    steps = callback_at(5, 1 if drifts else -1, drift)
    try:
        model.fit(**data(), callbacks=[steps, watch])
    except kdist.errors.WorkerMismatchError as error:
        return str(error), len(steps.steps)
    return "", len(steps.steps)


@each_backend
def test_weights_that_drift_apart_are_named(backend: str) -> None:
    for message, steps in run(backend, 2, drifting, True):
        assert "worker 1" in message
        assert "kernel" in message
        assert steps == 6, "the comparison after the sixth step"
    assert run(backend, 2, drifting, False) == [("", 20), ("", 20)]


# In a worker, because an uncaught signal would end the process.


def terminated_twice() -> list[int]:
    from unittest import mock

    from kdist.training.preemption import TerminationConfig, TerminationWatch

    watch = TerminationWatch(None, TerminationConfig())
    with mock.patch("os.kill") as kill:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # the launcher passes the signal of a scheduler on
        counts = [kill.call_count]
        watch._noticed -= 2  # type: ignore[operator]
        signal.raise_signal(signal.SIGTERM)
        counts.append(kill.call_count)
    watch.close()
    return counts


@pytest.mark.kills("preemption_signal_of_the_launcher_terminates")
@pytest.mark.xdist_group("pool-torch")
def test_only_a_later_sigterm_terminates_at_once() -> None:
    assert run("torch", 1, terminated_twice) == [[0, 1]]


def terminated() -> Any:
    from kdist.training.preemption import TerminationConfig, TerminationWatch

    saved = []
    watch = TerminationWatch(None, TerminationConfig())
    before = watch.must_leave(0)
    os.kill(os.getpid(), signal.SIGTERM)
    after = watch.must_leave(1)
    with pytest.raises(SystemExit) as ended:
        watch.leave(lambda: saved.append(True))
    return before, after, ended.value.code, saved


@pytest.mark.kills("preemption_exit_code_swallowed")
@pytest.mark.xdist_group("pool-torch")
def test_the_exit_code_says_that_the_job_may_go_on() -> None:
    assert run("torch", 1, terminated) == [(False, True, 75, [True])]


def terminated_with_an_exit_fn_that_returns() -> Any:
    import kdist

    saved: list[int] = []
    checkpoint = kdist.Checkpoint(step=0)
    config = kdist.experimental.TerminationConfig(exit_fn=int, save_fn=lambda: saved.append(checkpoint.step))
    handler = kdist.experimental.PreemptionCheckpointHandler(
        None, checkpoint, "never", termination_config=config
    )
    os.kill(os.getpid(), signal.SIGTERM)
    with handler.watch_preemption_scope():
        for _ in range(100):
            handler.run(lambda: None)
            checkpoint.step += 1
    return saved


@pytest.mark.kills("preemption_saved_again_and_again")
@pytest.mark.xdist_group("pool-torch")
def test_an_exit_fn_that_returns_is_called_once() -> None:
    ((step,),) = run("torch", 1, terminated_with_an_exit_fn_that_returns)
    assert step < 100


def terminated_in_the_last_step(folder: str) -> list[str]:
    import kdist

    config = kdist.experimental.TerminationConfig(exit_fn=leave)
    handler = kdist.experimental.PreemptionCheckpointHandler(
        None, kdist.Checkpoint(step=0), folder, termination_config=config
    )
    with pytest.raises(Left), handler.watch_preemption_scope():
        handler.run(lambda: None)
        handler.run(lambda: os.kill(os.getpid(), signal.SIGTERM))
    return os.listdir(folder)


@pytest.mark.kills("preemption_at_the_end_of_a_loop_lost")
@pytest.mark.xdist_group("pool-torch")
def test_sigterm_in_the_last_step_of_a_loop_is_not_lost(tmp_path: Path) -> None:
    assert run("torch", 1, terminated_in_the_last_step, str(tmp_path)) == [["ckpt-1"]]


def terminated_with_a_grace_period() -> Any:
    from kdist.training.preemption import TerminationConfig, TerminationWatch

    watch = TerminationWatch(None, TerminationConfig(grace_period=3600))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        return watch.must_leave(0), watch.must_leave(1)
    finally:
        watch.close()


@pytest.mark.xdist_group("pool-torch")
def test_training_may_use_the_grace_period() -> None:
    assert run("torch", 1, terminated_with_a_grace_period) == [(False, False)]
