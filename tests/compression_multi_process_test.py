"""Compression of gradients to 16 bits between workers: the number of bytes sent, and the resulting weights."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import kdist
from kdist.errors import WorkerMismatchError
from kdist.experimental import CommunicationOptions
from tests.helpers.processes import each_backend, run, start_pool

FEATURES, UNITS, EPOCHS = 16, 64, 4
NUMBERS = FEATURES * UNITS + UNITS + 2 * FEATURES  # elements in the model's weights
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
DTYPES = pytest.mark.parametrize("compression", ["float16", "bfloat16"])


def _strategy(compression: str | None, implementation: str = "AUTO") -> Any:
    options = CommunicationOptions(implementation=implementation, compression=compression)
    return kdist.MultiWorkerMirroredStrategy(communication_options=options)


@contextlib.contextmanager
def sent_tensors() -> Iterator[list[tuple[str, int]]]:
    """Records the dtype and size of all floating-point tensors that kdist sends to be summed over workers."""
    import keras

    from kdist.communication.shared_memory import SharedMemory

    backend, found = keras.backend.backend(), []

    def note(dtype: Any, size: Any) -> None:
        name = keras.backend.standardize_dtype(dtype)
        if "float" in name:
            found.append((name, int(size or 0)))

    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, see: Any) -> None:
            original = getattr(owner, name)

            def noted(*args: Any, **kwargs: Any) -> Any:
                see(*args, **kwargs)
                return original(*args, **kwargs)

            stack.enter_context(mock.patch.object(owner, name, noted))

        def see_arrays(memory: Any, arrays: Any, *_: Any) -> None:
            for array in arrays:
                note(array.dtype.name, array.size)

        if backend != "tensorflow":  # also sums other values in shared memory
            patch(SharedMemory, "start", see_arrays)
        if backend == "torch":
            import torch.distributed as dist

            patch(dist, "all_reduce", lambda tensor, **_: note(tensor.dtype, tensor.numel()))
            patch(
                dist,
                "reduce_scatter",
                lambda total, parts, **_: note(total.dtype, total.numel() * len(parts)),
            )
        if backend == "jax":
            from kdist.backends.jax.steps import JaxSteps

            run_fused = JaxSteps._run_fused

            def run_and_note(self: Any, data: Any, is_loop: bool) -> Any:
                state = (np.int32(0), self._state, [])
                if self.runtime.memory is None and not found:
                    # XLA may choose a different dtype than the program, so this reads the compiled program.
                    text = self._compiled(True, is_loop).lower(state, data).compile().as_text()
                    for dtype, size in re.findall(r"= (\w+)\[(\d*)\]\S* all-(?:reduce|gather)\(", text):
                        name = {"u16": self.runtime.compression, "f32": "float32"}.get(dtype, dtype)
                        found.append((name, int(size or 1)))
                return run_fused(self, data, is_loop)

            stack.enter_context(mock.patch.object(JaxSteps, "_run_fused", run_and_note))
        if backend == "tensorflow":
            import tensorflow
            from tensorflow.python.ops import collective_ops

            from kdist.backends.tensorflow.collectives import SumsOfGraphs

            def see_tensors(sums: Any, tensors: Any) -> None:
                for tensor in [] if tensorflow.executing_eagerly() else tensors:
                    note(tensor.dtype, tensor.shape.num_elements())

            # Runs during TensorFlow's trace: once for all steps.
            patch(SumsOfGraphs, "__call__", see_tensors)
            for name in ("all_reduce_v2", "all_gather_v2"):
                patch(collective_ops, name, lambda t, *_, **__: note(t.dtype, t.shape.num_elements()))
        yield found


def _rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    x = random.normal(size=(12, FEATURES)).astype("float32")
    return x, random.normal(size=(12, UNITS)).astype("float32")


def _model() -> Any:
    import keras

    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(UNITS, kernel_regularizer="l2")]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    kernel = np.random.default_rng(6).normal(size=(FEATURES, UNITS)).astype("float32")
    model.layers[-1].set_weights([kernel, np.zeros(UNITS, "float32")])
    return model


def trained(compression: str | None, implementation: str) -> Any:
    """Returns the sent tensors, the losses, the moving statistics, and the weights before and after."""
    with _strategy(compression, implementation).scope():
        model = _model()
    before = model.layers[-1].get_weights()[0]
    with sent_tensors() as sent:
        history = model.fit(*_rows(), batch_size=12, epochs=EPOCHS, shuffle=False, verbose=0)
    statistics = [variable.numpy() for variable in model.non_trainable_variables]
    return sent, history.history["loss"], statistics, before, model.get_weights()


def _check(steps: int, compression: str, plain: Any, compressed: Any) -> None:
    """Compares the results of all workers with and without compression."""
    for (sent, losses, statistics, before, weights), (less, *others) in zip(plain, compressed, strict=True):
        assert {dtype for dtype, _ in sent} == {"float32"}
        padding = sum(size for dtype, size in less if dtype == compression) - steps * NUMBERS
        assert 0 <= padding < len(plain)
        # Losses and statistics, with the gradients of the statistics, are not compressed.
        assert {dtype for dtype, _ in less} == {compression, "float32"}
        rest = sum(size for dtype, size in less if dtype == "float32")
        assert sum(size for _, size in sent) == rest + steps * NUMBERS and rest < steps * NUMBERS / 4
        other_losses, other_statistics, _, other_weights = others
        assert losses[0] == other_losses[0]
        for mine, theirs in zip(statistics, other_statistics, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        difference = np.abs(weights[4] - other_weights[4]).max() / np.abs(weights[4] - before).max()
        assert EPSILON[compression] / 100 < difference < EPSILON[compression] * 2
    for other in compressed[1:]:
        for mine, theirs in zip(compressed[0][-1], other[-1], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.kills(torch_gradients_not_compressed="[torch", jax_regularized_gradients_not_compressed="[jax")
@DTYPES
@each_backend
def test_gradients_travel_in_16_bits(backend: str, compression: str) -> None:
    plain = run(backend, 2, trained, None, "AUTO")
    compressed = run(backend, 2, trained, compression, "AUTO")
    _check(1 if backend == "tensorflow" else EPOCHS, compression, plain, compressed)


@pytest.mark.kills(jax_compressed_sums_in_32_bits="[jax-bfloat16]")
@DTYPES
@each_backend
@pytest.mark.in_turn(6)
def test_gradients_travel_in_16_bits_through_sockets(backend: str, compression: str) -> None:
    pool = start_pool(3, backend)
    try:
        plain, compressed = (pool.run(trained, dtype, "RING") for dtype in (None, compression))
    finally:
        pool.close()
    _check(EPOCHS if backend == "torch" else 1, compression, plain, compressed)


def large() -> Any:
    """Returns a weight after a step with large gradients: in `fit`, and in custom loops with equal and unequal shapes.

    The loops also return a second element, whose gradient is not exact in 16 bits, and a sum from user code.
    """
    import keras

    strategy = _strategy("float16")
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(1.0), "mse")
    model.set_weights([np.zeros((1, 1), "float32")])
    # The means of the workers' gradients are 120000 and 8000: the first is larger than the largest float16.
    y = np.array([[-60000.0]] * 2 + [[-4000.0]] * 2, "float32")
    model.fit(np.ones((4, 1), "float32"), y, batch_size=4, shuffle=False, verbose=0)
    results = []
    for counts in ([2, 2], [2, 1]):
        with strategy.scope():
            weight = keras.Variable(np.zeros(2, "float32"))
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([weight])

        def step(rows: Any, weight: Any = weight, optimizer: Any = optimizer) -> Any:
            loss = kdist.value_and_grad(lambda: keras.ops.sum(weight * keras.ops.sum(rows, 0)), [weight])
            _, gradients = loss()
            optimizer.apply(gradients, [weight])
            third = keras.ops.convert_to_tensor(np.float32(1 / 3))
            return kdist.get_replica_context().all_reduce("SUM", third)

        def rows_of(context: Any, counts: Any = counts) -> np.ndarray:
            index = context.replica_id_in_sync_group
            total = np.array([60000 - 10000 * index, 1 / 3], "float32")
            return np.stack([total / counts[index]] * counts[index])

        rows = strategy.experimental_distribute_values_from_function(rows_of)
        total = strategy.experimental_local_results(strategy.run(step, args=(rows,)))[0]
        results.append((keras.ops.convert_to_numpy(weight), float(total)))

    def sum_empty() -> Any:
        context = kdist.get_replica_context()
        context.all_gather(keras.ops.ones((1,)), axis=0)  # so that XLA sums on JAX, and not shared memory
        return context.all_reduce("SUM", keras.ops.ones((0, 2), "float16"))

    assert tuple(strategy.experimental_local_results(strategy.run(sum_empty))[0].shape) == (0, 2)
    return model.get_weights()[0].item(), results


@pytest.mark.kills("compressed_sums_not_divided", jax_empty_sums_in_16_bits="[jax]")
@each_backend
def test_large_gradients_do_not_overflow(backend: str) -> None:
    (fitted, results), other = run(backend, 2, large)
    assert fitted == pytest.approx(-64000, rel=EPSILON["float16"] * 2)
    for weight, total in results:
        np.testing.assert_allclose(weight, [-110000, -2 / 3], rtol=EPSILON["float16"] * 2)
        assert abs(weight[1] + 2 / 3) > 1e-5, "gradients of loops travel in 16 bits"
        assert total == np.float32(2 / 3), "values of the user do not"
    assert repr(other) == repr((fitted, results))


def overflowed(compression: str | None) -> Any:
    """Returns the loss scale after a step whose scaled gradients are too large for float16, and the weights."""
    import keras

    with _strategy(compression).scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(UNITS)])
        inner = keras.optimizers.SGD(0.5)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**24)
        model.compile(optimizer, "mse")
    before = model.get_weights()
    model.fit(*_rows(), batch_size=12, verbose=0)
    changed = [bool(np.any(old != new)) for old, new in zip(before, model.get_weights(), strict=True)]
    return float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)), changed


@pytest.mark.kills(jax_loss_scale_of_uncompressed_gradients="[jax]")
@each_backend
def test_loss_scaling_notices_an_overflow(backend: str) -> None:
    assert run(backend, 2, overflowed, None) == [(2.0**24, [True, True])] * 2
    assert run(backend, 2, overflowed, "float16") == [(2.0**23, [False, False])] * 2


def looked_up(compression: str | None) -> Any:
    """Returns the dtypes of the tensors sent for the gradient of an embedding, and its weights."""
    import keras

    with _strategy(compression).scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(50, 8), keras.layers.Flatten()])
        model.compile(keras.optimizers.SGD(5.0), "mse")
    x, y = np.arange(36).reshape(12, 3) % 7, np.random.default_rng(1).normal(size=(12, 24))
    with sent_tensors() as sent:
        model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    return {dtype for dtype, size in sent if size > 8 or not size}, model.get_weights()[0]


@pytest.mark.kills(tensorflow_rows_not_compressed="[tensorflow")
@DTYPES
@each_backend
def test_gradients_of_embeddings_travel_in_16_bits(backend: str, compression: str) -> None:
    (_, plain), _ = run(backend, 2, looked_up, None)
    (dtypes, first), (_, second) = run(backend, 2, looked_up, compression)
    # TensorFlow gathers rows with the bits of both types as float16. The number of rows is unknown during the trace.
    assert dtypes == {"float16" if backend == "tensorflow" else compression}
    np.testing.assert_array_equal(first, second)
    assert 1e-6 < np.abs(first - plain).max() < EPSILON[compression] * 2


def sharded(compression: str | None) -> Any:
    """Returns the dtypes of the tensors sent for sharded variables, the warnings, and the weights."""
    from kdist.communication import options as communication

    communication._ignored.clear()
    options = CommunicationOptions(compression=compression)
    with kdist.FullyShardedStrategy(communication_options=options).scope():
        model = _model()
    with logged() as lines, sent_tensors() as sent:
        model.fit(*_rows(), batch_size=12, shuffle=False, verbose=0)
    return {dtype for dtype, size in sent if size > 100}, lines, model.get_weights()[4]


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    logger, handler, lines = logging.getLogger("kdist"), logging.Handler(), []
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@pytest.mark.kills(torch_shards_not_compressed="[torch]")
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_gradients_of_sharded_variables(backend: str) -> None:
    _, _, plain = run(backend, 2, sharded, None)[0]
    for index, (dtypes, logged, weights) in enumerate(run(backend, 2, sharded, "bfloat16")):
        if backend == "jax":
            assert ["compression='bfloat16' in fit has no effect" in line for line in logged] == [True] * (
                index == 0
            )
            np.testing.assert_array_equal(weights, plain)
        else:
            assert dtypes == {"bfloat16"} and not logged
            assert 1e-6 < np.abs(weights - plain).max() < 2.0**-8


def divided_by_xla() -> Any:
    """Returns the warnings from steps that XLA divides or that are not compiled."""
    import keras

    from kdist.communication import options as communication

    communication._ignored.clear()

    def over_rows(y: Any, predicted: Any) -> Any:
        last, _ = keras.ops.scan(lambda carry, row: (carry + row, row), keras.ops.zeros(UNITS), predicted - y)
        return keras.ops.square(last)

    strategy = _strategy("float16")
    x, y = _rows()
    with logged() as lines:
        for rows, options in ((12, {}), (11, {}), (12, {"loss": over_rows}), (12, {"run_eagerly": True})):
            with strategy.scope():
                model = _model()
                model.compile(**{"optimizer": "sgd", "loss": "mse"} | options)
            model.fit(x[:rows], y[:rows], batch_size=12, verbose=0)
            model.evaluate(x[:rows], y[:rows], batch_size=12, verbose=0)
            lines.append("")
    return lines


@pytest.mark.kills("jax_uncompressed_batches_not_mentioned")
def test_jax_says_where_compression_has_no_effect() -> None:
    first, second = run("jax", 2, divided_by_xla)
    assert second == [""] * 4
    said = [re.sub(r"\(.*?\)", "", line).partition(" has no effect")[0] for line in first]
    assert said == [
        "",
        "compression='float16' of batches that the replicas do not divide",
        "",
        "compression='float16' of a step of fit",
        "",
        "compression='float16' of uncompiled steps",
        "",
    ]


def mismatched() -> str:
    import os

    try:
        _strategy("float16" if os.environ["RANK"] == "1" else None)
    except WorkerMismatchError as error:
        return str(error)
    return ""


@pytest.mark.kills("compression_not_compared")
@each_backend
def test_workers_must_compress_equally(backend: str) -> None:
    for message in run(backend, 2, mismatched):
        assert "do not have the same communication options: they differ in compression" in message
        assert "worker_0=None, worker_1='float16'" in message


def one_worker() -> Any:
    return _strategy("float16").runtime.compression


@each_backend
def test_one_worker_does_not_compress(backend: str) -> None:
    assert run(backend, 1, one_worker) == [None]
