"""kdist records a step once and replays it: results are the same, and the user's changes have an effect."""

import contextlib
import logging
import random

import numpy as np
import pytest

from tests.backends.where import in_worker
from tests.helpers.compare import assert_equal

if in_worker:
    import keras
    import torch
    from torch.utils._pytree import tree_leaves

    from kdist.backends.torch.recording import Recording, exchange
    from kdist.backends.torch.replay import compiled
    from tests.backends.torch.models import data, mirrored

LAYERS = {
    "batch-normalization": lambda: keras.layers.BatchNormalization(momentum=0.7),
    "seeded-dropout": lambda: keras.layers.Dropout(0.3, seed=3),
    "dropout": lambda: keras.layers.Dropout(0.3),
    "regularizer": lambda: keras.layers.Dense(4, "gelu", kernel_regularizer="l2"),
}
OPTIMIZERS = {
    "sgd-of-a-schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9, nesterov=True
    ),
    "adamw-clipped": lambda: keras.optimizers.AdamW(0.01, clipnorm=0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True),
}
# `fit` uses 60 rows per epoch: three batches of 16 and a batch of 12. Batch 3 and later epochs replay.
ROWS = 75


def make(layer, optimizer, strategy, **options):
    keras.utils.set_random_seed(7)
    with mirrored(1).scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6), layer(), keras.layers.Dense(2)])
        model.compile(optimizer(), "mse", metrics=["mae"], **options)
    return model


def numbers(model, epochs=3, **fit):
    x, y = data(ROWS)
    keras.utils.set_random_seed(5)
    history = model.fit(
        x, y, batch_size=16, epochs=epochs, verbose=0, shuffle=False, validation_split=0.2, **fit
    ).history
    weights = [np.array(weight) for weight in model.get_weights()]
    return [*history.values(), *weights, model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)]


def replayed(model, kind="train"):
    """Returns the number of batch shapes that have a recorded step."""
    known = next(steps for (of, _), steps in vars(model)["_kdist_recorded"].items() if of == kind)
    return sum(seen.program is not None for seen in known.values())


@pytest.mark.kills("torch_learning_rate_recorded", "torch_masks_recorded")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layer", LAYERS)
def test_replayed_steps_have_the_bits_of_plain_keras(layer, optimizer):
    plain, model = [make(LAYERS[layer], OPTIMIZERS[optimizer], strategy) for strategy in (False, True)]
    assert_equal(numbers(model), numbers(plain))
    assert [replayed(model, kind) for kind in ("train", "test", "predict")] == [2, 2, 1]


@pytest.mark.kills("torch_constants_not_copied", "torch_constants_of_the_recorded_step")
def test_each_replay_starts_with_the_same_constants():
    def step(x, weight):
        total = torch.tensor(1.0)
        total += x.sum()
        weight.add_(torch.ones(3) * 2)
        return {"total": total, "weight": weight * 1}

    x, weight = torch.ones(2), torch.zeros(3)
    recording = Recording([x], [weight])
    with recording.running():
        outputs = step(x, weight)
    replay = compiled(recording, outputs, [])
    assert float(outputs["total"]) == 3
    for i in (2, 3):
        outputs = replay([x * i])
        assert float(outputs["total"]) == 1 + 2 * i
        assert outputs["weight"].tolist() == [2.0 * i] * 3


@pytest.mark.kills("torch_exchanges_disturbed", "torch_random_numbers_in_another_order")
def test_an_early_exchange_leaves_random_numbers_and_writes_in_their_order():
    weight = torch.ones(3)
    recording = Recording([], [weight], metrics=[weight])

    def step():
        masks = torch.rand(3), torch.rand(3)
        total = masks[1] * 1
        exchange(recording, lambda tensor: lambda: tensor.mul_(2), [total])
        product = weight * total
        weight.add_(masks[0])  # needs no result of the exchange
        return product, masks, total

    torch.manual_seed(5)
    with recording.running():
        expected = step()
    changed = weight.clone()
    weight.fill_(1)
    replay = compiled(recording, expected, [])
    torch.manual_seed(5)
    for actual, wanted in zip(
        tree_leaves((replay([]), weight)), tree_leaves((expected, changed)), strict=True
    ):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.kills("torch_data_of_tensors_recorded", "torch_data_of_tensors_set")
