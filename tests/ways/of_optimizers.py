"""Ways to read, set, apply, build and save optimizers."""

from __future__ import annotations

from typing import Any

from tests.ways.things import Things, np, ops, way, ways


# Optimizers.
@way
def learning_rate_read(t: Things) -> Any:
    rate = t.model.optimizer.learning_rate
    return float(rate), rate, ops().convert_to_numpy(rate), rate * 2, f"{float(rate):.3f}"


@way
def learning_rate_set(t: Things) -> Any:
    t.model.optimizer.learning_rate = 0.125
    first = float(t.model.optimizer.learning_rate)
    t.model.optimizer.learning_rate.assign(t.model.optimizer.learning_rate / 2)
    return first, float(t.model.optimizer.learning_rate)


@way
def learning_rate_scheduled(t: Things) -> Any:
    rates = [float(t.scheduled.learning_rate)]
    for _ in range(2):
        t.scheduled.apply(t.gradients, t.model.trainable_variables)
        rates.append(float(t.scheduled.learning_rate))
    return rates, t.weights()


ways(
    iterations=lambda t: [int(t.model.optimizer.iterations), t.model.optimizer.iterations + 1],
    optimizer_variables=lambda t: [tuple(v.shape) for v in t.model.optimizer.variables],
    optimizer_values=lambda t: [v.numpy() for v in t.model.optimizer.variables],
    optimizer_config=lambda t: sorted((k, str(v)) for k, v in t.model.optimizer.get_config().items()),
)


@way
def applied(t: Things) -> Any:
    t.model.optimizer.apply(t.gradients, t.model.trainable_variables)
    t.model.optimizer.apply(t.gradients)
    return t.weights(), int(t.model.optimizer.iterations), [v.numpy() for v in t.model.optimizer.variables]


@way
def applied_in_pairs(t: Things) -> Any:
    t.model.optimizer.apply_gradients(zip(t.gradients, t.model.trainable_variables, strict=True))
    return t.weights()


@way
def applied_tensors(t: Things) -> Any:
    t.model.optimizer.apply([ops().convert_to_tensor(g) for g in t.gradients], t.model.trainable_variables)
    return t.weights()


@way
def applied_by_another_optimizer(t: Things) -> Any:
    for _ in range(2):
        t.other.apply(t.gradients, t.model.trainable_variables)
    return t.weights(), int(t.other.iterations), [v.numpy() for v in t.other.variables]


@way
def another_optimizer_built(t: Things) -> Any:
    t.other.build(t.model.trainable_variables)
    t.other.apply(t.gradients)
    return t.weights(), [tuple(v.shape) for v in t.other.variables]


@way
def applied_to_a_variable(t: Things) -> Any:
    t.other.apply([np().ones((2, 2), "float32")], [t.matrix])
    return t.matrix


@way
def applied_with_a_scaled_loss(t: Things) -> Any:
    import keras

    t.scaled.build(t.model.trainable_variables)
    scaled = float(t.scaled.scale_loss(ops().convert_to_tensor(3.0)))
    if keras.backend.backend() == "jax":
        return scaled  # when eager, Keras leaks tracers from its `cond` there
    t.scaled.apply([ops().convert_to_tensor(g) for g in t.gradients], t.model.trainable_variables)
    return scaled, t.weights(), int(t.scaled.iterations)


@way
def averaged(t: Things) -> Any:
    for _ in range(2):
        t.averaging.apply(t.gradients, t.model.trainable_variables)
    t.averaging.finalize_variable_values(t.model.trainable_variables)
    return t.weights()


@way
def accumulated(t: Things) -> Any:
    import keras

    optimizer = keras.optimizers.SGD(0.25, gradient_accumulation_steps=2, clipnorm=1.0)
    seen = []
    for _ in range(3):
        optimizer.apply(t.gradients, t.model.trainable_variables)
        seen.append(t.weights())
    return seen


@way
def decayed(t: Things) -> Any:
    import keras

    optimizer = keras.optimizers.AdamW(0.25, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.apply(t.gradients, t.model.trainable_variables)
    return t.weights()


@way
def optimizer_weights_set(t: Things) -> Any:
    t.other.build(t.model.trainable_variables)
    t.other.set_weights([v.numpy() + 1 for v in t.other.variables])
    return [v.numpy() for v in t.other.variables]


@way
def optimizer_saved(t: Things) -> Any:
    import keras

    t.model.optimizer.apply(t.gradients)
    store: dict[str, Any] = {}
    t.model.optimizer.save_own_variables(store)
    twin = keras.optimizers.Adam(0.1)
    twin.build(t.model.trainable_variables)
    twin.load_own_variables(store)
    return {k: np().asarray(v) for k, v in store.items()}, [v.numpy() for v in twin.variables]


@way
def optimizer_stateless(t: Things) -> Any:
    t.other.build(t.model.trainable_variables)
    values = [v.value for v in t.model.trainable_variables]
    gradients = [ops().convert_to_tensor(g) for g in t.gradients]
    return t.other.stateless_apply([v.value for v in t.other.variables], gradients, values), t.weights()


@way
def optimizer_methods(t: Things) -> Any:
    t.other.build(t.model.trainable_variables)
    kernel = t.model.trainable_variables[0]
    t.other.assign(kernel, [[1.0], [2.0]])
    t.other.assign_add(kernel, [[1.0], [1.0]])
    t.other.assign_sub(kernel, [[0.5], [0.25]])
    return t.weights()
