"""A `fit` that resumes equals an uninterrupted `fit`, with any data and after an interruption at any step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.compare import assert_close
from tests.helpers.data import loader, py_dataset
from tests.helpers.processes import (
    BACKENDS,
    each_backend,
    each_backend_in_twelve_turns,
    full_unless,
    run,
    strategy,
)

ROWS, BATCH, EPOCHS = 44, 8, 3  # a last batch of 4 rows; 6 steps per epoch


class Interrupted(Exception):
    """Stands for any interruption of a job."""


def arrays() -> tuple[Any, Any]:
    random = np.random.RandomState(3)
    return random.rand(ROWS, 5).astype("float32"), random.rand(ROWS, 1).astype("float32")


def make_data(kind: str, seed: int) -> dict[str, Any]:
    """Returns the arguments of `fit` for one kind of data, as a script makes them at each start."""
    kind, _, steps = kind.partition(", steps: ")
    if steps:
        return make_data(kind, seed) | {"steps_per_epoch": int(steps)}
    x, y = arrays()
    cuts = range(0, ROWS, BATCH)
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    if kind == "arrays, 4 steps an epoch":
        return {"x": x, "y": y, "batch_size": BATCH, "steps_per_epoch": 4}
    if kind in ("tf.data", "distributed tf.data"):
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=5).batch(BATCH)
        whole = strategy().experimental_distribute_dataset(dataset) if "distributed" in kind else dataset
        return {"x": whole}
    if "DataLoader" in kind:
        import torch

        torch.manual_seed(seed)  # Keras does this only on its PyTorch backend
        own = torch.Generator().manual_seed(seed) if "generator" in kind else None
        return {"x": loader(x, y, batch_size=BATCH, shuffle=True, generator=own)}
    if kind == "PyDataset":
        return {"x": py_dataset([(x[i : i + BATCH], y[i : i + BATCH]) for i in cuts])}
    assert kind == "generator"

    def endless() -> Iterator[Any]:
        while True:
            for start in cuts:
                yield x[start : start + BATCH], y[start : start + BATCH]

    return {"x": endless(), "steps_per_epoch": 4}


KINDS = (
    "arrays",
    "arrays, 4 steps an epoch",
    "tf.data",
    "distributed tf.data",
    "DataLoader",
    "DataLoader with a generator",
    "PyDataset",
    "generator",
)


def fit(
    kind: str, seed: int, *callbacks: Any, use_ema: bool = False, **arguments: Any
) -> tuple[list[Any], dict[str, Any], int]:
    """Runs one start of a user's script; returns the weights, the history and the number of steps."""
    import keras

    keras.utils.clear_session()
    # A tf.data pipeline uses the seeds at its creation; everything else comes from the backup.
    keras.utils.set_random_seed(1 if "tf.data" in kind else seed)
    data = make_data(kind, seed)
    keras.utils.set_random_seed(seed)
    with strategy().scope():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(6, "relu"),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05, use_ema=use_ema, ema_momentum=0.5), "mse", metrics=["mae"])
    x, y = arrays()
    steps = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    history = model.fit(
        validation_data=(x[:7], y[:7]),
        verbose=0,
        callbacks=[count, *callbacks],
        **data | {"epochs": EPOCHS} | arguments,
    )
    return [np.array(w) for w in model.get_weights()], history.history, len(steps)


def stop_at(epoch: int, batch: int | None) -> Any:
    """Returns a callback that interrupts the job after a batch, or at the end of an epoch."""
    import keras

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, at: int, logs: Any = None) -> None:
            self.epoch = at

        def on_train_batch_end(self, at: int, logs: Any = None) -> None:
            if (self.epoch, at) == (epoch, batch):
                raise Interrupted

        def on_epoch_end(self, at: int, logs: Any = None) -> None:
            if batch is None and at == epoch:
                raise Interrupted

    return Stop()


def interrupted(folder: str, kind: str, places: Any) -> Any:
    """Trains without interruption, and then once per place, with an interruption there and a restart."""
    import kdist

    expected = fit(kind, 1)
    results = []
    for number, (save_freq, epoch, batch) in enumerate(places):
        backup = {"backup_dir": f"{folder}/{number}", "save_freq": save_freq}
        with pytest.raises(Interrupted):
            fit(kind, 1, kdist.callbacks.BackupAndRestore(**backup), stop_at(epoch, batch))
        # Weights, seeds and random states come from the backup, so a different seed must not matter.
        again = fit(kind, 2, kdist.callbacks.BackupAndRestore(**backup))
        results.append((again, Path(backup["backup_dir"]).exists()))
    return expected, results


