"""A small job for the workers of these tests, with everything that a checkpoint contains."""

from __future__ import annotations

import os

import numpy as np

from tests.helpers.processes import strategy


def make_model(width=5, seed=0):
    """Returns a compiled model with slots, moving statistics, seeds and metrics, under the pool's strategy."""
    import keras

    keras.utils.set_random_seed(seed)
    with strategy().scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.Dropout(0.3),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
    return model


def data():
    x = np.random.RandomState(0).rand(18, 3).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def values_of(model):
    """Returns all variables of a model as arrays: weights, seeds, optimizer and metrics."""
    import keras

    variables = model.variables + model.optimizer.variables + model.metrics_variables
    return [keras.ops.convert_to_numpy(v).copy() for v in variables]


def distributed():
    x, _ = data()
    return strategy().experimental_distribute_dataset([x[i : i + 6] for i in range(0, 18, 6)])


def save_and_restore(folder, paths):
    """Saves in the middle of an epoch if a directory is given; then restores checkpoints one by one.

    Returns the path and the values of the save, and the values after each restore.
    """
    import keras

    import kdist

    model, dataset = make_model(seed=1), distributed()
    next(iter(dataset))
    saves = kdist.Checkpoint(
        model=model,
        optimizer=model.optimizer,
        dataset=dataset,
        epoch=3,
        best=(0.5, None),
        table={"rows": np.arange(6, dtype=">i4").reshape(2, 3), "note": "half"},
    )
    saved = None

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            nonlocal saved
            if batch == 1 and folder is not None:
                saved = (saves.save(folder), values_of(self.model))

    model.fit(*data(), batch_size=6, verbose=0, callbacks=[Save()])
    if folder is not None:
        assert kdist.latest_checkpoint(folder) == saved[0]  # the end of fit waits
        assert [name for name in os.listdir(folder) if name.startswith(".")] == []
    restored = [_restore(path, model) for path in ([saved[0]] if saved else []) + paths]
    return saved, restored


def _restore(path, model):
    import kdist

    with strategy().scope():
        for variable in model.variables + model.optimizer.variables + model.metrics_variables:
            variable.assign(np.zeros(variable.shape))
    dataset = distributed()
    # The optimizer belongs to the model, although it was also saved under a separate name.
    checkpoint = kdist.Checkpoint(model=model, dataset=dataset)
    checkpoint.restore(path).assert_consumed()
    assert (checkpoint.epoch, checkpoint.best, checkpoint.save_counter) == (3, (0.5, None), 1)
    assert checkpoint.table["rows"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert dataset.get_state() == {"epoch": 0, "step": 1, "pipelines": 1}
    return values_of(model)
