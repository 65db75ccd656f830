"""Other loops than supervised learning: reinforcement, accumulation, and calls that vary."""

from __future__ import annotations

import numpy as np

import kdist
from tests.helpers.processes import strategy
from tests.loops.clusters import each_cluster, number_of, numpy_of, on_workers, per_replica

# Reinforcement learning: act on all replicas, then learn from the rewards -----------------------------------

PLAYS, ROUNDS, RATE = 12, 4, 0.3
START = np.array([[0.1, -0.2], [0.3, 0.0]])


def play(logits, observations, chance):
    """Simulates an environment: chance selects the action, and action 1 pays the first observation."""
    shifted = logits - logits.max(1, keepdims=True)
    probability = np.exp(shifted[:, 1]) / np.exp(shifted).sum(1)
    actions = (chance < probability).astype("int32")
    rewards = np.where(actions == 1, observations[:, 0], 0.5)
    return actions, (rewards - rewards.mean()).astype("float32")


def in_worker_reinforcement(num_replicas, observations, chances):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        policy = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2, use_bias=False)])
        policy.set_weights([START])
        optimizer = keras.optimizers.SGD(RATE)

    def share(array):
        size = PLAYS // num_replicas
        return per_replica(s, lambda i: array[i * size : (i + 1) * size])

    @kdist.function
    def act(observed):
        return s.gather(s.run(policy, args=(observed,)), axis=0)

    @kdist.function
    def learn(observed, actions, advantages):
        def step(observed, actions, advantages):
            def loss_fn():
                log_probability = keras.ops.log_softmax(policy(observed, training=True))
                chosen = keras.ops.sum(log_probability * keras.ops.one_hot(actions, 2), axis=1)
                return -keras.ops.sum(chosen * advantages) / PLAYS

            _, gradients = kdist.value_and_grad(loss_fn, policy.trainable_variables)()
            optimizer.apply(gradients, policy.trainable_variables)

        s.run(step, args=(observed, actions, advantages))

    taken = []
    for number, (observed, chance) in enumerate(zip(observations, chances, strict=True), start=1):
        actions, advantages = play(numpy_of(act(share(observed))), observed, chance)
        taken.append(actions)
        for _ in range(number):  # each round has more steps
            learn(share(observed), share(actions), share(advantages))
    return taken, numpy_of(policy.get_weights()[0]), number_of(optimizer.iterations)


def reinforcement_by_hand(observations, chances):
    w, taken = START, []
    for number, (observed, chance) in enumerate(zip(observations, chances, strict=True), start=1):
        actions, advantages = play(observed @ w, observed, chance)
        taken.append(actions)
        for _ in range(number):
            exp = np.exp(observed @ w)
            error = (exp / exp.sum(1, keepdims=True) - np.eye(2)[actions]) * advantages[:, None]
            w = w - RATE * observed.T @ error / PLAYS
    return taken, w


@each_cluster
def test_a_reinforcement_loop_acts_and_learns(backend, num_workers, num_replicas):
    random = np.random.RandomState(5)
    observations = random.randn(ROUNDS, PLAYS, 2).astype("float32")
    chances = random.rand(ROUNDS, PLAYS)
    taken, weights = reinforcement_by_hand(observations, chances)
    for found, found_weights, steps in on_workers(
        backend, num_workers, num_replicas, in_worker_reinforcement, observations, chances
    ):
        np.testing.assert_array_equal(found, taken)
        np.testing.assert_allclose(found_weights, weights, rtol=1e-5)
        assert steps == 1 + 2 + 3 + 4


# Gradients over several calls -------------------------------------------------------------------------------

X = np.random.RandomState(6).randn(24, 2).astype("float32")
Y = np.random.RandomState(7).randn(24, 1).astype("float32")
MICRO = 8  # rows per batch, not divisible by 3 replicas


