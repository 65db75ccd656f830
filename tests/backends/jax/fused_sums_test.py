"""Steps on the rows of each device give the results of the global batch, with few collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import kdist
from tests.backends.where import in_worker

if in_worker:
    import jax
    import keras
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh

    from kdist.backends.jax import collectives, steps
    from kdist.backends.jax.fused_sums import NoRule, over_rows

DEVICES = 3
ROWS = 18


def _sums(step: Callable[..., Any], state: Any, *batches: Any) -> tuple[Any, list[int]]:
    """Returns the results of a step on rows, and the number of elements in each sum."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("batch",))
    sizes, original = [], lax.psum

    def psum(array: Any, axis: str) -> Any:
        sizes.append(array.size)
        return original(array, axis)

    is_loop = len(batches) > 1
    data = jax.tree.map(lambda *leaves: np.stack(leaves), *batches) if is_loop else batches[0]
    with mock.patch.object(lax, "psum", psum):
        program = jax.jit(lambda state, data: over_rows(step, mesh, None, 0, state, data, is_loop))
        outputs, (_, state, _) = program(state, data)
    return (outputs, state), sizes


def _check(function: Callable[..., Any], *arrays: Any, sums: int | None = 1) -> None:
    """Compares the result of a function on the rows of each device with its result on the global batch."""
    weight = np.random.default_rng(1).normal(size=(6, 6)).astype("float32")

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        return function(state, *batch), state

    expected = jax.jit(step)(weight, arrays)
    found, sizes = _sums(step, weight, arrays)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        scale = float(np.abs(np.asarray(other, "float64")).max())  # sums of large numbers can be small
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5 * scale)
    if sums is not None:
        assert len(sizes) == sums, f"{len(sizes)} sums, of {sizes} elements"


def _x(*shape: int) -> Any:
    return np.random.default_rng(2).normal(size=shape or (ROWS, 6)).astype("float32")


def _ids(*shape: int, highest: int = 6) -> Any:
    return np.random.default_rng(3).integers(0, highest, shape or (ROWS,)).astype("int32")


def _mean_of_squares(value: Any) -> Any:
    return (value * jnp.arange(value.size).reshape(value.shape)).sum()


# The loss weights all elements of a result differently, so that swapped rows change it.
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda w, x: x @ w,
    "product_on_the_right": lambda w, x: w @ x.T,
    "product_of_batches": lambda w, x: jnp.einsum("ni,nj->nij", x, x @ w),
    "two_axes_merged": lambda w, x: (x.reshape(ROWS, 3, 2) @ w[:2]).reshape(ROWS * 3, 6) @ w,
    "reversed": lambda w, x: (x @ w)[:, ::-1],
    "squeezed": lambda w, x: jnp.squeeze((x @ w)[None, :, None], (0, 2)),
    "concatenated": lambda w, x: jnp.concatenate([x, x @ w, jnp.ones((ROWS, 1))], 1),
    "stacked": lambda w, x: jnp.stack([x, jnp.broadcast_to(w[0], x.shape)], 1),
    "padded": lambda w, x: jnp.pad(x, ((0, 0), (1, 2))),
    "sliced": lambda w, x: x[:, 1:5:2] + lax.dynamic_slice(x, (0, 1), (ROWS, 2)),
    "column": lambda w, x: x[:, 2],
    "column_replaced": lambda w, x: lax.dynamic_update_slice(x, x[:, :2] * 2, (0, 3)),
    "transposed": lambda w, x: jnp.transpose(x.reshape(ROWS, 2, 3), (2, 0, 1)),
    "merged_axes_of_others": lambda w, x: jnp.transpose(x.reshape(ROWS, 2, 3), (2, 0, 1)).reshape(
        3, 2 * ROWS
    ),
    "sorted": lambda w, x: jnp.sort(x @ w, 1),
    "highest": lambda w, x: lax.top_k(x, 3)[0],
    "position": lambda w, x: jnp.argmax(x, 1).astype("float32"),
    "running_sum": lambda w, x: jnp.cumsum(x, 1) + jnp.flip(jnp.cumprod(x, 1), 1),
    "softmax": lambda w, x: jax.nn.softmax(x @ w),
    "other_rows": lambda w, x: jnp.where(x > 0, x, jnp.arange(ROWS * 6.0).reshape(ROWS, 6)),
    "taken_along": lambda w, x: jnp.take_along_axis(x, jnp.argsort(x, 1)[:, :2], 1),
    "columns_in_order": lambda w, x: x[:, jnp.array([3, 1, 5])],
    "looked_up": lambda w, x: w[(jnp.abs(x[:, :2]) * 3).astype("int32") % 6],
    "clipped": lambda w, x: jnp.clip(x, -0.5, w.max()),
    "over_time": lambda w, x: lax.scan(
        lambda c, t: (jnp.tanh(c @ w + t[:, None]), c), jnp.zeros((ROWS, 6)), x.T
    )[1],
}


