"""A generator that several epochs or several calls share: each takes the batches after the last one's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.compare import assert_close
from tests.helpers.processes import each_backend, rank, run, scope


def in_worker_shared_generators(steps_per_execution: int) -> list[Any]:
    """Returns the validation losses of epochs that share a generator, and losses of calls that share one.

    The model predicts 0, and the targets of a batch are its number, so a loss is the mean of the numbers.
    """
    import keras

    def batches() -> Iterator[Any]:
        for number in range(1000):
            yield np.zeros((4, 3), "float32"), np.full((4, 1), number, "float32")

    class Slow(keras.callbacks.Callback):
        """Gives threads the time to read ahead."""

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.05)

    with scope(True):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mae", steps_per_execution=steps_per_execution)
    x, y = next(batches())
    validation = {"validation_data": batches(), "validation_steps": 4}
    history = model.fit(x, y, epochs=3, verbose=0, callbacks=[Slow()], **validation)  # type: ignore[arg-type]
    shared = batches()
    calls = [model.evaluate(shared, steps=4, verbose=0, callbacks=[Slow()]) for _ in range(3)]
    return [history.history["val_loss"], calls]


@pytest.mark.kills(
    generator_prefetched_by_keras="[tensorflow-2-1]", generator_prefetched_by_tensorflow="[tensorflow-1-1]"
)
@pytest.mark.parametrize(("num_workers", "steps_per_execution"), [(1, 1), (2, 1), (2, 2)])
@each_backend
def test_no_batch_is_lost(backend: str, num_workers: int, steps_per_execution: int) -> None:
    # Keras keeps the first two batches of a generator, and repeats them in each epoch.
    epochs = [np.mean([0, 1, 2, 3]), np.mean([0, 1, 4, 5]), np.mean([0, 1, 6, 7])]
    calls = [np.mean([0, 1, 2, 3]), np.mean([4, 5, 6, 7]), np.mean([8, 9, 10, 11])]
    for found in run(backend, num_workers, in_worker_shared_generators, steps_per_execution):
        assert_close(found, [epochs, calls])


def in_worker_early_end(how: str) -> list[int]:
    """Returns how far a generator was read when `fit` ended early, and how far after another `fit`."""
    import keras

    number = 0

    def batches() -> Iterator[Any]:
        nonlocal number
        while True:
            time.sleep(0.05 * rank())  # this worker reads fewer batches ahead
            number += 1
            yield np.zeros((4, 3), "float32"), np.zeros((4, 1), "float32")

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if how == "error" and batch == 4:
                raise KeyError(how)
            self.model.stop_training = how == "batch" and batch == 4

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    with scope(True):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mae")
    generator, read = batches(), []
    for steps, callbacks in ((6, [Stop()]), (4, [])):
        with contextlib.suppress(KeyError):
            model.fit(generator, steps_per_epoch=steps, epochs=2, verbose=0, callbacks=callbacks)
        read.append(number)
    return read


@pytest.mark.kills(generator_read_unequally="[torch-batch]")
@pytest.mark.parametrize("how", ["batch", "epoch", "error"])
@each_backend
def test_workers_read_equally_far_if_fit_ends_early(backend: str, how: str) -> None:
    first, second = run(backend, 2, in_worker_early_end, how)
    assert first == second
    used = 6 if how == "epoch" else 5
    assert first == [used + 6, used + 14]
