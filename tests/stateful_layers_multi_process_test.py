"""Recurrent layers with `stateful=True`: an error on several replicas, except on JAX, where the contract tests them."""

from __future__ import annotations

import numpy as np
import pytest

from kdist.errors import InvalidArgumentError
from tests.helpers.processes import each_backend, run, strategy


def predicts(is_second: bool = False) -> tuple[int, ...]:
    import keras

    with strategy().scope():
        model = keras.Sequential([keras.Input(batch_shape=(6, 2, 3)), keras.layers.LSTM(2, stateful=True)])
    if is_second:
        with pytest.raises(InvalidArgumentError):
            model.predict(np.ones((12, 2, 3)), batch_size=6, verbose=0)
    return tuple(model.predict(np.ones((12, 2, 3)), batch_size=6, verbose=0).shape)


def is_refused() -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        predicts(is_second=True)
    return str(caught.value)


@pytest.mark.kills(
    states_of_replicas_not_refused="[2-tensorflow]", states_of_replicas_refused_once="[1-torch]"
)
@each_backend
@pytest.mark.parametrize("num_workers", [1, 2])
def test_stateful_layers_on_several_replicas(backend: str, num_workers: int) -> None:
    if backend == "jax":
        assert run(backend, num_workers, predicts) == [(12, 2)] * num_workers
        return
    for said in run(backend, num_workers, is_refused):
        assert "A recurrent layer with stateful=True cannot run on several replicas" in said
        assert "/lstm" in said and "KERAS_BACKEND=jax" in said
