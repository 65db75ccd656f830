"""Optimizers, and their changes to gradients before and after the sum over the replicas."""

from __future__ import annotations

from typing import Any

import keras

from tests.contract import arrays as a
from tests.contract.case import Numbers, case


def _train(optimizer: Any, epochs: int = 2, **compile_arguments: Any) -> Numbers:
    x, y = a.regression()
    model = a.mlp()
    model.compile(optimizer, "mse", metrics=["mae"], **compile_arguments)
    history = a.fit(model, x, y, epochs=epochs, sample_weight=a.weights())
    slots = {f"optimizer {i}": keras.ops.convert_to_numpy(v) for i, v in enumerate(model.optimizer.variables)}
    return a.numbers(model, history, **slots)


@case("`SGD` with momentum")
def sgd() -> Numbers:
    return _train(keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True))


@case("`Adam`")
def adam() -> Numbers:
    return _train(keras.optimizers.Adam(0.01))


@case("`AdamW`, with weight decay applied once")
def adamw() -> Numbers:
    return _train(keras.optimizers.AdamW(0.01, weight_decay=0.1))


@case("`AdamW` that leaves named variables without weight decay")
def adamw_with_exclusions() -> Numbers:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    model = a.mlp()
    optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[:1], var_names=["bias"])
    return a.train(optimizer, model, epochs=2)


@case("`RMSprop` and a learning rate schedule")
def rmsprop_with_schedule() -> Numbers:
    return _train(keras.optimizers.RMSprop(keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)))


def _train_each(*optimizers: Any) -> Numbers:
    """Trains with one optimizer after the other, each from the weights of the last."""
    x, y = a.regression(a.BATCH)  # batches of one size: each optimizer compiles once
    model = a.mlp()
    found: Numbers = {}
    for optimizer in optimizers:
        model.compile(optimizer, "mse")
        history = a.fit(model, x, y, sample_weight=a.weights(a.BATCH), epochs=3)
        slots = {f"slot {i}": keras.ops.convert_to_numpy(v) for i, v in enumerate(optimizer.variables)}
        found |= {f"{optimizer.name} {k}": v for k, v in a.numbers(model, history, **slots).items()}
    return found


@case("`Adagrad`, `Adadelta`, `Adamax`, `Nadam`, `Ftrl`")
def older_optimizers() -> Numbers:
    return _train_each(
        keras.optimizers.Adagrad(0.1),
        keras.optimizers.Adadelta(5.0),
        keras.optimizers.Adamax(0.02),
        keras.optimizers.Nadam(0.02),
        keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    )


@case("`Lion`, `Lamb`, `Adafactor`, `Muon`")
def newer_optimizers() -> Numbers:
    return _train_each(
        keras.optimizers.Lion(0.01),
        keras.optimizers.Lamb(0.02),
        keras.optimizers.Adafactor(0.05),
        keras.optimizers.Muon(0.02),
    )


@case("`clipnorm`")
def clipnorm() -> Numbers:
    return _train(keras.optimizers.SGD(0.1, clipnorm=0.3))


@case("`global_clipnorm`")
def global_clipnorm() -> Numbers:
    return _train(keras.optimizers.SGD(0.1, global_clipnorm=0.5))


@case("`clipvalue`")
def clipvalue() -> Numbers:
    return _train(keras.optimizers.SGD(0.1, clipvalue=0.1))


@case("gradient accumulation")
def gradient_accumulation() -> Numbers:
    return _train(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), epochs=3)


@case("moving average of the weights (EMA)")
def ema() -> Numbers:
    return _train(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8))


@case("EMA with `ema_overwrite_frequency`")
def ema_overwrite() -> Numbers:
    return _train(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2))


@case("several optimizers in one (`MultiOptimizer`), also with `loss_scale_factor`")
def several_optimizers() -> Numbers:
    found: Numbers = {}
    for scale in (None, 8.0):
        of_biases = {".*/bias": keras.optimizers.Adam(0.05)}
        by_path = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), of_biases)
        optimizer = keras.optimizers.MultiOptimizer(by_path, loss_scale_factor=scale)
        numbers = a.train(optimizer) | {"steps": int(optimizer.iterations)}
        found |= {f"scale {scale} {name}": value for name, value in numbers.items()}
    return found


@case("loss scaling", rtol=1e-5)
def loss_scaling() -> Numbers:
    return _train(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=3
        )
    )


# float16 has 11 significant bits: sums over different groups of rows differ in the last bits.
@case("mixed precision with loss scaling (to float16 precision)", rtol=5e-3, atol=5e-3)
def mixed_precision() -> Numbers:
    keras.config.set_dtype_policy("mixed_float16")
    # Far below the overflow of float16: the grouping of the rows determines which sum overflows first.
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=256.0)
    return a.train(optimizer)


@case("steps that overflow float16 on one replica: skipped, with a smaller loss scale", rtol=5e-3, atol=5e-3)
def overflow() -> Numbers:
    keras.config.set_dtype_policy("mixed_float16")
    x, y = a.regression(4 * a.BATCH + 5)
    # Two rows overflow at any scale: the last row of the first batch, and the first row of the third batch.
    y[a.BATCH - 1] = y[2 * a.BATCH] = 1e8
    scales: list[Any] = []

    def note(epoch: int, logs: Any) -> None:
        scales.append(keras.ops.convert_to_numpy(optimizer.dynamic_scale))

    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=256.0, dynamic_growth_steps=2
    )
    model = a.mlp()
    model.compile(optimizer, "mse")
    a.fit(model, x, y, epochs=3, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=note)])
    return a.numbers(model, scales=scales, steps=optimizer.inner_optimizer.iterations)


# bfloat16 has 8 significant bits, so activations of different groups of rows differ by up to 2**-8 = 0.004.
@case("mixed precision with bfloat16 (to bfloat16 precision)", rtol=1e-2, atol=1e-2)
def mixed_bfloat16() -> Numbers:
    keras.config.set_dtype_policy("mixed_bfloat16")
    return a.train(keras.optimizers.SGD(0.05))


# float64 has 53 bits, or 1e-16: 1e-12 allows another order of sums, but no conversion to float32 and back.
@case(
    "float64 (to float64 precision)",
    rtol=1e-12,
    atol=1e-13,
    backends=("tensorflow",),
    why_not_all="Keras multiplies matrices in float32 on PyTorch, and by default on JAX",
)
def float64() -> Numbers:
    keras.config.set_floatx("float64")  # losses and metrics follow it instead of the policy
    keras.config.set_dtype_policy("float64")
    try:
        model = a.mlp(kernel_regularizer=keras.regularizers.L2(0.1))
        optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.5)
        # Batches of 19 rows, so that no replica's share is a short binary fraction.
        return a.train(optimizer, model, batch_size=19, sample_weight=a.weights())
    finally:
        keras.config.set_floatx("float32")


@case("constraints on weights")
def constraints() -> Numbers:
    return a.train(keras.optimizers.SGD(0.1), a.mlp(kernel_constraint=keras.constraints.MaxNorm(0.5)))
