"""Gradient accumulation on two workers: exact weights, although only one of n batches sends gradients."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import kdist
from tests.helpers.processes import each_backend, run, run_plain

ROWS, BATCH, EVERY, EPOCHS = 69, 10, 3, 3  # an epoch of 7 batches ends in the middle of an accumulation
UNITS = 40
NUMBERS = UNITS * UNITS  # in the largest variable


@contextlib.contextmanager
def _sums() -> Iterator[list[int]]:
    """Yields the numbers of elements that are summed over the workers; on TensorFlow and JAX, in each program."""
    import keras

    backend = keras.backend.backend()
    found: list[int] = []
    with contextlib.ExitStack() as stack:

        def note(owner: Any, name: str, size: Any) -> None:
            original = getattr(owner, name)

            def noted(*args: Any, **kwargs: Any) -> Any:
                found.append(size(*args))
                return original(*args, **kwargs)

            stack.enter_context(mock.patch.object(owner, name, noted))

        if backend == "tensorflow":
            from kdist.backends.tensorflow.replicas import TensorFlowReplica

            size = lambda _, tensors: sum(t.shape.num_elements() or 0 for t in tensors)  # noqa: E731
            note(TensorFlowReplica, "all_reduce_sum", size)
        elif backend == "jax":
            from kdist.backends.jax import collectives

            for kind in (collectives.SumsOfXla, collectives.SumsInMemory):
                note(kind, "__call__", lambda _, arrays: sum(array.size for array in arrays))
        else:
            from kdist.communication.shared_memory import SharedMemory

            note(SharedMemory, "start", lambda _, arrays, *__: sum(array.size for array in arrays))
        yield found


def _rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    return random.integers(0, 9, (ROWS, 4)), random.normal(size=(ROWS, 5)).astype("float32")


def _fit(optimizer: str, has_strategy: bool, callbacks: Any = (), **arguments: Any) -> Any:
    """Returns a trained model, its losses, and the numbers that it sent."""
    import keras

    options = {"gradient_accumulation_steps": EVERY, "global_clipnorm": 0.5, "use_ema": True}
    with kdist.MultiWorkerMirroredStrategy().scope() if has_strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(2)
        layers = [keras.layers.Embedding(9, 8), keras.layers.Flatten(), keras.layers.LayerNormalization()]
        layers += [keras.layers.Dense(UNITS, "relu", trainable=False)]
        layers += [keras.layers.Dense(UNITS, "relu", kernel_regularizer="l2"), keras.layers.Dense(5)]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
        model.compile(getattr(keras.optimizers, optimizer)(0.01, **options), "mse")
    options = {"epochs": EPOCHS, "batch_size": BATCH, "shuffle": False, "verbose": 0} | arguments
    with _sums() as sent:
        history = model.fit(*options.pop("data", _rows()), callbacks=list(callbacks), **options)
    return model, history.history["loss"], sent


def _variables(model: Any) -> list[Any]:
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables) if "seed" not in v.path]


def trained(optimizer: str, folder: str | None) -> Any:
    """Returns the losses, the variables and the numbers that were sent."""
    import keras

    callbacks = [keras.callbacks.TerminateOnNaN()]  # these callbacks read no variables between batches
    if folder is not None:
        callbacks.append(keras.callbacks.ModelCheckpoint(f"{folder}/model.keras"))
    model, losses, sent = _fit(optimizer, folder is not None, callbacks)
    return losses, _variables(model), sent


def observed(readers: tuple[int, ...]) -> list[Any]:
    """Returns the variables that a callback reads after each batch. Only some workers have it; -1 has no strategy."""
    import keras

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            found.extend(_variables(self.model))

    found: list[Any] = []
    has_strategy = readers != (-1,)
    is_reader = not has_strategy or kdist.MultiWorkerMirroredStrategy().runtime.worker_index in readers
    _fit("SGD", has_strategy, [Reader()] if is_reader else [], epochs=1)
    return found


def resumed(folder: str | None) -> list[Any]:
    """Returns the variables after a `fit` that stopped after a backup in the middle of an accumulation."""
    if folder is None:
        return _variables(_fit("SGD", False)[0])

    class Stop(Exception):
        pass

    class StopAfterBackup(kdist.callbacks.BackupAndRestore):
        def _save(self) -> None:
            super()._save()
            raise Stop

    # Its class is kdist's own for the check of callbacks, which treats custom subclasses as readers.
    StopAfterBackup.__module__, StopAfterBackup.__name__ = (
        "kdist.training.backup_and_restore",
        "BackupAndRestore",
    )
    with contextlib.suppress(Stop):
        _fit("SGD", True, [StopAfterBackup(folder, save_freq=EVERY + 2)])
    return _variables(_fit("SGD", True, [kdist.callbacks.BackupAndRestore(folder)])[0])


def failed() -> list[str]:
    """Returns the notes of an error in the middle of an accumulation."""

    def rows() -> Iterator[Any]:
        x, y = _rows()
        for start in range(0, 4 * BATCH, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]
        raise ValueError("no more rows")

    with pytest.raises(Exception, match="no more rows") as caught:
        _fit("SGD", True, data=(rows(),), steps_per_epoch=6, batch_size=None)
    return getattr(caught.value, "__notes__", [])


def _assert_close(mine: Any, theirs: Any) -> None:
    assert len(mine) == len(theirs) > 0
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-4, atol=5e-6)


@pytest.mark.kills(
    kept_gradients_due_after_each_batch="[SGD-torch]",
    kept_gradients_count_twice="[SGD-tensorflow]",
    jax_regularized_gradients_not_kept="[SGD-jax]",
    jax_kept_gradients_lost="[SGD-jax]",
)
@each_backend
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_few_batches_send_gradients(backend: str, optimizer: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run(backend, 2, trained, optimizer, folder)
    expected_losses, expected, _ = run_plain(backend, trained, optimizer, None)
    for losses, variables, sent in found:
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
        _assert_close(variables, expected)
        large = sum(size >= NUMBERS for size in sent)
        # Of 21 batches, 7 end an accumulation. The first two epochs end in the middle of another.
        assert large == (7 + 2 if backend == "torch" else 1), sent
        assert min(sent) <= 3, "No program sends only the loss."


@pytest.mark.kills("kept_gradients_with_readers")
@each_backend
def test_callbacks_can_read_the_accumulators(backend: str) -> None:
    expected = run_plain(backend, observed, (-1,))
    of_all, of_second = (run(backend, 2, observed, readers) for readers in ((0, 1), (1,)))
    assert of_second[0] == []
    for found in (*of_all, of_second[1]):
        _assert_close(found, expected)


@pytest.mark.kills("kept_gradients_missing_in_backups")
@each_backend
def test_a_backup_contains_the_gradients_of_all_workers(backend: str) -> None:
    expected = run_plain(backend, resumed, None)
    with tempfile.TemporaryDirectory() as folder:
        for found in run(backend, 2, resumed, folder):
            _assert_close(found, expected)


@each_backend
def test_an_error_reports_lost_gradients(backend: str) -> None:
    for notes in run(backend, 2, failed):
        assert any("gradients of the last batches" in note for note in notes), notes
