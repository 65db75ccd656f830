"""Custom code anywhere in a model runs in each step: kdist does not record the steps of such models."""

import numpy as np
import pytest

from tests.backends.where import in_worker
from tests.helpers.compare import assert_equal

if in_worker:
    import keras
    import torch

    from tests.backends.torch.models import data, mirrored
    from tests.backends.torch.recorded_steps_test import LAYERS, OPTIMIZERS, ROWS, make, numbers, replayed


class Bend(keras.callbacks.Callback if in_worker else object):
    """Sets a function as a layer's activation in the middle of an epoch, and keeps changing its slope."""

    slope = 0.1

    def on_train_batch_end(self, batch, logs=None):
        self.slope += 0.1
        if batch == 2:
            self.model.layers[0].activation = lambda x: x * self.slope


@pytest.mark.kills("torch_later_custom_code_recorded")
def test_custom_code_that_comes_later_runs_in_each_step():
    results = []
    for strategy in (False, True):
        model = make(LAYERS["seeded-dropout"], OPTIMIZERS["ema"], strategy)
        results.append(numbers(model, callbacks=[Bend()]))
    assert_equal(*results)


@pytest.mark.kills("torch_functions_of_operations_recorded")
def test_a_function_of_an_operation_is_not_recorded():
    with mirrored(1).scope():
        x = keras.Input((5,))
        model = keras.Model(x, keras.layers.Dense(2)(keras.ops.map(lambda row: row * 2, x)))
        model.compile("sgd", "mse")
    model.fit(*data(ROWS), batch_size=16, verbose=0)
    assert not replayed(model)


class Doubles(torch.nn.Module if in_worker else object):
    def forward(self, x):
        return x * 2


def hooked():
    module = torch.nn.Tanh()
    module.register_forward_hook(lambda module, inputs, output: output * 2)
    return module


MODULES = {"module": Doubles, "hook": hooked}


@pytest.mark.kills("torch_functions_of_modules_recorded")
@pytest.mark.parametrize("kind", MODULES)
def test_custom_code_inside_of_a_wrapped_module_is_not_recorded(kind):
    model = make(
        lambda: keras.layers.TorchModuleWrapper(torch.nn.Sequential(MODULES[kind]())),
        lambda: keras.optimizers.SGD(0.1),
        True,
    )
    model.fit(*data(ROWS), batch_size=16, verbose=0)
    assert not replayed(model)


class Recurrent(keras.Model if in_worker else object):
    def __init__(self):
        super().__init__()
        self.lstm = keras.layers.TorchModuleWrapper(torch.nn.LSTM(5, 4, batch_first=True))
        self.outer = keras.layers.Dense(2)

    def call(self, x):
        return self.outer(self.lstm(x)[0][:, -1])


def test_an_lstm_of_pytorch_trains_without_replays():
    with mirrored(1).scope():
        model = Recurrent()
        model.compile("sgd", "mse", jit_compile=True)
    random = np.random.default_rng(0)
    model.fit(
        random.random((80, 3, 5), "float32"), random.random((80, 2), "float32"), batch_size=16, verbose=0
    )
    assert not replayed(model)
