"""Ways to use the variables of layers, models and metrics, and to save them."""

from __future__ import annotations

import copy
import os
from typing import Any

from tests.ways.things import Things, way, ways

# Layers and models.
ways(
    called=lambda t: [t.dense(t.x), t.model(t.x), t.model(t.x, training=True)],
    predicted_on_a_batch=lambda t: t.model.predict_on_batch(t.x),
    weights_of_a_layer=lambda t: [t.dense.kernel, t.dense.get_weights(), [v.shape for v in t.dense.weights]],
    counted=lambda t: t.model.count_params(),
    stateless_call=lambda t: t.model.stateless_call(
        [v.value * 2 for v in t.model.trainable_variables], [], t.x
    ),
    state_tree=lambda t: t.model.get_state_tree(value_format="numpy_array")["trainable_variables"],
)


@way
def summary(t: Things) -> Any:
    lines: list[str] = []
    t.model.summary(print_fn=lambda line, *_, **__: lines.append(line))
    return [line for line in lines if "params" in line]


@way
def weights_assigned(t: Things) -> Any:
    t.model.set_weights([w + 1 for w in t.model.get_weights()])
    t.dense.kernel.assign(t.dense.kernel * 2)
    t.dense.bias.assign_add([0.5])
    return t.weights()


@way
def state_tree_assigned(t: Things) -> Any:
    tree = t.model.get_state_tree(value_format="numpy_array")["trainable_variables"]
    tree["model"]["dense"]["kernel"] = tree["model"]["dense"]["kernel"] + 1
    t.model.set_state_tree({"trainable_variables": tree})
    return t.weights()


@way
def frozen(t: Things) -> Any:
    t.dense.trainable = False
    return len(t.model.trainable_variables), len(t.model.non_trainable_variables)


@way
def cloned(t: Things) -> Any:
    import keras

    clone = keras.models.clone_model(t.model)
    clone.set_weights([w * 2 for w in t.weights()])
    return clone.get_weights(), t.weights()


@way
def adapted_with_lora(t: Things) -> Any:
    t.dense.enable_lora(1)
    t.dense.lora_kernel_a.assign([[1.0], [2.0]])
    t.dense.lora_kernel_b.assign([[0.5]])
    return t.dense.kernel, t.dense(t.x)


@way
def deep_copied(t: Things) -> Any:
    twin = copy.deepcopy(t.dense)
    twin.kernel.assign(twin.kernel * 3)
    return twin.get_weights(), t.weights()


@way
def saved_and_loaded(t: Things) -> Any:
    import keras

    t.model.optimizer.apply(t.gradients)
    path = os.path.join(t.folder, "model.keras")
    t.model.save(path)
    loaded = keras.models.load_model(path)
    return loaded.get_weights(), int(loaded.optimizer.iterations), len(loaded.optimizer.variables)


@way
def weights_saved_and_loaded(t: Things) -> Any:
    before = t.weights()
    path = os.path.join(t.folder, "model.weights.h5")
    t.model.save_weights(path)
    t.model.set_weights([w * 0 for w in before])
    t.model.load_weights(path)
    return t.weights()


# Metrics.
@way
def metric_updated(t: Things) -> Any:
    t.mean.update_state([1.0, 2.0, 6.0])
    t.mean.update_state(5.0, sample_weight=2.0)
    return t.mean.result(), float(t.mean.result()), t.mean.variables


@way
def metric_called(t: Things) -> Any:
    return t.accuracy([[1.0], [0.0]], [[0.9], [0.8]]), t.accuracy.result(), t.accuracy.variables


@way
def metric_reset(t: Things) -> Any:
    t.mean.update_state(3.0)
    t.mean.reset_state()
    return t.mean.result(), [float(v) for v in t.mean.variables]


@way
def metric_stateless(t: Things) -> Any:
    values = t.mean.stateless_update_state([v.value for v in t.mean.variables], [1.0, 3.0])
    return values, t.mean.stateless_result(values), t.mean.result()


@way
def metric_assigned(t: Things) -> Any:
    t.mean.total.assign(6.0)
    t.mean.count.assign_add(2.0)
    return t.mean.result(), t.mean.total
