"""`CentralStorageStrategy` stores variables on one device; other devices compute. The contract tests its numbers."""

from __future__ import annotations

import pytest

import kdist
from tests.helpers.processes import each_backend
from tests.helpers.scripts import Script

_TRAINS = """
    import collections, gc, json
    import keras
    import numpy as np
    import kdist

    strategy = kdist.experimental.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:0")
    x = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((3,)), keras.layers.Dense(41), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
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

    def arrays(shape):
        # Yields device and address of all arrays of this shape in the process, except gradients.
        if keras.backend.backend() == "jax":
            import jax

            for array in jax.live_arrays():
                for shard in array.addressable_shards if array.shape == shape else ():
                    yield str(shard.device), shard.data.unsafe_buffer_pointer()
        elif keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            for found in gc.get_objects():
                if isinstance(found, tf.Variable) and found.shape == shape and hasattr(found, "handle"):
                    yield found.device[-5:].lower(), id(found)
        else:
            import torch

            tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
            gradients = {id(tensor.grad) for tensor in tensors if tensor.is_leaf}
            for tensor in tensors:
                if tensor.shape == shape and id(tensor) not in gradients:
                    yield str(tensor.device), tensor.data_ptr()

    gc.collect()
    held = collections.Counter(device for device, _ in set(arrays((3, 41))))
    extended = strategy.extended
    print(json.dumps({
        "held": held,
        "devices": [extended.worker_devices, extended.parameter_devices],
        "difference": float(keras.ops.max(keras.ops.abs(within - after))),
        "steps": int(model.optimizer.iterations),
    }))
"""
# The kernel and its two moments in Adam are on the parameter device; the compute devices have copies of the kernel,
# which JAX frees after a step. TensorFlow's copies also keep the value that they were copied from. On PyTorch, each
# logical device is "cpu".
_HELD = {
    "jax": {"cpu:0": 3},
    "tensorflow": {"cpu:0": 3, "cpu:1": 2, "cpu:2": 2},
    "torch": {"cpu": 3 + 1 + 1},
}


@pytest.mark.kills(
    central_jax_state_stays_on_the_devices="[jax]",
    central_tensorflow_old_weights_after_the_step="[tensorflow]",
    central_tensorflow_optimizer_in_every_replica="[tensorflow]",
    central_torch_mirrored="[torch]",
)
@each_backend
def test_variables_are_on_the_parameter_device_and_an_optimizers_nowhere_else(backend, tmp_path):
    script = Script(tmp_path, "trains", _TRAINS, {"KERAS_BACKEND": backend}).finish()
    found = script.told()
    assert found["devices"] == [["cpu:1", "cpu:2"], ["cpu:0"]]
    assert found["held"] == _HELD[backend]
    assert found["difference"] < 1e-6  # after the update, the step used the new weights
    assert found["steps"] == 2 * 3 + 2


def test_what_names_no_device_is_refused():
    for wrong in ("", 3, ["cpu:0"]):
        with pytest.raises(kdist.errors.InvalidArgumentError, match=r"parameter_device is not .*\nReceived"):
            kdist.experimental.CentralStorageStrategy(parameter_device=wrong)
