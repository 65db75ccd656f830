"""After workers have trained a model, its first read on the chief returns the values on the servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.coordinator.clusters import cluster, facts
from tests.helpers.processes import each_backend_in_twelve_turns

# After the first read, a worker returns the values on the servers. NumPy computes the results from them.
_FIRST_READS = """
    rng = np.random.default_rng()
    x, y = rng.normal(size=(40, 6)).astype("float32"), rng.normal(size=(40, 3)).astype("float32")
    strategy = kdist.ParameterServerStrategy(
        variable_partitioner=kdist.experimental.partitioners.FixedShardsPartitioner(2)
    )
    coordinator = kdist.coordinator.ClusterCoordinator(strategy)
    backend = keras.backend.backend()

    def plain_model():
        layers = [keras.layers.Input((6,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(3)]
        return keras.Sequential(layers)

    def new_model():
        with strategy.scope():
            model = plain_model()
            model.compile(keras.optimizers.SGD(0.5), loss="mse")
            optimizer = keras.optimizers.SGD(0.5)

        @kdist.function
        def step():
            def replica_fn():
                def loss():
                    return keras.ops.mean(keras.ops.square(model(x, training=True) - keras.ops.convert_to_tensor(y)))

                _, gradients = kdist.value_and_grad(loss, model.trainable_variables)()
                optimizer.apply(gradients, model.trainable_variables)

            strategy.run(replica_fn)

        @kdist.function
        def read():
            return [keras.ops.convert_to_tensor(variable) for variable in model.trainable_variables]

        return model, step, read

    def saved(model):
        model.save("model.keras")
        return keras.models.load_model("model.keras", compile=False).get_weights()

    def saved_weights(model):
        model.save_weights("model.weights.h5")
        other = plain_model()
        other.load_weights("model.weights.h5")
        return other.get_weights()

    def checkpoint(model):
        other = plain_model()
        path = kdist.Checkpoint(model=model).save("checkpoint", asynchronous=False)
        kdist.Checkpoint(model=other).restore(path).expect_partial()
        return other.get_weights()

    def exported(model):
        if backend == "torch":
            import torch

            model.export("model.pt2", format="torch", verbose=False)
            program = torch.export.load("model.pt2").module()  # for batches of one row, as Keras exports it
            return np.concatenate([program(torch.from_numpy(row[None])).detach().numpy() for row in x])
        import tensorflow as tf

        model.export("exported", format="tf_saved_model", verbose=False)
        loaded = tf.saved_model.load("exported")
        return loaded.serve(x).numpy()

    def outputs(weights):
        kernel, bias, kernel_2, bias_2 = weights
        return np.maximum(x @ kernel + bias, 0) @ kernel_2 + bias_2

    ways = {
        "evaluate": lambda model: model.evaluate(x, y, verbose=0),
        "predict": lambda model: model.predict(x, verbose=0),
        "test_on_batch": lambda model: model.test_on_batch(x, y),
        "predict_on_batch": lambda model: model.predict_on_batch(x),
        "call": lambda model: keras.ops.convert_to_numpy(model(x)),
        "get_weights": lambda model: model.get_weights(),
        "variables": lambda model: [np.array(variable) for variable in model.trainable_variables],
        "symbolic call, then call": lambda model: (
            model.compute_output_spec(keras.KerasTensor((None, 6))), keras.ops.convert_to_numpy(model(x))
        )[1],
        "symbolic layer, then weights": lambda model: (
            model.layers[-1].compute_output_spec(keras.KerasTensor((None, 4))), model.get_weights()
        )[1],
        "save": saved,
        "save_weights": saved_weights,
        "checkpoint": checkpoint,
        "export": exported,
    }
    for name in ("evaluate", "predict", "test_on_batch", "predict_on_batch"):
        ways[name + ", also before"] = ways[name]
    for name, way in ways.items():
        model, step, read = new_model()
        first = model.get_weights()
        for _ in range(3 if name.endswith("before") else 0):
            way(model)
        for _ in range(3):
            coordinator.schedule(step)
        coordinator.join()
        seen = way(model)
        held = [np.array(value) for value in coordinator.fetch(coordinator.schedule(read))]
        if not isinstance(seen, list):
            expected = np.mean((outputs(held) - y) ** 2) if np.ndim(seen) == 0 else outputs(held)
            seen, expected = [seen], [expected]
        else:
            expected = held
        tell(
            way=name,
            off=max(float(np.max(np.abs(a - b))) for a, b in zip(seen, expected, strict=True)),
            moved=min(float(np.max(np.abs(a - b))) for a, b in zip(first, held, strict=True)),
        )
"""


@pytest.mark.kills(
    tensorflow_shards_not_exported="[tensorflow]",
    torch_served_value_from_no_device="[torch]",
    torch_values_on_servers_recorded="[torch]",
)
@each_backend_in_twelve_turns
def test_the_first_read_on_the_chief_sees_the_values_on_the_servers(backend: str, tmp_path: Path) -> None:
    with cluster(backend, tmp_path) as tasks:
        chief = tasks.coordinate("    import pathlib\n" + _FIRST_READS).finish()
        found = facts(chief)
    assert len(found) == 17
    for one in found:
        assert one["moved"] > 1e-3, one
        assert one["off"] < 1e-5, one
