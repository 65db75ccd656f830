"""Two workers and two servers train on digits, with `fit` and with a custom loop, while tasks are killed."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest

from tests.coordinator.clusters import cluster, facts
from tests.helpers.processes import each_backend, each_backend_in_twelve_turns

_MODEL = """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    strategy = kdist.ParameterServerStrategy(
        variable_partitioner=kdist.experimental.partitioners.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((64,)),
                keras.layers.Dense(48, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.1),
                keras.layers.Dense(10),
            ]
        )
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss=loss_fn, metrics=["accuracy"])
"""
_LOOP = """
        optimizer = keras.optimizers.Adam(0.01)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        counter = keras.Variable(0, dtype="int32", trainable=False, aggregation="sum")
    coordinator = kdist.coordinator.ClusterCoordinator(strategy)

    def dataset_fn(context):
        if keras.backend.backend() == "tensorflow":  # whose workers run no Python
            import tensorflow as tf

            return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2000).repeat().batch(32)

        def batches():
            rng = np.random.default_rng()
            while True:
                rows = rng.permutation(len(x))[:32]
                yield x[rows], y[rows]

        return batches

    def per_worker_dataset_fn():
        return strategy.distribute_datasets_from_function(dataset_fn)

    @kdist.function
    def step(iterator):
        def replica_fn(features, labels):
            def loss():
                logits = model(features, training=True)
                return loss_fn(labels, logits), logits

            (value, logits), grads = kdist.value_and_grad(loss, model.trainable_variables, has_aux=True)()
            optimizer.apply(grads, model.trainable_variables)
            accuracy.update_state(labels, logits)
            counter.assign_add(1)
            return value

        return strategy.run(replica_fn, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))
"""


@pytest.mark.kills(
    servers_gradients_count_twice="[jax]",
    servers_half_of_each_batch_lost="[torch]",
    tensorflow_servers_gradients_count_twice="[tensorflow]",
)
@each_backend
def test_fit_takes_each_step_once_although_a_worker_is_lost(backend: str, tmp_path: Path) -> None:
    """The gradients do not depend on the weights, and all sums are exact, so the steps' order has no effect."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (47 * 32, 4)).astype("float32")
    y = rng.integers(-3, 4, (47 * 32, 1)).astype("float32")
    np.savez(tmp_path / "data.npz", x=x, y=y)
    source = """
    from tests.helpers.scripts import wait_until

    strategy = kdist.ParameterServerStrategy(
        variable_partitioner=kdist.experimental.partitioners.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        label = keras.metrics.MeanMetricWrapper(lambda labels, outputs: labels, name="label")
        model.compile(
            keras.optimizers.SGD(0.25), loss=lambda labels, outputs: labels * outputs, metrics=[label]
        )

    class Tell(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            print("epoch", epoch, flush=True)
            wait_until(lambda: epoch != 4 or os.path.exists("killed"))

    data = np.load("data.npz")
    history = model.fit(data["x"], data["y"], batch_size=32, epochs=6, verbose=0, callbacks=[Tell()])
    tell(
        weights=[weight.ravel().tolist() for weight in model.get_weights()],
        labels=history.history["label"],
        loss=model.evaluate(data["x"], data["y"], verbose=0, return_dict=True)["loss"],
        iterations=int(model.optimizer.iterations),
    )
    """
    with cluster(backend, tmp_path) as tasks:
        chief = tasks.coordinate(source)
        chief.wait_for("epoch 1")
        tasks.kill("worker", 0)
        (tmp_path / "killed").touch()
        assert chief.wait() == 0, chief.stderr()
        (found,) = facts(chief)
    # The loss is the mean of y * (x @ kernel + bias), and training uses each row six times.
    kernel = (-0.25 * 6 / 32) * (x * y).sum(axis=0)
    bias = (-0.25 * 6 / 32) * y.sum(axis=0)
    assert found["weights"] == [kernel.tolist(), bias.tolist()]
    assert found["iterations"] == 6 * 47
    assert found["labels"] == pytest.approx([y.mean()] * 6, rel=1e-5)
    assert found["loss"] == pytest.approx(np.mean(y[:, 0] * (x @ kernel + bias)), rel=1e-5)


