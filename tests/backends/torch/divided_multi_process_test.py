"""Variables that are sharded over workers: training results, memory, reads, writes and checkpoints."""

import numpy as np
import pytest

from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.processes import run, run_plain

# The replicas divide neither the rows nor the last batch.
ROWS, BATCH, LENGTH, WORDS = 23, 8, 6, 12


def _transformer():
    """Returns a model of four blocks with tied embeddings, batch statistics and dropout."""
    import keras
    from keras import layers

    from kdist.context import has_strategy

    keras.utils.set_random_seed(7)
    tokens = keras.Input((LENGTH,), dtype="int32")
    embedding = layers.ReversibleEmbedding(WORDS, 16, tie_weights=True)
    x = embedding(tokens)
    for block in range(4):
        attended = layers.MultiHeadAttention(2, 8)(x, x)
        x = layers.LayerNormalization()(x + attended)
        y = layers.Dense(32, activation="gelu")(x)
        if block == 1:
            y = layers.BatchNormalization(synchronized=has_strategy())(y)
        x = x + layers.Dropout(1e-7)(layers.Dense(16)(y))
    return keras.Model(tokens, embedding(x, reverse=True))


def _trained(strategy):
    import contextlib

    import keras

    generator = np.random.default_rng(3)
    x = generator.integers(0, WORDS, (ROWS, LENGTH))
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = _transformer()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.Adam(0.01, epsilon=1e-2, global_clipnorm=0.5, use_ema=True),
            loss,
            metrics=["accuracy"],
        )
    history = model.fit(x, x[:, ::-1], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    numbers = {name: np.array(values) for name, values in history.history.items()}
    for index, weight in enumerate(model.get_weights()):
        numbers[f"weight {index}"] = weight
    numbers["predictions"] = model.predict(x, batch_size=BATCH, verbose=0)
    numbers["evaluation"] = np.array(model.evaluate(x, x[:, ::-1], batch_size=BATCH, verbose=0))
    return model, numbers


def _held(variables):
    """Returns the bytes of variables on this worker, and the bytes of mirrored variables."""
    from kdist import keras_hooks

    tensors = [keras_hooks.native_value(v) for v in variables]
    held = sum((t.to_local() if hasattr(t, "to_local") else t).untyped_storage().nbytes() for t in tensors)
    return held, sum(t.numel() * t.element_size() for t in tensors)


def _under(kind):
    import kdist

    if kind == "fully":
        strategy = kdist.FullyShardedStrategy(min_size=64)
    else:

        def layout(path, shape):
            if len(shape) != 2:
                return (None,) * len(shape)
            return ("batch" if path.endswith("kernel") else None, "model")

        strategy = kdist.ModelParallelStrategy(layout, mesh={"batch": 2, "model": 2})
    model, numbers = _trained(strategy)
    held, whole = _held([*model.weights, *model.optimizer.variables])
    numbers["held"] = held / whole
    return numbers


def _plain():
    return _trained(None)[1]


@pytest.fixture(scope="module")
def expected():
    return run_plain("torch", _plain)


@pytest.mark.kills(torch_parts_not_weighted="[4-mesh-0.7]")
@pytest.mark.parametrize(
    ("num_workers", "kind", "most"),
    [
        pytest.param(2, "fully", 0.6, marks=pytest.mark.full),
        pytest.param(4, "fully", 0.35),
        pytest.param(4, "mesh", 0.7),
    ],
)
@pytest.mark.in_turn(4)
def test_a_transformer_has_the_numbers_of_one_device_and_each_worker_a_part_of_it(
    expected, num_workers, kind, most
):
    for numbers in run("torch", num_workers, _under, kind):
        assert numbers.pop("held") <= most
        assert numbers.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(numbers[name], value, rtol=1e-5, atol=2e-6, err_msg=name)


def _dense():
    import keras

    import kdist

    strategy = kdist.FullyShardedStrategy(min_size=2)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1, use_bias=False)]
        )
    return strategy, model


