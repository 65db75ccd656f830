"""Ctrl-C in `fit`: workers end immediately and with little output, and the next `fit` in a notebook works."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import time

import pytest

from tests.helpers.alive import identity_of, left_of
from tests.helpers.compare import assert_close
from tests.helpers.data import make_data
from tests.helpers.models import network, weights_of
from tests.helpers.processes import each_backend, each_backend_in_twelve_turns, run, run_plain, strategy
from tests.helpers.scripts import RUN, TRAINS, Script, environments_of, started

# The workers must end long before the heartbeat timeout, because after it they would end in any case.
SECONDS, HEARTBEAT = 30.0, 120.0
# Worker 1 stops before a step, so that worker 0 waits in a collective of this step.
STOPS = TRAINS.replace(
    "    def on_train_batch_end",
    """    def on_train_batch_begin(self, batch, logs=None):
        if batch == 21 and strategy.runtime.worker_index == 1:
            os.kill(os.getpid(), 19)

    def on_train_batch_end""",
)
assert STOPS != TRAINS
PATIENT = {"KDIST_HEARTBEAT_TIMEOUT": str(HEARTBEAT)}
LINES = 200  # on stderr: a traceback and its cause, without many other messages


def check_stderr(text):
    assert "KeyboardInterrupt" in text, text
    assert text.count("Traceback (most recent call last)") <= 2, text
    assert len(text.splitlines()) <= LINES, text


@each_backend_in_twelve_turns
def test_ctrl_c_ends_both_workers(backend, tmp_path):
    with started(tmp_path, TRAINS, environments_of(backend, **PATIENT)) as scripts:
        for script in scripts:
            script.wait_for("TRAINS")
        pids = [script.process.pid for script in scripts]
        start = time.monotonic()
        for pid in pids:
            os.killpg(pid, signal.SIGINT)  # each script leads its process group
        codes = [script.wait() for script in scripts]
        seconds = time.monotonic() - start
    for script, code in zip(scripts, codes, strict=True):
        # JAX aborts a worker if the chief has ended; kdist then exits with the number of that signal.
        aborted = {signal.SIGABRT} if backend == "jax" else set()
        assert code in {-signal.SIGINT, 128 + signal.SIGINT} | aborted, script.stderr()
        assert "FINISHED" not in script.stdout()
        check_stderr(script.stderr())
    assert seconds < SECONDS


def wait_until_it_rests(pid):
    """Waits until the main thread of a process uses no CPU, because it waits in a collective."""
    deadline, before, since = time.monotonic() + 60, None, 0.0
    while before is None or time.monotonic() - since < 0.5:
        assert time.monotonic() < deadline
        with open(f"/proc/{pid}/task/{pid}/stat", "rb") as file:
            used = file.read().rpartition(b")")[2].split()[11:13]
        if used != before:
            before, since = used, time.monotonic()
        time.sleep(0.02)


@pytest.mark.parametrize("implementation", ["AUTO", "RING"])  # shared memory, and gloo
@pytest.mark.in_turn(4)
@pytest.mark.kills(torch_exit_waits_after_ctrl_c="[RING]")
def test_ctrl_c_does_not_wait_for_a_stopped_worker(implementation, tmp_path):
    options = f"kdist.experimental.CommunicationOptions(implementation={implementation!r})"
    stops = STOPS.replace("Strategy()", f"Strategy(communication_options={options})")
    with started(tmp_path, stops, environments_of("torch", **PATIENT)) as (interrupted, stopped):
        for script in (interrupted, stopped):
            script.wait_for("TRAINS")
        wait_until_it_rests(interrupted.process.pid)
        interrupted.process.send_signal(signal.SIGINT)
        assert interrupted.wait(SECONDS) in {-signal.SIGINT, 128 + signal.SIGINT}, interrupted.stderr()
        check_stderr(interrupted.stderr())
        stopped.process.kill()


@each_backend
def test_ctrl_c_in_a_collective_is_a_keyboard_interrupt(backend, tmp_path):
    # Worker 0 receives Ctrl-C in a collective, which then fails.
    with started(tmp_path, STOPS, environments_of(backend, **PATIENT)) as scripts:
        for script in scripts:
            script.wait_for("TRAINS")
        interrupted, killed = scripts
        wait_until_it_rests(interrupted.process.pid)
        start = time.monotonic()
        interrupted.process.send_signal(signal.SIGINT)
        killed.process.kill()
        code = interrupted.wait()
        assert time.monotonic() - start < SECONDS
    assert code in (-signal.SIGINT, 128 + signal.SIGINT), interrupted.stderr()
    check_stderr(interrupted.stderr())


@each_backend
def test_ctrl_c_ends_a_launched_job(backend, tmp_path):
    # Only the launcher receives the signal, because its workers have separate sessions.
    command = (*RUN, "--num-workers", "2", "--backend", backend)
    with Script(tmp_path, "train", TRAINS, PATIENT, command) as job:
        deadline = time.monotonic() + 120
        while len(found := set(re.findall(r"TRAINS \d (\d+) ", job.stdout()))) < 2:
            assert job.exit_code is None and time.monotonic() < deadline, job.stderr()
            time.sleep(0.02)
        workers = [identity_of(int(pid)) for pid in found]
        start = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 128 + signal.SIGINT
        assert time.monotonic() - start < SECONDS
        assert left_of(workers) == []
        assert len(job.stderr().splitlines()) <= 2 * LINES, job.stderr()


# In a notebook -----------------------------------------------------------------------------------------------


make_model = functools.partial(network, 4, 1, optimizer="adam", rate=0.05, seed=5)


@contextlib.contextmanager
def keyboard():
    """Handles Ctrl-C as in a notebook. The workers of a pool otherwise ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def plain_steps():
    model = make_model()
    x, y = make_data(40)
    model.fit(x[:12], y[:12], batch_size=4, shuffle=False, verbose=0)
    after_three = weights_of(model)
    model.fit(x, y, batch_size=4, shuffle=False, epochs=2, verbose=0)
    return after_three + weights_of(model)