@pytest.mark.kills("jax_fused_sums_swap_rows", "jax_rows_of_reshaped_arrays_mixed")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_and_gradients_are_right(name: str) -> None:
    function = FUNCTIONS[name]

    def loss(w: Any, x: Any) -> Any:
        return _mean_of_squares(function(w, x))

    _check(lambda w, x: jax.value_and_grad(loss)(w, x), _x())


@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_convolutions_and_windows(strides: int, padding: str) -> None:
    def loss(w: Any, x: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        kernel = w.reshape(3, 3, 1, 4)
        x = lax.conv_general_dilated(x, kernel, (strides, strides), padding, dimension_numbers=numbers)
        x = lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
        return _mean_of_squares(lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"))

    _check(lambda w, x: jax.value_and_grad(loss)(w, x), _x(ROWS, 9, 9, 1))


def test_sums_wait_for_each_other_only_where_they_must() -> None:
    def function(w: Any, x: Any) -> Any:
        mean = x.mean(0)  # first sum, together with the other independent sum
        return (jnp.square(x - mean) @ w).sum(0), jnp.abs(x).sum()

    _check(function, _x(), sums=2)


@pytest.mark.kills("jax_sum_of_parts_rounded")
def test_what_is_not_linear_needs_the_whole_sum() -> None:
    _check(lambda w, x: jnp.square(x.sum(0)) + x.sum(0) * x.sum(0) + 1 / x.sum(0), _x())
    _check(lambda w, x: x.sum(0) + w[0], _x())  # the term that all devices share counts once
    _check(lambda w, x: jnp.pad(x.sum(0), 1, constant_values=2.0), _x())
    _check(lambda w, x: x.sum(0).astype("bfloat16"), 1000 * _x())


@pytest.mark.kills("jax_scattered_operand_counts_for_each_device")
def test_scattered_rows_count_once() -> None:
    _check(lambda w, ids, x: w.at[ids].add(x), _ids(), _x())
    _check(lambda w, ids: jnp.bincount(ids, length=6).astype("float32"), _ids())


def test_all_devices_get_small_arrays_whole() -> None:
    _check(lambda w, x: x.max(), _x(), sums=1)
    _check(lambda w, x: jnp.sort(x[:, 0]), _x(), sums=1)
    _check(lambda w, ids: (ids > 2).all(), _ids(), sums=1)
    _check(lambda w, x: x.T, _x(), sums=1)


def test_numbers_of_integers_are_exact() -> None:
    _check(lambda w, ids: (ids.sum(), (ids == 3).sum()), _ids(highest=2**24 + 1), sums=1)


@pytest.mark.kills("jax_parts_of_an_integer_divided")
def test_integers_are_divided_after_their_sum() -> None:
    # Each of the three devices has a sum of 5, and 15 // 2 is not 3 * (5 // 2).
    ids = np.tile(np.array([0, 1, 2, 1, 1, 0], "int32"), DEVICES)
    _check(lambda w, ids: (lax.div(ids.sum(), 2), ids.sum() // 2, ids.sum() / 2), ids)


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 3), (ROWS, 2, 5)])
@pytest.mark.kills("jax_rows_draw_the_first_bits")
def test_each_device_draws_its_rows_of_the_random_numbers(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, "float32")
    draws = (jax.random.uniform, lambda key, shape: jax.random.bernoulli(key, 0.4, shape), jax.random.normal)
    for draw in draws:
        _check(lambda w, x, draw=draw: _mean_of_squares(x * draw(jax.random.key(7), shape)), x)


def test_several_batches_are_a_loop() -> None:
    def step(state: Any, x: Any) -> tuple[Any, Any]:
        state = state + jnp.tanh(x.T @ x) * 0.1
        return state.sum(), state

    batches, state = _x(3, ROWS, 6), np.zeros((6, 6), "float32")
    (output, found), sizes = _sums(step, state, *batches)
    for batch in batches:
        expected, state = step(state, batch)
    np.testing.assert_allclose(found, state, rtol=1e-5)
    assert float(output) == pytest.approx(float(expected), rel=1e-5)
    assert sizes == [36]


@pytest.mark.kills("jax_sums_in_any_order")
def test_sums_in_memory_wait_for_the_previous_sum() -> None:
    def callback(function: Any, shapes: Any) -> Callable[..., Any]:
        return lambda turn, *arrays: (turn + 1, *arrays)

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        return jnp.square(x - x.mean(0)).sum(), state + x.sum()

    mesh, memory = Mesh(np.array(jax.devices()[:DEVICES]), ("batch",)), mock.Mock()
    with mock.patch.object(collectives, "buffer_callback", callback):
        for batches, sums in ((1, 2), (3, 6)):
            is_loop = batches > 1
            program = jax.jit(
                lambda turn, s, x, loop=is_loop: over_rows(step, mesh, memory, turn, s, x, loop)
            )
            data = np.stack([_x()] * batches) if is_loop else _x()
            _, (turn, _, _) = program(np.int32(0), np.float32(0), data)
            assert int(turn) == sums


def test_an_operation_without_a_rule_is_named() -> None:
    def step(state: Any, x: Any) -> tuple[Any, Any]:
        return lax.while_loop(lambda v: (v < 9).all(), lambda v: v + 1, x), state

    with pytest.raises(NoRule, match=r"an array of shape \(18, 4096\)"):
        _sums(step, np.zeros(1), _x(ROWS, 4096))
    with pytest.raises(NoRule, match="side effects"):
        _sums(lambda s, x: (jax.debug.print("{}", x), s), np.zeros(1), _x())


def _train(is_fused: bool, layers: list[Any], x: Any, **arguments: Any) -> list[Any]:
    keras.utils.set_random_seed(3)
    strategy = kdist.MirroredStrategy([f"cpu:{i}" for i in range(DEVICES)])
    strategy.runtime.fuses_sums = is_fused
    with strategy.scope():
        model = keras.models.clone_model(keras.Sequential(layers))
        model.compile("sgd", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"], **arguments)
    weights = np.random.default_rng(4).random(len(x))
    history = model.fit(x, _ids(len(x), highest=3), ROWS, epochs=2, verbose=0, sample_weight=weights).history
    return [*history.values(), *model.get_weights()]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("kind", ["normalization", "dropout", "convolution", "recurrent", "attention"])
@pytest.mark.parametrize("arguments", [{}, {"steps_per_execution": 2}])
def test_models_train_as_with_xla_s_sums(kind: str, arguments: dict[str, Any]) -> None:
    layers = keras.layers
    images, words = _x(66, 8, 8, 1), _ids(66, 5)
    inner, x = {
        "normalization": ([layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Flatten()], images),
        "dropout": ([layers.Flatten(), layers.Dropout(0.3), layers.Dense(8, "relu")], images),
        "convolution": ([layers.Conv2D(4, 3), layers.MaxPooling2D(), layers.Flatten()], images),
        "recurrent": ([layers.Embedding(6, 4, mask_zero=True), layers.GRU(4)], words),
        "attention": ([layers.Embedding(6, 4), layers.LayerNormalization(), layers.GlobalMaxPool1D()], words),
    }[kind]
    parts = [keras.Input(x.shape[1:]), *inner, layers.Dense(3, "softmax")]
    with mock.patch.object(steps.logs.logger, "info") as info:
        found = _train(True, parts, x, **arguments)
    assert "leaves the sums" not in str(info.call_args_list)
    for one, other in zip(found, _train(False, parts, x, **arguments), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)
