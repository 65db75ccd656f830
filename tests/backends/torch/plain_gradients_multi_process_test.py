"""A warning if the gradient of a sharded variable is a plain tensor, which may already be the sum of all replicas."""

from __future__ import annotations

import pytest

from tests.helpers.processes import run


def in_worker_accumulation() -> tuple[int, list[str]]:
    """Returns the number of warnings before an optimizer gets accumulated gradients, and all warnings."""
    import logging

    import keras
    import numpy as np

    import kdist

    strategy = kdist.FullyShardedStrategy(min_size=4)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="accumulated")])
        optimizer = keras.optimizers.SGD()
        totals = [keras.Variable(np.zeros(v.shape), trainable=False) for v in model.trainable_variables]
    x = np.ones((2, 4), "float32")

    def step(from_variables: bool) -> None:
        gradients = kdist.value_and_grad(lambda: keras.ops.sum(model(x)), model.trainable_variables)()[1]
        for total, gradient in zip(totals, gradients, strict=True):
            total.assign_add(gradient)
        if from_variables:
            gradients = [total.value for total in totals]
        optimizer.apply(gradients, model.trainable_variables)

    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kdist").addHandler(handler)
    try:
        strategy.run(step, args=(False,))
        before = len(found)
        for _ in range(2):
            strategy.run(step, args=(True,))
    finally:
        logging.getLogger("kdist").removeHandler(handler)
    return before, found


@pytest.mark.kills("torch_plain_gradients_summed_in_silence")
def test_gradients_from_variables_give_one_warning() -> None:
    (before, warnings), others = run("torch", 2, in_worker_accumulation)
    assert before == 0 and others == (0, [])
    (warning,) = warnings
    assert "accumulated/kernel'" in warning and "gradient_accumulation_steps" in warning
