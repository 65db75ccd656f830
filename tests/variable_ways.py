"""Every way to read, convert, print, assign, save and apply that Keras has for variables, metrics and optimisers.

A table of small functions. Each gets fresh `Things` and returns what it saw; plain Keras on one device says what that is.
Nothing here knows kdist.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any


class Things:
    """What the ways are tried on: variables, metrics, a built model with its optimiser, and other optimisers.

    Args:
        folder: Where a way may write; the same on all workers.
    """

    def __init__(self, folder: str) -> None:
        import keras
        import numpy as np

        self.folder = folder
        self.number = keras.Variable(2.5, name="number")
        self.integer = keras.Variable(3, dtype="int32", trainable=False, name="integer")
        self.matrix = keras.Variable(np.array([[1.0, -2.0], [3.0, 0.5]], "float32"), name="matrix")
        self.flags = keras.Variable(np.array([True, False]), dtype="bool", trainable=False, name="flags")
        self.mean = keras.metrics.Mean(name="mean")
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")
        self.seeds = keras.random.SeedGenerator(7)
        self.dense = keras.layers.Dense(1, kernel_initializer="ones", name="dense")
        self.model = keras.Sequential([keras.Input((2,)), self.dense], name="model")
        self.model.compile(keras.optimizers.Adam(0.5), "mse")
        self.model.optimizer.build(self.model.trainable_variables)
        self.other = keras.optimizers.SGD(0.25, momentum=0.5)
        self.scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.25), initial_scale=4.0)
        self.scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5))
        self.averaging = keras.optimizers.SGD(0.25, use_ema=True, ema_momentum=0.5)
        self.x = np.array([[1.0, 2.0], [3.0, -4.0]], "float32")
        self.gradients = [np.array([[2.0], [4.0]], "float32"), np.array([8.0], "float32")]

    def weights(self) -> Any:
        return self.model.get_weights()


_Way = Callable[[Things], Any]
WAYS: dict[str, _Way] = {}


def _way(function: _Way) -> _Way:
    WAYS[function.__name__] = function
    return function


def _ways(**functions: _Way) -> None:
    WAYS.update(functions)


def _ops() -> Any:
    import keras

    return keras.ops


def _np() -> Any:
    import numpy as np

    return np


# Reading and converting.
_ways(
    float_of_a_number=lambda t: float(t.number),
    int_of_a_number=lambda t: int(t.number),
    float_of_an_integer=lambda t: float(t.integer),
    int_of_an_integer=lambda t: int(t.integer),
    round_of_a_number=lambda t: float(round(t.number)),
    float_of_a_matrix_is_refused=lambda t: float(t.matrix),
    bool_is_refused=lambda t: bool(t.number),
    numpy_of_a_number=lambda t: t.number.numpy(),
    numpy_of_a_matrix=lambda t: t.matrix.numpy().tolist(),
    numpy_array=lambda t: _np().array(t.matrix),
    numpy_asarray_as_float64=lambda t: _np().asarray(t.matrix, "float64"),
    numpy_function=lambda t: _np().sum(_np().asarray(t.matrix)),
    convert_to_numpy=lambda t: _ops().convert_to_numpy(t.matrix),
    convert_to_tensor=lambda t: _ops().convert_to_tensor(t.matrix),
    convert_to_float64=lambda t: _ops().convert_to_tensor(t.matrix, "float64"),
    value=lambda t: t.matrix.value,
    value_of_a_flag=lambda t: t.flags.value,
    float_of_the_value=lambda t: float(t.number.value),
    cast=lambda t: _ops().cast(t.number, "int32"),
    item=lambda t: t.matrix[1, 0],
    row=lambda t: t.matrix[1],
    shape_and_dtype=lambda t: (tuple(t.matrix.shape), t.matrix.ndim, t.matrix.dtype, str(t.integer.dtype)),
    name_and_path=lambda t: (t.number.name, t.number.path),
    trainable=lambda t: (t.number.trainable, setattr(t.number, "trainable", False), t.number.trainable),
    printed=lambda t: (repr(t.number), str(t.integer), f"{float(t.number):.2f}"),
    formatted=lambda t: f"{t.number}",
)

# Arithmetic.
_ways(
    sums=lambda t: [t.number + 1, 1 + t.number, t.number - 1, 1 - t.number, t.number + t.integer],
    products=lambda t: [t.matrix * 2, 2 * t.matrix, t.matrix / 4, 4 / t.number, t.matrix @ t.matrix],
    integer_arithmetic=lambda t: [t.integer // 2, t.integer % 2, t.integer**2, 7 // t.integer, 7 % t.integer],
    signs=lambda t: [-t.matrix, +t.matrix, abs(t.matrix)],
    comparisons=lambda t: [t.number == 2.5, t.number != 2.5, t.number < 3, t.number >= 3, t.matrix > 0],
    flags=lambda t: [~t.flags, t.flags & True, t.flags | True, t.flags ^ True],
    operations=lambda t: [_ops().add(t.matrix, t.matrix), _ops().matmul(t.x, t.matrix), _ops().sum(t.matrix)],
    stacked=lambda t: _ops().stack([t.number + 0, t.number * 2]),
    where=lambda t: _ops().where(t.matrix > 0, t.matrix, t.number),
    slice_update=lambda t: _ops().slice_update(t.matrix, (0, 0), _np().zeros((1, 2), "float32")),
    cond=lambda t: _ops().cond(t.number > 2, lambda: t.number + 1, lambda: t.number - 1),
    while_loop=lambda t: _ops().while_loop(lambda i: i < t.integer, lambda i: (i + 1,), (0,))[0],
)


# Assigning.
@_way
def assigned(t: Things) -> Any:
    t.number.assign(4)
    t.matrix.assign([[1, 2], [3, 4]])
    t.integer.assign(_np().int64(9))
    return t.number, t.matrix, t.integer


@_way
def assigned_from_a_variable(t: Things) -> Any:
    t.number.assign(t.integer)
    t.matrix.assign(t.matrix + t.number)
    return t.number, t.matrix


@_way
def assigned_by_addition(t: Things) -> Any:
    t.number.assign_add(1.5)
    t.integer.assign_sub(1)
    t.matrix.assign_add(t.matrix)
    return t.number, t.integer, t.matrix


_ways(
    what_assign_returns=lambda t: [t.number.assign(4), t.number.assign_add(1), t.number.assign_sub(3)],
    a_wrong_shape_is_refused=lambda t: t.matrix.assign([1.0, 2.0, 3.0]),
)


@_way
def copied(t: Things) -> Any:
    import keras

    twin = keras.Variable(t.matrix)
    twin.assign(twin * 2)
    return twin, t.matrix


@_way
def created_from_an_initializer(t: Things) -> Any:
    import keras

    made = keras.Variable(keras.initializers.Constant(3.0), shape=(2,), dtype="float32")
    return made, made + 1


@_way
def constrained_and_regularised(t: Things) -> Any:
    import keras

    t.matrix.constraint = keras.constraints.NonNeg()
    t.matrix.regularizer = keras.regularizers.L2(0.5)
    return t.matrix.constraint(t.matrix), t.matrix.regularizer(t.matrix)


@_way
def stateless_scope(t: Things) -> Any:
    import keras

    with keras.StatelessScope([(t.number, _ops().convert_to_tensor(9.0))]) as scope:
        t.number.assign(t.number + 1)
        t.integer.assign_add(1)
        inside = float(t.number.value), int(t.integer.value)
    return inside, t.number, scope.get_current_value(t.number), scope.get_current_value(t.integer)


@_way
def random_numbers(t: Things) -> Any:
    import keras

    first = keras.random.normal((2,), seed=t.seeds)
    return first, keras.random.uniform((2,), seed=t.seeds), t.seeds.state, t.seeds.next()


# Layers and models.
_ways(
    called=lambda t: [t.dense(t.x), t.model(t.x), t.model(t.x, training=True)],
    predicted_on_a_batch=lambda t: t.model.predict_on_batch(t.x),
    weights_of_a_layer=lambda t: [t.dense.kernel, t.dense.get_weights(), [v.shape for v in t.dense.weights]],
    counted=lambda t: t.model.count_params(),
    stateless_call=lambda t: t.model.stateless_call([v.value * 2 for v in t.model.trainable_variables], [], t.x),
    state_tree=lambda t: t.model.get_state_tree(value_format="numpy_array")["trainable_variables"],
)


@_way
def summary(t: Things) -> Any:
    lines: list[str] = []
    t.model.summary(print_fn=lambda line, *_, **__: lines.append(line))
    return [line for line in lines if "params" in line]


@_way
def weights_assigned(t: Things) -> Any:
    t.model.set_weights([w + 1 for w in t.model.get_weights()])
    t.dense.kernel.assign(t.dense.kernel * 2)
    t.dense.bias.assign_add([0.5])
    return t.weights()


@_way
def state_tree_assigned(t: Things) -> Any:
    tree = t.model.get_state_tree(value_format="numpy_array")["trainable_variables"]
    tree["model"]["dense"]["kernel"] = tree["model"]["dense"]["kernel"] + 1
    t.model.set_state_tree({"trainable_variables": tree})
    return t.weights()


@_way
def frozen(t: Things) -> Any:
    t.dense.trainable = False
    return len(t.model.trainable_variables), len(t.model.non_trainable_variables)


@_way
def cloned(t: Things) -> Any:
    import keras

    clone = keras.models.clone_model(t.model)
    clone.set_weights([w * 2 for w in t.weights()])
    return clone.get_weights(), t.weights()


@_way
def adapted_with_lora(t: Things) -> Any:
    t.dense.enable_lora(1)
    t.dense.lora_kernel_a.assign([[1.0], [2.0]])
    t.dense.lora_kernel_b.assign([[0.5]])
    return t.dense.kernel, t.dense(t.x)


@_way
def deep_copied(t: Things) -> Any:
    twin = copy.deepcopy(t.dense)
    twin.kernel.assign(twin.kernel * 3)
    return twin.get_weights(), t.weights()


@_way
def saved_and_loaded(t: Things) -> Any:
    import keras

    t.model.optimizer.apply(t.gradients)
    path = os.path.join(t.folder, "model.keras")
    t.model.save(path)
    loaded = keras.models.load_model(path)
    return loaded.get_weights(), int(loaded.optimizer.iterations), len(loaded.optimizer.variables)


@_way
def weights_saved_and_loaded(t: Things) -> Any:
    before = t.weights()
    path = os.path.join(t.folder, "model.weights.h5")
    t.model.save_weights(path)
    t.model.set_weights([w * 0 for w in before])
    t.model.load_weights(path)
    return t.weights()


# Metrics.
@_way
def metric_updated(t: Things) -> Any:
    t.mean.update_state([1.0, 2.0, 6.0])
    t.mean.update_state(5.0, sample_weight=2.0)
    return t.mean.result(), float(t.mean.result()), t.mean.variables


@_way
def metric_called(t: Things) -> Any:
    return t.accuracy([[1.0], [0.0]], [[0.9], [0.8]]), t.accuracy.result(), t.accuracy.variables


@_way
def metric_reset(t: Things) -> Any:
    t.mean.update_state(3.0)
    t.mean.reset_state()
    return t.mean.result(), [float(v) for v in t.mean.variables]


@_way
def metric_stateless(t: Things) -> Any:
    values = t.mean.stateless_update_state([v.value for v in t.mean.variables], [1.0, 3.0])
    return values, t.mean.stateless_result(values), t.mean.result()


@_way
def metric_assigned(t: Things) -> Any:
    t.mean.total.assign(6.0)
    t.mean.count.assign_add(2.0)
    return t.mean.result(), t.mean.total


# Optimisers.
@_way
def learning_rate_read(t: Things) -> Any:
    rate = t.model.optimizer.learning_rate
    return float(rate), rate, _ops().convert_to_numpy(rate), rate * 2, f"{float(rate):.3f}"


@_way
def learning_rate_set(t: Things) -> Any:
    t.model.optimizer.learning_rate = 0.125
    first = float(t.model.optimizer.learning_rate)
    t.model.optimizer.learning_rate.assign(t.model.optimizer.learning_rate / 2)
    return first, float(t.model.optimizer.learning_rate)


@_way
def learning_rate_scheduled(t: Things) -> Any:
    rates = [float(t.scheduled.learning_rate)]
    for _ in range(2):
        t.scheduled.apply(t.gradients, t.model.trainable_variables)
        rates.append(float(t.scheduled.learning_rate))
    return rates, t.weights()


_ways(
    iterations=lambda t: [int(t.model.optimizer.iterations), t.model.optimizer.iterations + 1],
    optimizer_variables=lambda t: [tuple(v.shape) for v in t.model.optimizer.variables],
    optimizer_values=lambda t: [v.numpy() for v in t.model.optimizer.variables],
    optimizer_config=lambda t: sorted((k, str(v)) for k, v in t.model.optimizer.get_config().items()),
)


@_way
def applied(t: Things) -> Any:
    t.model.optimizer.apply(t.gradients, t.model.trainable_variables)
    t.model.optimizer.apply(t.gradients)
    return t.weights(), int(t.model.optimizer.iterations), [v.numpy() for v in t.model.optimizer.variables]


@_way
def applied_in_pairs(t: Things) -> Any:
    t.model.optimizer.apply_gradients(zip(t.gradients, t.model.trainable_variables, strict=True))
    return t.weights()


@_way
def applied_tensors(t: Things) -> Any:
    t.model.optimizer.apply([_ops().convert_to_tensor(g) for g in t.gradients], t.model.trainable_variables)
    return t.weights()


@_way
def applied_by_another_optimizer(t: Things) -> Any:
    for _ in range(2):
        t.other.apply(t.gradients, t.model.trainable_variables)
    return t.weights(), int(t.other.iterations), [v.numpy() for v in t.other.variables]


@_way
def another_optimizer_built(t: Things) -> Any:
    t.other.build(t.model.trainable_variables)
    t.other.apply(t.gradients)
    return t.weights(), [tuple(v.shape) for v in t.other.variables]


@_way
def applied_to_a_variable(t: Things) -> Any:
    t.other.apply([_np().ones((2, 2), "float32")], [t.matrix])
    return t.matrix


@_way
def applied_with_a_scaled_loss(t: Things) -> Any:
    t.scaled.build(t.model.trainable_variables)
    scaled = float(t.scaled.scale_loss(_ops().convert_to_tensor(3.0)))
    t.scaled.apply([_ops().convert_to_tensor(g) for g in t.gradients], t.model.trainable_variables)
    return scaled, t.weights(), int(t.scaled.iterations)


@_way
def averaged(t: Things) -> Any:
    for _ in range(2):
        t.averaging.apply(t.gradients, t.model.trainable_variables)
    t.averaging.finalize_variable_values(t.model.trainable_variables)
    return t.weights()


@_way
def accumulated(t: Things) -> Any:
    import keras

    optimizer = keras.optimizers.SGD(0.25, gradient_accumulation_steps=2, clipnorm=1.0)
    seen = []
    for _ in range(3):
        optimizer.apply(t.gradients, t.model.trainable_variables)
        seen.append(t.weights())
    return seen


@_way
def decayed(t: Things) -> Any:
    import keras

    optimizer = keras.optimizers.AdamW(0.25, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.apply(t.gradients, t.model.trainable_variables)
    return t.weights()


@_way
def optimizer_weights_set(t: Things) -> Any:
    t.other.build(t.model.trainable_variables)
    t.other.set_weights([v.numpy() + 1 for v in t.other.variables])
    return [v.numpy() for v in t.other.variables]


@_way
def optimizer_saved(t: Things) -> Any:
    import keras

    t.model.optimizer.apply(t.gradients)
    store: dict[str, Any] = {}
    t.model.optimizer.save_own_variables(store)
    twin = keras.optimizers.Adam(0.1)
    twin.build(t.model.trainable_variables)
    twin.load_own_variables(store)
    return {k: _np().asarray(v) for k, v in store.items()}, [v.numpy() for v in twin.variables]


@_way
def optimizer_stateless(t: Things) -> Any:
    t.other.build(t.model.trainable_variables)
    values = [v.value for v in t.model.trainable_variables]
    gradients = [_ops().convert_to_tensor(g) for g in t.gradients]
    return t.other.stateless_apply([v.value for v in t.other.variables], gradients, values), t.weights()


@_way
def optimizer_methods(t: Things) -> Any:
    t.other.build(t.model.trainable_variables)
    kernel = t.model.trainable_variables[0]
    t.other.assign(kernel, [[1.0], [2.0]])
    t.other.assign_add(kernel, [[1.0], [1.0]])
    t.other.assign_sub(kernel, [[0.5], [0.25]])
    return t.weights()


def seen(result: Any) -> Any:
    """Returns a result in plain Python and NumPy, to send and to compare."""
    import keras
    import numpy as np

    if isinstance(result, dict):
        return {name: seen(part) for name, part in result.items()}
    if isinstance(result, (list, tuple)):
        return [seen(part) for part in result]
    if result is None or isinstance(result, (str, bool, int, float)):
        return result
    if isinstance(result, keras.Variable) or keras.ops.is_tensor(result):
        result = keras.ops.convert_to_numpy(result)
    array = np.asarray(result)
    assert array.dtype != object, result
    return str(array.dtype), array.tolist()


def try_way(name: str, things: Things) -> Any:
    """Returns what one sees of a way, or the error."""
    try:
        return seen(WAYS[name](things))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