def test_whoever_reads_or_writes_a_divided_variable_sees_it_whole():
    def read_and_write():
        import copy

        import keras
        import torch

        strategy, model = _dense()
        kernel = model.layers[0].kernel
        parameter, index = kernel.value, strategy.runtime.worker_index
        assert parameter.to_local().shape == (3, 4) and isinstance(parameter, torch.nn.Parameter)
        assert any(p is parameter for p in model.parameters())
        value = np.arange(24, dtype="float32").reshape(6, 4)
        kernel.assign(value)
        np.testing.assert_array_equal(parameter.to_local().numpy(), value[3 * index : 3 * index + 3])
        for whole in (
            keras.ops.convert_to_numpy(kernel),
            np.array(kernel),
            model.get_weights()[0],
            kernel.numpy(),
            parameter.detach().cpu().numpy(),
            copy.deepcopy(parameter).detach().numpy(),
            (kernel * 1.0).detach().numpy(),
            parameter.to(torch.float64).float().detach().numpy(),
            np.reshape(parameter.storage().tolist(), (6, 4)),
        ):
            np.testing.assert_array_equal(whole, value)
        kernel.assign_add(np.ones((6, 4)))
        np.testing.assert_array_equal(parameter.to_local().numpy(), value[3 * index : 3 * index + 3] + 1)
        with torch.no_grad():
            parameter.mul_(2.0)
            parameter[0] = 5.0
        after = (value + 1) * 2
        after[0] = 5.0
        np.testing.assert_array_equal(np.array(kernel), after)
        x = np.ones((5, 6), "float32")
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(model.layers[0](x)), x @ after + model.get_weights()[1], rtol=1e-6
        )
        # Outside replicas, all workers compute the same gradients, and kdist does not sum them.
        keras.ops.sum(model.layers[0](x)).backward()
        np.testing.assert_allclose(parameter.grad.to_local().numpy(), np.full((3, 4), 5.0))
        assert parameter.shape == (6, 4) and len(parameter) == 6 and "Divided" in repr(parameter)
        return True

    assert run("torch", 2, read_and_write) == [True, True]


@pytest.mark.kills("torch_gathered_variable_outdated", "torch_norm_of_a_part", "torch_slots_not_divided")
@pytest.mark.in_turn(4)
def test_a_loop_of_ones_own_has_the_gradients_of_all_rows():
    def loop():
        import keras

        import kdist

        strategy, model = _dense()
        rng = np.random.default_rng(5)
        x, y = rng.normal(size=(8, 6)).astype("float32"), rng.normal(size=(8, 1)).astype("float32")
        with strategy.scope():
            optimizer = keras.optimizers.Adam(0.1, epsilon=1e-3)  # builds its variables in the replicas
        weights = model.get_weights()
        first = 4 * strategy.runtime.worker_index
        norms = []

        def step(x, y):
            gradient = kdist.value_and_grad(
                lambda: keras.ops.sum((model(x) - keras.ops.convert_to_tensor(y)) ** 2) / 8,
                model.trainable_variables,
            )
            loss, gradients = gradient()
            norms.append(float(keras.ops.norm(gradients[0])))
            before = float(keras.ops.sum(model.layers[0].kernel * 1.0))
            optimizer.apply(gradients, model.trainable_variables)
            assert float(keras.ops.sum(model.layers[0].kernel * 1.0)) != before, "reads an old value"
            return loss

        for _ in range(3):
            losses = strategy.run(step, args=(x[first : first + 4], y[first : first + 4]))
        total = float(strategy.reduce("sum", losses, axis=None))
        held = [v.path for v in optimizer.variables if hasattr(v.value, "to_local")]
        return weights, model.get_weights(), total, norms[0], len(held)

    def oracle(weights):
        import keras

        rng = np.random.default_rng(5)
        x, y = rng.normal(size=(8, 6)).astype("float32"), rng.normal(size=(8, 1)).astype("float32")
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1, use_bias=False)]
        )
        model.set_weights(weights)
        optimizer = keras.optimizers.Adam(0.1, epsilon=1e-3)
        for _ in range(3):
            model.zero_grad()
            loss = keras.ops.mean((model(x) - keras.ops.convert_to_tensor(y)) ** 2)
            loss.backward()
            gradients = [v.value.grad for v in model.trainable_variables]
            if _ == 0:
                norm = float(keras.ops.norm(gradients[0]))
            optimizer.apply(gradients, model.trainable_variables)
        return model.get_weights(), float(loss), norm

    found = run("torch", 2, loop)
    expected, loss, norm = run_plain("torch", oracle, found[0][0])
    for _, weights, total, first_norm, num_held in found:
        assert num_held == 6
        np.testing.assert_allclose([total, first_norm], [loss, norm], rtol=1e-5)
        assert_close(weights, expected)


@pytest.mark.kills(
    "torch_gradient_written_as_its_part", "torch_norm_is_no_plain_tensor", "torch_maximum_of_an_empty_part"
)
def test_metrics_variables_and_collectives_take_gradients_and_their_norms():
    def loop():
        import keras

        import kdist

        strategy = kdist.FullyShardedStrategy(min_size=1)
        with strategy.scope():
            # The second worker has no part of the bias.
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            metric = keras.metrics.Mean()
            total = keras.Variable(np.zeros((6, 1), "float32"), trainable=False)
        weights, bias = model.trainable_variables

        def step():
            loss = kdist.value_and_grad(lambda: keras.ops.sum(model(np.ones((2, 6)))), [weights, bias])
            gradient, of_bias = loss()[1]
            norm = keras.ops.norm(gradient)
            metric.update_state(norm)
            total.assign_add(gradient)
            seen = keras.ops.convert_to_numpy(gradient).tolist()
            everyone = kdist.get_replica_context().all_reduce("mean", norm)
            return norm, everyone, keras.ops.max(keras.ops.abs(of_bias)), seen

        norm, everyone, largest, seen = strategy.run(step)
        mean = strategy.reduce("mean", norm, axis=None)
        numbers = [float(number) for number in (mean, everyone, largest, metric.result())]
        return numbers, seen, keras.ops.convert_to_numpy(total).tolist()

    for numbers, seen, total in run("torch", 2, loop):
        np.testing.assert_allclose(numbers, [4 * 6**0.5, 4 * 6**0.5, 4, 4 * 6**0.5], rtol=1e-6)
        assert seen == total == [[4.0]] * 6


