"""Optimisers, and what they do with gradients before and after the sum over the replicas."""

from __future__ import annotations

from typing import Any

import keras

from kdist.testing.conformance import arrays as a
from kdist.testing.conformance.case import Numbers, case


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


@case("`AdamW`, weight decay once")
def adamw() -> Numbers:
    return _train(keras.optimizers.AdamW(0.01, weight_decay=0.1))


@case("`RMSprop` and a learning rate schedule")
def rmsprop_with_schedule() -> Numbers:
    return _train(keras.optimizers.RMSprop(keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)))


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


@case("loss scaling", rtol=1e-5)
def loss_scaling() -> Numbers:
    return _train(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=3
        )
    )


# float16 keeps 11 bits: sums over different groups of rows differ in the last of them.
@case("mixed precision with loss scaling (to float16's digits)", rtol=5e-3, atol=5e-3)
def mixed_precision() -> Numbers:
    keras.config.set_dtype_policy("mixed_float16")
    x, y = a.regression()
    model = a.mlp()
    # Far from where float16 overflows: which of two sums does so first depends on how they are grouped.
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=256.0)
    model.compile(optimizer, "mse")
    return a.numbers(model, a.fit(model, x, y))


@case("constraints on weights")
def constraints() -> Numbers:
    x, y = a.regression()
    model = a.mlp(kernel_constraint=keras.constraints.MaxNorm(0.5))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return a.numbers(model, a.fit(model, x, y))
