"""Metrics inside `Strategy.run` cover the rows of all replicas."""

from __future__ import annotations

import numpy as np

from tests.helpers.processes import strategy
from tests.loops.clusters import each_cluster, number_of, on_workers, per_replica


def in_worker_metrics(num_replicas, predictions, labels, weights):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        mean, weighted = keras.metrics.Mean(), keras.metrics.Mean()
        error = keras.metrics.MeanSquaredError()
        accuracy = keras.metrics.BinaryAccuracy()
        auc = keras.metrics.AUC(num_thresholds=50)
        scalar = keras.metrics.Mean()

    def fn(batch):
        p, y, w = batch
        mean.update_state(p)
        weighted.update_state(p[:, 0], w)
        for metric in (error, accuracy, auc):
            metric.update_state(y, p)
        scalar.update_state(keras.ops.mean(p))

    def batches():
        for start in range(0, len(labels), 8):
            yield tuple(a[start : start + 8] for a in (predictions, labels, weights))

    metrics = {
        "mean": mean,
        "weighted": weighted,
        "error": error,
        "accuracy": accuracy,
        "auc": auc,
        "scalar": scalar,
    }
    found = []
    for _ in range(2):
        for metric in metrics.values():
            metric.reset_state()
        for batch in s.experimental_distribute_dataset(batches):
            assert s.run(fn, args=(batch,)) is None
        found.append({name: float(metric.result()) for name, metric in metrics.items()})
    auc_alone = keras.metrics.AUC(num_thresholds=50)
    auc_alone.update_state(labels, predictions)
    return found, float(auc_alone.result())


@each_cluster
def test_metrics_are_those_of_all_rows(backend, num_workers, num_replicas):
    random = np.random.RandomState(3)
    predictions = random.rand(20, 1).astype("float32")
    labels = random.randint(0, 2, (20, 1)).astype("float32")
    weights = random.rand(20).astype("float32")
    # There are two batches of 8 rows and one of 4 rows: each replica's scalar counts once.
    parts = [
        part
        for start in (0, 8, 16)
        for part in np.array_split(predictions[start : start + 8].astype("float64"), num_replicas)
    ]
    expected = {
        "mean": predictions.mean(dtype="float64"),
        "weighted": np.average(predictions.astype("float64")[:, 0], weights=weights),
        "error": np.mean((predictions.astype("float64") - labels) ** 2),
        "accuracy": np.mean((predictions > 0.5) == labels),
        "scalar": np.mean([part.mean() for part in parts]),
    }
    for epochs, auc in on_workers(
        backend, num_workers, num_replicas, in_worker_metrics, predictions, labels, weights
    ):
        for epoch in epochs:
            for name, value in (expected | {"auc": auc}).items():
                np.testing.assert_allclose(epoch[name], value, rtol=1e-5, err_msg=name)


def in_worker_reset(num_replicas):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        metric = keras.metrics.Sum()
        total = keras.Variable(np.float32(5), trainable=False, aggregation="sum")
    values = per_replica(s, lambda i: np.float32([i + 1]))
    s.run(metric.update_state, args=(values,))

    def start_anew(x):
        metric.reset_state()
        metric.update_state(x)
        total.assign(x[0])

    s.run(start_anew, args=(values,))
    return float(metric.result()), number_of(total)


@each_cluster
def test_a_sum_may_be_set_in_a_replica(backend, num_workers, num_replicas):
    expected = sum(range(1, num_replicas + 1))
    for found in on_workers(backend, num_workers, num_replicas, in_worker_reset):
        assert found == (expected, expected)  # as with `tf.distribute`, the sum of the assigned values
