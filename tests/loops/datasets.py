"""Rows, gradient descent on them by hand, and distributed datasets of every kind that contain them."""

from __future__ import annotations

import numpy as np

from tests.helpers.data import loader, py_dataset

ROWS = 13
BATCH = 4  # the last batch has one row
STEPS = 4
LEARNING_RATE = 0.1


def rows():
    rng = np.random.default_rng(7)
    return rng.normal(size=(ROWS, 3)).astype("float32"), rng.normal(size=ROWS).astype("float32")


def by_hand(num_steps):
    """Returns the weights after some steps of gradient descent over the global batches, and the losses."""
    x, y = rows()
    w, losses = np.zeros(3, "float32"), []
    for step in range(num_steps):
        start = step % STEPS * BATCH
        part, target = x[start : start + BATCH], y[start : start + BATCH]
        error = part @ w - target
        losses.append(np.mean(error**2) / 2)
        w = w - LEARNING_RATE * error @ part / len(part)
    return w, losses


# Distributed datasets ---------------------------------------------------------------------------------------


def dataset_of(kind, s):
    """Returns the rows as a distributed dataset of the given kind."""
    x, y = rows()
    starts = range(0, ROWS, BATCH)
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in starts]
    if kind == "tf.data":
        import tensorflow as tf

        return s.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    if kind == "generator":
        return s.experimental_distribute_dataset(lambda: iter(batches))
    if kind == "DataLoader":
        return s.experimental_distribute_dataset(loader(x, y, batch_size=BATCH))
    if kind == "PyDataset":
        return s.experimental_distribute_dataset(py_dataset(batches))
    assert kind == "function"

    def dataset_fn(context):
        # Per-replica batches: halves or thirds of the global batches, in the order of the replicas.
        parts = [np.array_split(np.arange(i, min(i + BATCH, ROWS)), s.num_replicas_in_sync) for i in starts]
        number = s.num_replicas_in_sync // context.num_input_pipelines
        first = context.input_pipeline_id * number
        mine = [rows for part in parts for rows in part[first : first + number]]
        return [(x[rows], y[rows]) for rows in mine if len(rows)]

    return s.distribute_datasets_from_function(dataset_fn)


def still_reading(before):
    """Returns names of prefetch threads that are not in `before` and do not end within 5 seconds."""
    import threading

    threads = [t for t in set(threading.enumerate()) - before if "prefetch" in t.name]
    for thread in threads:
        thread.join(5.0)
    return [t.name for t in threads if t.is_alive()]
