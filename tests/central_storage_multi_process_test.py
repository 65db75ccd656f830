"""`CentralStorageStrategy`: one device holds the variables, others compute. Its numbers are in the contract's table."""

from __future__ import annotations

import json

import pytest

import kdist
from tests.processes import Script, each_backend

_TRAINS = """
    import json
    import keras
    import numpy as np
    import kdist
    from kdist.backends import get_backend

    strategy = kdist.experimental.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:0")
    x = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse", metrics=["mae"])
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)

    def step(batch):
        loss = lambda: keras.ops.mean(model(batch) ** 2)
        _, gradients = kdist.value_and_grad(loss, model.trainable_variables)()
        model.optimizer.apply(gradients, model.trainable_variables)
        return model(batch)

    for batch in strategy.experimental_distribute_dataset([x[:4], x[4:8]]):
        within = strategy.gather(strategy.run(step, args=(batch,)), axis=0)
    after = model(x[4:8])
    slots = model.optimizer.variables
    backend, everything = get_backend().name, [*model.variables, *model.optimizer.variables]
    if backend == "jax":
        where = {str(d) for v in everything for d in v.value.devices()}
        copied = 0
        placed = strategy.runtime._functions.placed
        copied = sum(placed._known.get(v) is not None for v in everything)
    elif backend == "tensorflow":
        where = {v.value.device[-5:].lower() for v in everything}
        shared = strategy.runtime.components._known[False]
        copied = sum(shared.get(v) is not None for v in slots)
    else:
        where = {str(v.value.device) for v in everything}
        copied = sum(copies._copies.get(v) is not None for v in slots for copies in strategy.runtime.copies)
    extended = strategy.extended
    print(json.dumps({
        "where": sorted(where),
        "copied": copied,
        "devices": [extended.worker_devices, extended.parameter_devices],
        "slots": len(slots),
        "difference": float(keras.ops.max(keras.ops.abs(within - after))),
        "steps": int(model.optimizer.iterations),
    }))
"""
_HOLDER = {"jax": "cpu:0", "tensorflow": "cpu:0", "torch": "cpu"}


@pytest.mark.kills(
    central_jax_state_stays_on_the_devices="[jax]",
    central_tensorflow_old_weights_after_the_step="[tensorflow]",
    central_tensorflow_optimizer_in_every_replica="[tensorflow]",
)
@each_backend
def test_variables_are_on_the_parameter_device_and_an_optimisers_nowhere_else(backend, tmp_path):
    script = Script(tmp_path, "trains", _TRAINS, {"KERAS_BACKEND": backend})
    assert script.wait() == 0, script.stderr()
    found = json.loads(script.stdout().splitlines()[-1])
    assert found["devices"] == [["cpu:1", "cpu:2"], ["cpu:0"]]
    assert found["where"] == [_HOLDER[backend]]
    assert found["copied"] == 0
    assert found["difference"] < 1e-6  # the step saw the weights that it had made
    assert found["steps"] == 2 * 3 + 2
    assert found["slots"] > 10


def test_what_names_no_device_is_refused():
    for wrong in ("", 3, ["cpu:0"]):
        with pytest.raises(kdist.errors.InvalidArgumentError, match=r"parameter_device is not .*\nReceived"):
            kdist.experimental.CentralStorageStrategy(parameter_device=wrong)