@pytest.mark.kills(servers_worker_restarted_while_idle="[torch]")
@each_backend_in_twelve_turns
def test_a_loop_trains_and_a_killed_worker_is_replaced(backend: str, tmp_path: Path) -> None:
    source = f"""
    {_MODEL}{_LOOP}
    for epoch in range(4):
        accuracy.reset_state()
        for i in range(60):
            result = coordinator.schedule(step, args=(iterator,))
            if epoch == 2 and i == 20:
                print("kill", flush=True)
        coordinator.join()
        tell(
            accuracy=float(accuracy.result()), steps=int(np.array(counter)),
            iterations=int(np.array(optimizer.iterations)), loss=float(coordinator.fetch(result)),
        )
    print("replace", flush=True)
    steps, seen = 240, set()

    def index():
        time.sleep(0.01)
        return kdist.coordinator.experimental_get_current_worker_index()

    while len(seen) < 2:
        seen |= set(map(int, coordinator.fetch([coordinator.schedule(index) for _ in range(8)])))
    for _ in range(20):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    assert coordinator.done()
    tell(steps=int(np.array(counter)))
    print("idle", flush=True)
    from tests.helpers.scripts import wait_until

    wait_until(lambda: os.path.exists("restarted"))
    for _ in range(20):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    tell(steps=int(np.array(counter)))
    """
    with cluster(backend, tmp_path) as tasks:
        chief = tasks.coordinate(source)
        chief.wait_for("kill")
        tasks.kill("worker", 0)
        chief.wait_for("replace")
        tasks.start_task("worker", 0)
        chief.wait_for("idle")
        for index in range(2):  # no call to them fails
            tasks.kill("worker", index)
            tasks.start_task("worker", index)
            tasks.tasks["worker", index].wait_for("ready")
        (tmp_path / "restarted").touch()
        assert chief.wait() == 0, chief.stderr()
        *epochs, replaced, last = facts(chief)
    assert [one["steps"] for one in epochs] == [one["iterations"] for one in epochs] == [60, 120, 180, 240]
    assert epochs[-1]["accuracy"] > 0.95
    assert [replaced["steps"], last["steps"]] == [260, 280]


@pytest.mark.kills(
    servers_end_of_a_workers_dataset="[torch]",
    servers_take_an_error_for_the_end="[torch]",
    servers_take_any_end_for_the_datasets_end="[tensorflow]",
)
@each_backend
def test_fit_takes_datasets_of_the_workers_own(backend: str, tmp_path: Path) -> None:
    source = f"""
    {_MODEL}
    def dataset_fn(context=None):
        import tensorflow as tf

        index = kdist.coordinator.experimental_get_current_worker_index()
        rows = tf.data.Dataset.from_tensor_slices((x, y)).shard(2, tf.cast(index, tf.int64))
        return rows.shuffle(1000).repeat().batch(32)

    coordinator = kdist.coordinator.ClusterCoordinator(strategy)
    datasets = coordinator.create_per_worker_dataset(
        lambda: strategy.distribute_datasets_from_function(dataset_fn)
    )
    history = model.fit(
        datasets, steps_per_epoch=40, epochs=3, validation_data=(x, y), validation_freq=3, verbose=0
    )
    held = coordinator.schedule(kdist.function(lambda: [keras.ops.convert_to_tensor(w) for w in model.weights]))
    kernel, bias, gamma, beta, mean, variance, kernel_2, bias_2 = map(np.array, coordinator.fetch(held))
    hidden = gamma * (np.maximum(x @ kernel + bias, 0) - mean) / np.sqrt(variance + 1e-3) + beta
    logits = hidden @ kernel_2 + bias_2
    losses = np.log(np.sum(np.exp(logits), axis=1)) - logits[np.arange(len(y)), y]
    try:
        model.fit(datasets)
    except ValueError as error:
        tell(error=str(error))
    iterations = int(np.array(model.optimizer.iterations))
    try:  # each worker has 4 batches
        few = coordinator.create_per_worker_dataset(
            lambda: strategy.distribute_datasets_from_function(lambda context: dataset_fn().take(4))
        )
        model.fit(few, steps_per_epoch=400, verbose=0)
    except kdist.errors.DatasetError as error:
        tell(ended=str(error))

    class Buggy(keras.Sequential):
        def train_step(self, *args):
            if keras.backend.backend() == "tensorflow":
                import tensorflow as tf

                return {{"loss": next(iter(tf.data.Dataset.range(0)))}}
            return next(iter(()))

    with strategy.scope():
        buggy = Buggy([keras.layers.Dense(1)])
        buggy.compile("sgd", "mse")
    try:
        buggy.fit(datasets, steps_per_epoch=1, verbose=0)
    except Exception as error:
        tell(error=repr(error))
    tell(
        iterations=iterations,
        by_hand=[float(np.mean(np.argmax(logits, axis=1) == y)), float(np.mean(losses))],
        **{{k: v[-1] for k, v in history.history.items()}},
    )
    """
    with cluster(backend, tmp_path) as tasks:
        chief = tasks.coordinate(source).finish()
        error, ended, bug, found = facts(chief)
    assert ("OutOfRangeError" if backend == "tensorflow" else "StopIteration") in str(bug["error"])
    assert "steps_per_epoch" in str(error["error"])
    assert re.match(
        r"The dataset of a worker ended before the last step of `fit`.\s+Received: steps=[4-8]\n",
        ended["ended"],
    )
    assert found["iterations"] == 120
    # Compare the values that the chief has read with the values on the servers.
    assert [found["val_accuracy"], found["val_loss"]] == pytest.approx(found["by_hand"], rel=2e-3)