def test_a_step_may_look_at_data_but_not_use_it():
    def set_data(x, weight):
        weight.data = x

    steps = {
        lambda x, weight: weight.add_(x) if isinstance(weight.data, torch.nn.Parameter) else x * 2: "",
        lambda x, weight: weight.data.add_(x): "the step uses the attribute `data` of a tensor",
        lambda x, weight: (x * 2).data: "the step uses the attribute `data` of a tensor",
        set_data: "the step sets the attribute `data` of a tensor",
    }
    for step, reason in steps.items():
        x, weight = torch.ones(2), torch.zeros(2)
        recording = Recording([x], [weight])
        with recording.running():
            outputs = step(x, weight)
        recording.results(outputs)
        assert recording.reason == reason


def test_a_step_that_writes_elsewhere_is_not_replayed():
    x, elsewhere = torch.ones(2), torch.zeros(2)
    for write in (lambda: elsewhere.add_(x), lambda: elsewhere.view(2, 1).mul_(2)):
        recording = Recording([x], [])
        with recording.running():
            write()
        assert compiled(recording, [], []) is None
        assert "not belong to the model" in recording.reason


@pytest.mark.kills("torch_draws_in_python_recorded")
def test_a_step_that_draws_in_python_is_not_replayed():
    x = torch.ones(2)
    for draw in (random.random, np.random.rand):
        recording = Recording([x], [])
        with recording.running():
            output = x * draw()
        assert compiled(recording, output, []) is None
        assert "random" in recording.reason


@pytest.mark.kills("torch_masks_of_remat_recorded")
def test_recomputed_masks_of_dropout_are_those_of_the_forward_pass():
    found = []
    for strategy, scope in ((False, None), (True, None), (True, "full")):
        with keras.RematScope(scope):
            model = make(LAYERS["dropout"], OPTIMIZERS["adamw-clipped"], strategy)
        found.append(numbers(model))
    for expected, *actual in zip(*found, strict=True):
        np.testing.assert_array_equal(actual, [expected] * 2)
    assert [replayed(model, kind) for kind in ("train", "test", "predict")] == [0, 2, 1]


class Change(keras.callbacks.Callback if in_worker else object):
    """Changes the model in the middle of an epoch."""

    def __init__(self, change, step=3):
        super().__init__()
        self.change = change
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.step:
            self.change(self.model)


def double(model):
    model.layers[0].kernel.value.register_hook(lambda gradient: gradient * 2)


CHANGES = {
    "frozen": lambda model: setattr(model.layers[0], "trainable", False),
    "rate": lambda model: setattr(model.layers[1], "rate", 0.9),
    "learning-rate": lambda model: setattr(model.optimizer, "learning_rate", 0.5),
    "momentum": lambda model: setattr(model.optimizer, "momentum", 0.1),
    "weights": lambda model: model.set_weights([w * 0.5 for w in model.get_weights()]),
    "hook": double,
    "frozen-in-pytorch": lambda model: model.layers[0].kernel.value.requires_grad_(False),
    "value": lambda model: model.layers[2].bias.assign([3.0, 4.0]),
}


@pytest.mark.kills(
    "torch_changes_of_the_model_unnoticed", "torch_frozen_parameters_unnoticed", "torch_hooks_unnoticed"
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_steps_has_an_effect(change):
    results = []
    for strategy in (False, True):
        model = make(LAYERS["seeded-dropout"], lambda: keras.optimizers.SGD(0.1, momentum=0.9), strategy)
        results.append(numbers(model, callbacks=[Change(CHANGES[change], step=2)]))
    assert bool(replayed(model)) == (change != "hook")  # a hook is custom code
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)


def shrink(model):
    model.layers[1].scale[:] *= 0.5


# Changes of objects that a layer refers to: the layer, and the change.
CHANGES_INSIDE = {
    "regularizer": (
        lambda: keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.1)),
        lambda model: setattr(model.layers[1].kernel_regularizer, "l2", 0.5),
    ),
    "activity-regularizer": (
        lambda: keras.layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.1)),
        lambda model: setattr(model.layers[1].activity_regularizer, "l2", 0.5),
    ),
    "constraint": (
        lambda: keras.layers.Dense(4, kernel_constraint=keras.constraints.MaxNorm(5.0)),
        lambda model: setattr(model.layers[1].kernel_constraint, "max_value", 0.1),
    ),
    "setting": (
        lambda: keras.layers.Dense(4, kernel_constraint=keras.constraints.MaxNorm(0.5)),
        lambda model: keras.config.set_epsilon(0.5),
    ),
    "module": (
        lambda: keras.layers.TorchModuleWrapper(torch.nn.Sequential(torch.nn.LeakyReLU(0.1))),
        lambda model: setattr(model.layers[1].module[0], "negative_slope", 0.9),
    ),
    "array": (lambda: keras.layers.Rescaling(np.ones(6, "float32")), shrink),
}


