"""Every way in Keras to read, convert, print and assign variables."""

from __future__ import annotations

from typing import Any

from tests.ways.things import Things, np, ops, way, ways

# Reading and converting
ways(
    float_of_a_number=lambda t: float(t.number),
    int_of_a_number=lambda t: int(t.number),
    float_of_an_integer=lambda t: float(t.integer),
    int_of_an_integer=lambda t: int(t.integer),
    round_of_a_number=lambda t: float(round(t.number)),
    float_of_a_matrix_is_refused=lambda t: float(t.matrix),
    bool_is_refused=lambda t: bool(t.number),
    numpy_of_a_number=lambda t: t.number.numpy(),
    numpy_of_a_matrix=lambda t: t.matrix.numpy().tolist(),
    numpy_array=lambda t: np().array(t.matrix),
    numpy_asarray_as_float64=lambda t: np().asarray(t.matrix, "float64"),
    numpy_function=lambda t: np().sum(np().asarray(t.matrix)),
    convert_to_numpy=lambda t: ops().convert_to_numpy(t.matrix),
    convert_to_tensor=lambda t: ops().convert_to_tensor(t.matrix),
    convert_to_float64=lambda t: ops().convert_to_tensor(t.matrix, "float64"),
    value=lambda t: t.matrix.value,
    value_of_a_flag=lambda t: t.flags.value,
    float_of_the_value=lambda t: float(t.number.value),
    cast=lambda t: ops().cast(t.number, "int32"),
    item=lambda t: t.matrix[1, 0],
    row=lambda t: t.matrix[1],
    shape_and_dtype=lambda t: (tuple(t.matrix.shape), t.matrix.ndim, t.matrix.dtype, str(t.integer.dtype)),
    name_and_path=lambda t: (t.number.name, t.number.path),
    trainable=lambda t: (t.number.trainable, setattr(t.number, "trainable", False), t.number.trainable),
    printed=lambda t: (repr(t.number), str(t.integer), f"{float(t.number):.2f}"),
    formatted=lambda t: f"{t.number}",
)

# Arithmetic.
ways(
    sums=lambda t: [t.number + 1, 1 + t.number, t.number - 1, 1 - t.number, t.number + t.integer],
    products=lambda t: [t.matrix * 2, 2 * t.matrix, t.matrix / 4, 4 / t.number, t.matrix @ t.matrix],
    integer_arithmetic=lambda t: [t.integer // 2, t.integer % 2, t.integer**2, 7 // t.integer, 7 % t.integer],
    signs=lambda t: [-t.matrix, +t.matrix, abs(t.matrix)],
    comparisons=lambda t: [t.number == 2.5, t.number != 2.5, t.number < 3, t.number >= 3, t.matrix > 0],
    flags=lambda t: [~t.flags, t.flags & True, t.flags | True, t.flags ^ True],
    operations=lambda t: [ops().add(t.matrix, t.matrix), ops().matmul(t.x, t.matrix), ops().sum(t.matrix)],
    stacked=lambda t: ops().stack([t.number + 0, t.number * 2]),
    where=lambda t: ops().where(t.matrix > 0, t.matrix, t.number),
    slice_update=lambda t: ops().slice_update(t.matrix, (0, 0), np().zeros((1, 2), "float32")),
    cond=lambda t: ops().cond(t.number > 2, lambda: t.number + 1, lambda: t.number - 1),
    while_loop=lambda t: ops().while_loop(lambda i: i < t.integer, lambda i: (i + 1,), (0,))[0],
)


# Assigning.
@way
def assigned(t: Things) -> Any:
    t.number.assign(4)
    t.matrix.assign([[1, 2], [3, 4]])
    t.integer.assign(np().int64(9))
    return t.number, t.matrix, t.integer


@way
def assigned_from_a_variable(t: Things) -> Any:
    t.number.assign(t.integer)
    t.matrix.assign(t.matrix + t.number)
    return t.number, t.matrix


@way
def assigned_by_addition(t: Things) -> Any:
    t.number.assign_add(1.5)
    t.integer.assign_sub(1)
    t.matrix.assign_add(t.matrix)
    return t.number, t.integer, t.matrix


ways(
    what_assign_returns=lambda t: [t.number.assign(4), t.number.assign_add(1), t.number.assign_sub(3)],
    a_wrong_shape_is_refused=lambda t: t.matrix.assign([1.0, 2.0, 3.0]),
)


@way
def copied(t: Things) -> Any:
    import keras

    twin = keras.Variable(t.matrix)
    twin.assign(twin * 2)
    return twin, t.matrix


@way
def created_from_an_initializer(t: Things) -> Any:
    import keras

    made = keras.Variable(keras.initializers.Constant(3.0), shape=(2,), dtype="float32")
    return made, made + 1


@way
def constrained_and_regularised(t: Things) -> Any:
    import keras

    t.matrix.constraint = keras.constraints.NonNeg()
    t.matrix.regularizer = keras.regularizers.L2(0.5)
    return t.matrix.constraint(t.matrix), t.matrix.regularizer(t.matrix)


@way
def stateless_scope(t: Things) -> Any:
    import keras

    with keras.StatelessScope([(t.number, ops().convert_to_tensor(9.0))]) as scope:
        t.number.assign(t.number + 1)
        t.integer.assign_add(1)
        inside = float(t.number.value), int(t.integer.value)
    return inside, t.number, scope.get_current_value(t.number), scope.get_current_value(t.integer)


@way
def random_numbers(t: Things) -> Any:
    import keras

    first = keras.random.normal((2,), seed=t.seeds)
    return first, keras.random.uniform((2,), seed=t.seeds), t.seeds.state, t.seeds.next()