def _model_with_a_module(strategy):
    """Returns a subclassed model with a custom step, a PyTorch module and accumulated gradients."""
    import contextlib

    import keras
    import torch

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(8, activation="tanh")
            self.module = keras.layers.TorchModuleWrapper(torch.nn.Linear(8, 4))
            self.last = keras.layers.Dense(1)

        def call(self, x):
            return self.last(self.module(self.first(x)))

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = keras.ops.mean((self(x) - y) ** 2)
            loss.backward()
            gradients = [v.value.grad for v in self.trainable_variables]
            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    keras.utils.set_random_seed(11)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = Own()
        model(np.zeros((1, 6), "float32"))
        optimizer = keras.optimizers.AdamW(0.05, epsilon=1e-3, clipnorm=0.4, gradient_accumulation_steps=2)
        model.compile(optimizer, loss="mse")
    return model


def _rows():
    generator = np.random.default_rng(2)
    return generator.normal(size=(22, 6)).astype("float32"), generator.normal(size=(22, 1)).astype("float32")


@pytest.mark.in_turn(4)
def test_files_and_checkpoints_go_to_other_numbers_of_workers_and_back(tmp_path):
    def first_half(folder):
        import kdist

        strategy = kdist.FullyShardedStrategy(min_size=2)
        model = _model_with_a_module(strategy)
        model.fit(*_rows(), batch_size=8, epochs=2, shuffle=False, verbose=0)
        model.save_weights(f"{folder}/half.weights.h5")
        assert model.module.module.weight.to_local().shape == (4, 4)
        return kdist.Checkpoint(model=model).save(f"{folder}/half", asynchronous=False)

    def second_half(folder, path, kind):
        import kdist

        strategy = None
        if kind == "sharded":
            strategy = kdist.FullyShardedStrategy(min_size=2)
        elif kind == "mirrored":
            strategy = kdist.MirroredStrategy(["cpu:0", "cpu:1"])
        model = _model_with_a_module(strategy)
        kdist.Checkpoint(model=model).restore(path).assert_consumed()
        restored = model.get_weights()
        model.load_weights(f"{folder}/half.weights.h5")
        assert_equal(restored, model.get_weights())
        history = model.fit(*_rows(), batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights(), history.history["loss"]

    def unbroken():
        model = _model_with_a_module(None)
        model.fit(*_rows(), batch_size=8, epochs=2, shuffle=False, verbose=0)
        history = model.fit(*_rows(), batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights(), history.history["loss"]

    expected, losses = run_plain("torch", unbroken)
    path = run("torch", 2, first_half, str(tmp_path))[0]
    for num_workers, kind in ((1, "mirrored"), (4, "sharded")):
        for weights, losses_again in run("torch", num_workers, second_half, str(tmp_path), path, kind):
            assert_close(weights, expected)
            # kdist averages the loss of a custom step over the rows of all replicas.
            np.testing.assert_allclose(losses_again, losses, rtol=1e-5)


@pytest.mark.kills("torch_whole_variables_kept_for_backward")
def test_a_step_holds_few_whole_variables_at_once():
    def watch(mixed):
        import weakref

        import keras

        import kdist

        strategy = kdist.FullyShardedStrategy()
        storage, alive, most = strategy.runtime.storage, [], [0]
        gather = storage.gather

        def noted(*arguments):
            whole = gather(*arguments)
            alive.append(weakref.ref(whole.untyped_storage()))
            most[0] = max(most[0], sum(s.nbytes() for ref in alive if (s := ref()) is not None))
            return whole

        storage.gather = noted
        keras.config.set_dtype_policy("mixed_bfloat16" if mixed else "float32")
        try:
            with strategy.scope():
                layers = [keras.layers.Dense(64, use_bias=False) for _ in range(24)]
                model = keras.Sequential([keras.Input((64,)), *layers])
                model.compile("adam", "mse")
            x = np.random.default_rng(0).normal(size=(16, 64)).astype("float32")
            model.fit(x, x, batch_size=16, verbose=0)
        finally:
            keras.config.set_dtype_policy("float32")
        return len(alive), most[0] / (64 * 64 * (2 if mixed else 4))

    for mixed in (False, True):
        for num_gathered, most in run("torch", 2, watch, mixed):
            assert num_gathered > 40  # once forward and once backward, except for the last layers
            assert most <= 6  # of 24 layers