def in_worker_interrupt():
    """Interrupts `fit` after the third step, as the stop button of a notebook does; then continues the training."""
    import keras

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                os.kill(os.getpid(), signal.SIGINT)

    model = make_model(scope=strategy().scope())
    with keyboard(), pytest.raises(KeyboardInterrupt):
        model.fit(*make_data(40), batch_size=4, shuffle=False, verbose=0, callbacks=[Stop()])
    after_three = weights_of(model)
    model.fit(*make_data(40), batch_size=4, shuffle=False, epochs=2, verbose=0)
    return after_three + weights_of(model)


@pytest.mark.kills(interrupt_loses_the_last_steps="[jax]")
@each_backend
def test_fit_goes_on_after_the_stop_button(backend):
    expected = run_plain(backend, plain_steps)
    (actual,) = run(backend, 1, in_worker_interrupt)
    assert_close(actual, expected)


def in_worker_interrupt_anywhere():
    """Interrupts `fit` several times, at different moments of a step; then trains from the initial weights."""
    import threading

    import keras

    x, y = make_data(40)
    model = make_model(scope=strategy().scope())
    initial = [0 * w + 0.1 for w in weights_of(model)]
    for delay in (0.0, 0.001, 0.002, 0.005, 0.01, 0.02):
        has_begun = threading.Event()

        class Note(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                has_begun.set()  # noqa: B023  # of this round

        def press(delay=delay, has_begun=has_begun):
            if has_begun.wait(60):
                time.sleep(delay)
                os.kill(os.getpid(), signal.SIGINT)

        with keyboard():
            thread = threading.Thread(target=press)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                model.fit(x, y, batch_size=4, epochs=10**4, verbose=0, callbacks=[Note()])
            thread.join()
    model.set_weights(initial)
    with strategy().scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, y, batch_size=4, shuffle=False, epochs=2, verbose=0)
    return initial, weights_of(model)


def plain_from(initial):
    import keras

    model = make_model()
    model.set_weights(initial)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(*make_data(40), batch_size=4, shuffle=False, epochs=2, verbose=0)
    return weights_of(model)