@pytest.mark.kills(servers_threads_run_at_the_end="[torch]")
@each_backend
def test_a_lost_server_ends_the_job_with_its_name(backend: str, tmp_path: Path) -> None:
    source = f"""
    import atexit, threading

    # Called after what the strategy does at the end: a thread in the engine would abort the process.
    atexit.register(lambda: tell(threads=[t.name for t in threading.enumerate() if "kdist worker" in t.name]))
    {_MODEL}
    print("ready", flush=True)
    model.fit(x, y, batch_size=32, epochs=1000, verbose=0)
    """
    with cluster(backend, tmp_path) as tasks:
        chief = tasks.coordinate(source)
        chief.wait_for("ready")
        time.sleep(2.0)
        began = time.monotonic()
        tasks.kill("ps", 1)
        assert chief.wait(20) == 1, chief.stderr()
        assert time.monotonic() - began < 20
        assert f"ps 1 ({tasks.spec['ps'][1]})" in chief.stderr()
        # If the chief itself calls the server first, its error is `PeerLost`, a `WorkerLostError`.
        assert re.search("WorkerLostError|PeerLost", chief.stderr()) and "BackupAndRestore" in chief.stderr()
        assert facts(chief) == [{"threads": []}]
        assert "Channel closed" not in chief.stderr()  # from a thread of gRPC that outlives its channel
        # The other tasks wait for the next job.
        assert tasks.tasks["worker", 0].exit_code is None


@pytest.mark.kills(tensorflow_wrong_logs_hang="[tensorflow]")
@each_backend
def test_an_error_of_a_function_is_raised_once(backend: str, tmp_path: Path) -> None:
    source = f"""
    {_MODEL}
    coordinator = kdist.coordinator.ClusterCoordinator(strategy)

    def fails():
        raise ValueError("an error of its own")

    coordinator.schedule(fails)
    try:
        coordinator.join()
    except ValueError as error:
        tell(error=str(error))
    result = coordinator.schedule(lambda: 7)
    coordinator.join()
    tell(result=int(coordinator.fetch(result)))
    # As in `fit`, if a custom `train_step` returns no logs.
    strategy.coordination.schedule(lambda: 7, (), {{}}, {{}}.update)
    try:
        coordinator.join()
    except TypeError as error:
        tell(error=str(error))
    """
    with cluster(backend, tmp_path, 1, 1) as tasks:
        chief = tasks.coordinate(source).finish()
        error, result, wrong_logs = facts(chief)
    assert "an error of its own" in str(error["error"])
    assert result == {"result": 7}
    assert "not iterable" in str(wrong_logs["error"])


@pytest.mark.kills(servers_group_with_a_restarted_worker="[torch]")
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_synchronous_job_names_a_worker_that_was_restarted(backend: str, tmp_path: Path) -> None:
    source = """
    strategy = kdist.ParameterServerStrategy(synchronous=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile("sgd", "mse")
    try:
        tell(loss=model.fit(np.ones((6, 2)), np.ones((6, 1)), verbose=0).history["loss"])
    except RuntimeError as error:
        tell(error=str(error))
    """
    with cluster(backend, tmp_path, num_ps=1) as tasks:
        assert facts(tasks.coordinate(source).finish()) == [{"loss": [1.0]}]
        tasks.kill("worker", 1)
        tasks.start_task("worker", 1)
        (found,) = facts(tasks.coordinate(source).finish())
        assert f"restarted=[worker 1 ({tasks.spec['worker'][1]})]" in str(found["error"])
        assert "Restart all workers" in str(found["error"])