def in_worker_accumulation(num_replicas):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        models = [keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]) for _ in range(2)]
        optimizers = [keras.optimizers.SGD(0.1, momentum=0.5) for _ in models]
        for model in models:
            model.set_weights([np.array([[1.0], [-1.0]]), np.array([0.5])])
        kept = [
            keras.Variable(np.zeros(v.shape), dtype="float32", trainable=False, aggregation="sum")
            for v in models[1].trainable_variables
        ]

    def gradients_of(model, batch):
        def loss_fn():
            return keras.ops.sum(keras.ops.square(model(batch[0]) - batch[1])) / len(X)

        return kdist.value_and_grad(loss_fn, model.trainable_variables)()[1]

    def first(batch):
        return gradients_of(models[0], batch)

    def add(totals, batch):
        return [t + g for t, g in zip(totals, gradients_of(models[0], batch), strict=True)]

    def apply(totals):
        optimizers[0].apply(totals, models[0].trainable_variables)

    def keep(batch):  # the variables contain sums over the replicas when `run` ends
        for variable, gradient in zip(kept, gradients_of(models[1], batch), strict=True):
            variable.assign_add(gradient)

    def apply_kept():
        variables = models[1].trainable_variables
        optimizers[1].apply([variable / num_replicas for variable in kept], variables)

    def batches():
        for start in range(0, len(X), MICRO):
            yield X[start : start + MICRO], Y[start : start + MICRO]

    dataset = s.experimental_distribute_dataset(batches)
    for _ in range(2):
        totals = None
        for batch in dataset:
            totals = s.run(first, args=(batch,)) if totals is None else s.run(add, args=(totals, batch))
            s.run(keep, args=(batch,))
        s.run(apply, args=(totals,))
        s.run(apply_kept)
        for variable in kept:
            variable.assign(keras.ops.zeros(variable.shape))
    return [numpy_of(model.get_weights()) for model in models], numpy_of([v.value for v in kept])


@each_cluster
def test_gradients_accumulate_over_several_calls(backend, num_workers, num_replicas):
    x = np.concatenate([X, np.ones((24, 1))], axis=1).astype("float64")
    w, velocity = np.array([[1.0], [-1.0], [0.5]]), 0
    for _ in range(2):
        velocity = 0.5 * velocity - 0.1 * 2 * x.T @ (x @ w - Y) / len(X)
        w = w + velocity
    for models, kept in on_workers(backend, num_workers, num_replicas, in_worker_accumulation):
        for kernel, bias in models:
            np.testing.assert_allclose(np.concatenate([kernel[:, 0], bias]), w[:, 0], rtol=1e-5)
        for variable in kept:
            np.testing.assert_allclose(variable, 0, atol=1e-6)


# Models that change between calls ---------------------------------------------------------------------------


def in_worker_between_calls(num_replicas):
    """Mixes custom steps, `fit` and `set_weights` on one model; returns weights and predictions."""
    import keras

    s = strategy(num_replicas)
    with s.scope():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1, use_bias=False)])
        optimizer = keras.optimizers.SGD(0.1)
        model.compile(optimizer=keras.optimizers.SGD(0.3), loss="mse")  # for 6 rows, the loss is Σ w² / 6
    x, y = np.eye(6, dtype="float32"), np.zeros((6, 1), "float32")

    def step(x):
        def loss_fn():
            return keras.ops.sum(keras.ops.square(model(x))) / 2

        loss, gradients = kdist.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def custom():
        for batch in s.experimental_distribute_dataset(lambda: iter([x, x])):
            s.run(step, args=(batch,))
        return numpy_of(model.get_weights()[0])[:, 0]

    model.set_weights([np.arange(1.0, 7).reshape(6, 1)])
    found = [custom()]
    model.fit(x, y, batch_size=6, epochs=1, verbose=0)
    found.append(numpy_of(model.get_weights()[0])[:, 0])
    found.append(custom())
    model.set_weights([np.arange(3.0, 9).reshape(6, 1)])
    found.append(custom())
    optimizer.learning_rate = 0.2
    found.append(custom())
    found.append(numpy_of(model.predict(x, verbose=0))[:, 0])
    return found


@each_cluster
def test_custom_steps_and_fit_share_a_model(backend, num_workers, num_replicas):
    # The loss is Σ w² / 2, so each step with rate r multiplies all weights by 1 - r.
    start, again = np.arange(1.0, 7), np.arange(3.0, 9)
    expected = [start * 0.9**2, start * 0.9**3, start * 0.9**5, again * 0.9**2, again * 0.9**2 * 0.8**2]
    expected.append(expected[-1])
    for found in on_workers(backend, num_workers, num_replicas, in_worker_between_calls):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