@each_backend
def test_fit_works_after_the_stop_button_at_any_moment(backend):
    ((initial, actual),) = run(backend, 1, in_worker_interrupt_anywhere)
    assert_close(actual, run_plain(backend, plain_from, initial))


def ignore_ctrl_c():
    """Sends Ctrl-C in a function that ignores it, as NumPy and callbacks of the garbage collector do."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def in_worker_ignored_interrupt():
    import keras

    batches = []

    class Ignores(keras.callbacks.Callback):
        def __init__(self, last):
            super().__init__()
            self.last = last

        def on_train_batch_end(self, batch, logs=None):
            batches.append(batch)
            if batch == self.last:
                ignore_ctrl_c()

        on_test_batch_end = on_predict_batch_end = on_train_batch_end

    class Replaces(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            ignore_ctrl_c()
            raise ValueError("an error that hides the interrupt")

    x, y = make_data(40)
    model = make_model(scope=strategy().scope())
    run = strategy().run

    class Rescues(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                run(rescued.append, (batch,))
                run(rescued.append, (batch,))
                raise

    rescued = []
    with keyboard():
        for last in (1, 9):  # in the middle, and in the last batch
            for call in (
                lambda callbacks: model.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks),
                lambda callbacks: model.evaluate(x, y, batch_size=4, verbose=0, callbacks=callbacks),
                lambda callbacks: model.predict(x, batch_size=4, verbose=0, callbacks=callbacks),
            ):
                with pytest.raises(KeyboardInterrupt):
                    call([Ignores(last)])
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, batch_size=4, verbose=0, callbacks=[Replaces()])
        with pytest.raises(KeyboardInterrupt):
            run(ignore_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, batch_size=4, verbose=0, callbacks=[Rescues()])
        assert len(rescued) == 4  # two calls in two replicas
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        model.fit(x, y, batch_size=4, verbose=0)
    return batches


@pytest.mark.kills(
    ctrl_c_ignored_in_the_middle="[jax]",
    ctrl_c_ignored_at_the_end="[jax]",
    ctrl_c_replaced_by_an_error="[jax]",
    ctrl_c_comes_again="[jax]",
    ctrl_c_ends_the_cleanup="[jax]",
)
@each_backend
def test_no_library_hides_ctrl_c(backend):
    assert run(backend, 1, in_worker_ignored_interrupt) == [[*range(2)] * 3 + [*range(10)] * 3]


def in_worker_interrupt_between_replicas():
    import keras
    from tensorflow.python.distribute import cross_device_utils

    import kdist

    original, calls = cross_device_utils.CollectiveKeys.get_instance_key, []

    def interrupted(*args):
        calls.append(args)
        key = original(*args)
        if len(calls) == 1:  # the first of two replicas
            raise KeyboardInterrupt
        return key

    model = make_model(scope=strategy().scope())
    initial = weights_of(model)
    x, y = make_data(40)
    model.fit(x[:4], y[:4], batch_size=4, verbose=0)

    def add() -> object:
        return kdist.get_replica_context().all_reduce("sum", keras.ops.ones(()))

    add_on_all = kdist.function(lambda: strategy().run(add))
    add_on_all()
    for call in (lambda: model.fit(x, y, batch_size=4, verbose=0), add_on_all):
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cross_device_utils.CollectiveKeys, "get_instance_key", interrupted)
            with pytest.raises(KeyboardInterrupt):
                call()
        assert len(calls) == 1
        add_on_all()
    model.set_weights(initial)
    with strategy().scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, y, batch_size=4, shuffle=False, epochs=2, verbose=0)
    return initial, weights_of(model)


@pytest.mark.kills(
    "tensorflow_hangs_after_an_interrupted_step", "tensorflow_functions_hang_after_an_interrupt"
)
def test_fit_does_not_hang_after_the_stop_button_between_two_replicas():
    ((initial, actual),) = run("tensorflow", 1, in_worker_interrupt_between_replicas, timeout=60)
    assert_close(actual, run_plain("tensorflow", plain_from, initial))