def check(everyone: Any) -> None:
    for (weights, history, steps), results in everyone:
        for (again, history_again, steps_left), is_left in results:
            assert 0 < steps_left < steps, "it goes on, and does not begin anew"
            assert_close(again, weights)
            assert history_again.keys() == history.keys()
            for name, values in history.items():
                np.testing.assert_allclose(history_again[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
            assert not is_left, "backups are deleted at the end of training"


@pytest.mark.kills(
    resume_history_lost="[torch-arrays]",
    resume_metrics_begin_anew="[torch-arrays]",
    resume_generator_of_a_loader_lost="[torch-DataLoader with a generator]",
    resume_generator_of_a_loader_draws_twice="[torch-DataLoader with a generator]",
    resume_nothing_restored="[torch-arrays]",
    resume_nothing_restored_of_tf_data="[torch-tf.data]",
    resume_position_ignored="[torch-arrays]",
)
@pytest.mark.parametrize("kind", KINDS)
@each_backend_in_twelve_turns
def test_a_run_goes_on_in_the_middle_of_an_epoch(backend: str, kind: str, tmp_path: Path) -> None:
    # When the fourth step ends, a sampler has already drawn again at the end of the pass, in the reading thread.
    places = [(1, 1, 1), (1, 0, 3)] if kind == "DataLoader with a generator" else [(1, 1, 1)]
    check(run(backend, 1, interrupted, str(tmp_path), kind, places))


ITERATED = ("tf.data", "distributed tf.data", "DataLoader", "PyDataset")


@pytest.mark.parametrize(
    ("backend", "kind", "after"),
    [
        # After the second step of an epoch, or after the last: both with every kind, on every backend.
        pytest.param(backend, kind, after, marks=full_unless((b + k) % 2 == (after == 5)))
        for (b, backend), (k, kind) in itertools.product(enumerate(BACKENDS), enumerate(ITERATED))
        for after in (1, 5)
    ],
    scope="module",
)
@pytest.mark.in_turn(6)
def test_two_workers_go_on_at_the_same_batch(backend: str, kind: str, after: int, tmp_path: Path) -> None:
    check(run(backend, 2, interrupted, str(tmp_path), kind, [(1, 1, after)]))


# The save frequency, and the epoch and batch of the interruption; `None` is the end of the epoch.
PLACES = {
    "at the second step": (1, 0, 1),
    "between two backups": (4, 1, 3),
    "at the last step of an epoch": (1, 1, 5),
    "at the end of an epoch": ("epoch", 1, None),
    "in the middle of an epoch, with backups at its end": ("epoch", 1, 2),
}


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", BACKENDS, scope="module")
def test_a_run_goes_on_from_anywhere(backend: str, place: str, tmp_path: Path) -> None:
    check(run(backend, 2, interrupted, str(tmp_path), "arrays", [PLACES[place]]))


# Whether or not epochs and passes over the data end together.
CUT_IN_EPOCHS = ("arrays", "tf.data", "DataLoader", "PyDataset")


@pytest.mark.in_turn(12)
@pytest.mark.kills(
    resume_a_finished_pass_continues="[torch-6-PyDataset]",
    resume_an_open_pass_opened_again="[torch-6-arrays]",
    resume_order_drawn_before_validation="[torch-4-arrays]",
)
@pytest.mark.parametrize("kind", CUT_IN_EPOCHS)
@pytest.mark.parametrize("steps", [6, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS, scope="module")
def test_a_pass_of_several_epochs_goes_on(backend: str, steps: int, kind: str, tmp_path: Path) -> None:
    places = [("epoch", 2, 0), (1, 2, 1)]
    check(run(backend, 1, interrupted, str(tmp_path), f"{kind}, steps: {steps}", places))


# The callbacks before and after the backup, and the epoch whose first step interrupts the job.
CALLBACKS = {
    "early stopping after the backup": ((), ("worse", "stops"), 2),
    "a lower rate after the backup": ((), ("worse", "lowers"), 3),
    "a subclass": (("worse", "stops too"), (), 2),
    "swapped weights": (("swaps",), (), 2),
    "a scheduler": (("schedules",), (), 2),
}


def make_callback(name: str) -> Any:
    import keras

    class Worse(keras.callbacks.Callback):
        """Makes the monitored value worse in every epoch."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["q"] = float(epoch)

    class OwnStopping(keras.callbacks.EarlyStopping):
        """A subclass, whose base class has the counters."""

    watch = {"monitor": "q", "mode": "min", "patience": 2}
    made = {
        "worse": Worse,
        "stops": lambda: keras.callbacks.EarlyStopping(**watch),
        "stops too": lambda: OwnStopping(**watch),
        "swaps": lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        "lowers": lambda: keras.callbacks.ReduceLROnPlateau(**watch),
        "schedules": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
    }
    return made[name]()


def interrupted_with_callbacks(folder: str, case: str) -> Any:
    import kdist

    before, after, epoch = CALLBACKS[case]

    def start(seed: int, backup: Any, *last: Any) -> Any:
        callbacks = [*map(make_callback, before), *backup, *map(make_callback, after), *last]
        return fit("arrays", seed, *callbacks, epochs=5, use_ema="swaps" in before + after)

    # The other cases resume at the beginning of an epoch.
    freq, step = (1, 2) if case == "a scheduler" else ("epoch", 0)
    expected = start(1, [])
    with pytest.raises(Interrupted):
        start(1, [kdist.callbacks.BackupAndRestore(folder, save_freq=freq)], stop_at(epoch, step))
    again = start(2, [kdist.callbacks.BackupAndRestore(folder, save_freq=freq)])
    return expected, [(again, Path(folder).exists())]


@pytest.mark.in_turn(6)
@pytest.mark.kills(
    resume_rate_changed_twice="[torch-a scheduler]",
    resume_saved_before_other_callbacks="[torch-early stopping after the backup]",
)
@pytest.mark.parametrize("case", CALLBACKS)
@pytest.mark.parametrize("backend", BACKENDS, scope="module")
def test_callbacks_go_on(backend: str, case: str, tmp_path: Path) -> None:
    check(run(backend, 1, interrupted_with_callbacks, str(tmp_path / "backup"), case))


def started_again(folder: str) -> Any:
    """Trains with early stopping, keeps the backups, and runs the same script again."""
    import kdist

    def start(seed: int) -> Any:
        backup = kdist.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        return fit("arrays", seed, *map(make_callback, ("worse", "stops")), backup, epochs=5)

    return start(1), start(2)


@each_backend_in_twelve_turns
def test_a_run_that_stopped_early_trains_no_more(backend: str, tmp_path: Path) -> None:
    for stopped, again in run(backend, 2, started_again, str(tmp_path)):
        assert (stopped[2], again[2]) == (18, 0)
        assert again[1] == stopped[1]
        for expected, value in zip(stopped[0], again[0], strict=True):
            np.testing.assert_array_equal(value, expected)


def goes_on_at_once(folder: str) -> Any:
    from kdist import faults

    point = faults.point

    def slow(name: str) -> None:
        if name == "save-publish":
            time.sleep(1.0)
        point(name)

    faults.point = slow
    try:
        return interrupted(folder, "arrays", [PLACES["at the second step"]])
    finally:
        faults.point = point


@pytest.mark.in_turn(4)
@pytest.mark.kills("resume_a_save_is_not_awaited")
def test_the_next_fit_waits_for_a_backup_that_is_being_written(tmp_path: Path) -> None:
    check(run("torch", 2, goes_on_at_once, str(tmp_path)))


def start(folder: str, stops: bool) -> Any:
    import kdist

    callbacks = [kdist.callbacks.BackupAndRestore(folder, save_freq=2)]
    if not stops:
        return fit("arrays", 2, *callbacks)[0]
    expected = fit("arrays", 1)[0]
    with pytest.raises(Interrupted):
        fit("arrays", 1, *callbacks, stop_at(1, 2))
    return expected


@each_backend
def test_another_number_of_workers_goes_on(backend: str, tmp_path: Path) -> None:
    expected = run(backend, 2, start, str(tmp_path), True)[0]
    # One worker with two replicas draws the same dropout masks as two workers with one replica.
    (weights,) = run(backend, 1, start, str(tmp_path), False)
    assert_close(weights, expected)


def states() -> Any:
    """Returns the states of the generators that determine the next data."""
    from kdist.training import generator_states

    return generator_states.capture()


def restored(foreign: Any) -> Any:
    """Restores another backend's states; returns this backend's before and after, and a random number."""
    from kdist.backends import get_backend
    from kdist.training import generator_states

    before = get_backend().random_state()
    generator_states.restore(foreign)
    return before, get_backend().random_state(), np.random.rand()


@pytest.mark.kills(random_state_of_another_backend_restored="[torch-tensorflow]")
@pytest.mark.parametrize(("saved", "backend"), [("jax", "torch"), ("torch", "tensorflow")])
def test_a_backend_leaves_the_random_state_of_another_one_alone(saved: str, backend: str) -> None:
    foreign = run(saved, 1, states)[0]
    (before, after, drawn) = run(backend, 1, restored, foreign)[0]
    assert after == before
    assert drawn == run(saved, 1, restored, foreign)[0][2]  # NumPy's generator belongs to no backend
