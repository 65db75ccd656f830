"""Makes data and models for the examples of the pages, in the workers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.helpers.compare import assert_close
from tests.helpers.data import make_data
from tests.helpers.models import network
from tests.helpers.processes import scope


def rows() -> dict[str, Any]:
    """Returns 300 rows with targets that a network can learn."""
    x, y = make_data(300, 8)
    return {"x": x, "y": y}


def new_model(plain: bool = False) -> Any:
    """Returns a small model with the same weights each time, under the worker's strategy or plain."""
    return network(4, 1, inputs=8, optimizer="adam", seed=3, scope=scope(not plain))


def dataset(shuffles: bool = True) -> Any:
    """Returns the rows as a `tf.data.Dataset`."""
    import tensorflow as tf

    whole = tf.data.Dataset.from_tensor_slices(tuple(rows().values()))
    if shuffles:
        whole = whole.shuffle(10_000, seed=1, reshuffle_each_iteration=False)
    return whole.batch(128)


def assert_same(one: Any, two: Any) -> None:
    """Fails unless two models have the same weights, up to rounding."""
    assert_close(two.get_weights(), one.get_weights())


class NoKdist:
    """Replaces kdist to train an example on one device."""

    def __getattr__(self, name: str) -> Any:
        return self._no_backup if name == "BackupAndRestore" else self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def scope(self) -> Any:
        """Returns a context that does nothing."""
        return contextlib.nullcontext()

    def _no_backup(self, *args: Any, **kwargs: Any) -> Any:
        import keras

        return keras.callbacks.Callback()


def model_with_and_without_kdist(example: Callable[..., dict[str, Any]], **given: Any) -> tuple[Any, Any]:
    """Runs an example with and without kdist from the same initial weights, and returns both models."""
    import keras

    keras.utils.set_random_seed(1)
    left = example(**given)
    assert left["strategy"].num_replicas_in_sync == 2
    keras.utils.set_random_seed(1)
    with mock.patch.dict(sys.modules, kdist=NoKdist()):
        return left["model"], example(**given)["model"]


def trained_on_one_device(data: Any) -> Any:
    """Trains a new model on plain Keras, and returns it."""
    model = new_model(plain=True)
    model.fit(data, epochs=5, verbose=0)
    return model
