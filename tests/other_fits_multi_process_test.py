"""Rare uses of `fit`: a `Trainer` that is not a `keras.Model`, an endless `PyDataset`, limits of `keras.config`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import data
from tests.helpers.compare import assert_close
from tests.helpers.models import network
from tests.helpers.processes import each_backend, run, run_plain, scope


def bare_trainer(under_strategy: bool) -> Any:
    import keras

    trainer = next(owner for owner in keras.Model.__mro__ if "fit" in vars(owner))

    class Regression(trainer, keras.layers.Dense):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            keras.layers.Dense.__init__(self, 1)
            trainer.__init__(self)

    keras.utils.set_random_seed(2)
    with scope(under_strategy):
        model = Regression()
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    x, y = data.make_data(23)
    history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
    values = model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
    return [history, values, model.predict(x, batch_size=5, verbose=0), *model.get_weights()]


def endless(under_strategy: bool) -> Any:
    """Fits an endless dataset, whose batches must come in order. Plain Keras may lose batches, so it gets arrays."""
    import keras

    x, y = data.make_data(60)

    class Endless(keras.utils.PyDataset):
        num_batches = None

        def __getitem__(self, index: int) -> Any:
            start = 4 * index % 60
            return x[start : start + 4], y[start : start + 4]

    model = network(1, rate=0.02, seed=2, scope=scope(under_strategy))
    losses = []
    for _ in range(2):
        if under_strategy:
            losses += model.fit(Endless(workers=2), epochs=3, steps_per_epoch=20, verbose=0).history["loss"]
            continue
        for epoch in range(3):
            rows = [row % 60 for row in range(80 * epoch, 80 * epoch + 80)]
            losses += model.fit(x[rows], y[rows], batch_size=4, shuffle=False, verbose=0).history["loss"]
    return [losses, *model.get_weights()]


def limited(under_strategy: bool) -> Any:
    import keras

    model = network(1, rate=0.1, seed=2, scope=scope(under_strategy))
    try:
        keras.config.set_max_epochs(2)
        keras.config.set_max_steps_per_epoch(3)
        history = model.fit(*data.make_data(23), batch_size=4, epochs=4, shuffle=False, verbose=0).history
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert len(history["loss"]) == 2
    return [history, *model.get_weights()]


def changed_attribute(under_strategy: bool) -> Any:
    """Changes an attribute that the compiled step has read, in the two ways in which Keras applies the change."""
    import keras

    class Scaled(keras.Model):
        scale = 1.0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * self.scale

    keras.utils.set_random_seed(2)
    with scope(under_strategy):
        inputs = keras.Input((3,))
        model = Scaled(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    results = []
    for change in ("", "force", "none"):
        if change == "force":
            model.scale = 0.5
            model.make_train_function(force=True)
            model.make_test_function(force=True)
        elif change == "none":
            model.scale = 3.0
            model.train_function = model.test_function = None
        results.append(
            model.fit(*data.make_data(23), batch_size=4, epochs=2, shuffle=False, verbose=0).history
        )
        results.append(model.evaluate(*data.make_data(23), batch_size=4, verbose=0))
    return [*results, *model.get_weights()]


@pytest.mark.kills(
    forced_function_not_made="[changed_attribute-1-jax]",
    reset_function_not_made="[changed_attribute-1-jax]",
    fit_epochs_not_limited="[limited-1-torch]",
    queue_stops_while_batches_are_read_ahead="[endless-1-tensorflow]",
    trainers_not_distributed="[bare_trainer-2-torch]",
)
@each_backend
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("fits", [bare_trainer, endless, limited, changed_attribute])
def test_it_fits_as_plain_keras(backend: str, num_workers: int, fits: Any) -> None:
    expected = run_plain(backend, fits, False)
    for actual in run(backend, num_workers, fits, True):
        assert_close(actual, expected, rtol=1e-4)