@pytest.mark.kills(
    "torch_changes_of_regularizers_unnoticed",
    "torch_changes_of_arrays_unnoticed",
    "torch_changes_of_modules_unnoticed",
    "torch_settings_of_keras_unnoticed",
)
@pytest.mark.parametrize("change", CHANGES_INSIDE)
def test_a_change_inside_a_layer_s_attribute_has_an_effect(change):
    results = []
    layer, changes = CHANGES_INSIDE[change]
    for strategy in (False, True):
        model = make(layer, lambda: keras.optimizers.SGD(0.1, momentum=0.9), strategy)
        try:
            results.append(numbers(model, callbacks=[Change(changes, step=2)]))
        finally:
            keras.config.set_epsilon(1e-7)
    assert replayed(model)
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.kills("torch_recorded_in_every_step")
@pytest.mark.parametrize("every", [1, 16])
def test_a_model_that_changes_in_every_step_is_not_recorded_each_time(every):
    class Sets(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch % every == 0:
                self.model.last_batch = batch

    model = make(LAYERS["regularizer"], OPTIMIZERS["ema"], True)
    model.fit(*data(16 * 300), batch_size=16, verbose=0, callbacks=[Sets()])
    assert replayed(model) == (every > 1)


def test_gradients_of_the_last_step_stay_readable():
    seen = {}

    class Read(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            seen.setdefault(self.model, []).append([np.array(grad) for grad in grads])

    for strategy in (False, True):
        numbers(make(LAYERS["regularizer"], OPTIMIZERS["adadelta"], strategy), callbacks=[Read()])
    plain, model = seen.values()
    assert len(plain) == 12
    for actual, expected in zip(model, plain, strict=True):
        assert_equal(actual, expected)


class Counts(keras.layers.Layer if in_worker else object):
    """Computes something different in each step."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


@pytest.mark.kills("torch_custom_code_recorded")
def test_custom_code_runs_in_each_step_unless_jit_compile_is_set():
    plain, model = [make(Counts, OPTIMIZERS["ema"], strategy) for strategy in (False, True)]
    assert_equal(numbers(model), numbers(plain))
    assert not replayed(model)
    model = make(Counts, OPTIMIZERS["ema"], True, jit_compile=True)
    before = model.layers[1].calls
    model.fit(*data(160), batch_size=16, verbose=0)
    assert model.layers[1].calls <= before + 3  # in the build, the first step and the recorded step


def test_the_log_contains_the_reason_for_slow_steps():
    reasons = {
        "Python reads the numbers": {
            "optimizer": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2)
        },
        "Counts is custom code": {"layer": Counts},
        "run_eagerly": {"run_eagerly": True},
    }
    logger, said = logging.getLogger("kdist"), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        for reason, changes in reasons.items():
            arguments = {"layer": LAYERS["dropout"], "optimizer": OPTIMIZERS["ema"], "strategy": True}
            model = make(**arguments | changes)
            said.clear()
            numbers(model)
            assert reason in " ".join(said)
            assert not replayed(model)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.kills("torch_autocast_unnoticed")
def test_steps_under_autocast_are_not_recorded():
    x, _ = data(ROWS)
    plain, model = [make(LAYERS["regularizer"], OPTIMIZERS["ema"], strategy) for strategy in (False, True)]
    with torch.autocast("cpu", torch.bfloat16):
        cast = [m.predict(x, batch_size=25, verbose=0) for m in (model, plain)]
    alone = [m.predict(x, batch_size=25, verbose=0) for m in (model, plain)]
    np.testing.assert_array_equal(*cast)
    np.testing.assert_array_equal(*alone)
    assert not np.array_equal(cast[0], alone[0])
    assert replayed(model, "predict") == 1


def test_compile_forgets_the_recorded_steps():
    plain, model = [make(LAYERS["regularizer"], OPTIMIZERS["ema"], strategy) for strategy in (False, True)]
    results = []
    for one in (plain, model):
        first = numbers(one)
        one.compile(OPTIMIZERS["adadelta"](), "mae", metrics=["mse"])
        results.append([*first, *numbers(one)])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert [kind for kind, _ in vars(model)["_kdist_recorded"]] == ["train", "test", "predict"]


def test_a_model_with_recorded_steps_can_be_freed():
    import gc
    import weakref

    model = make(LAYERS["dropout"], OPTIMIZERS["ema"], True)
    numbers(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
