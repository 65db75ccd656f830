"""The script of the demo: trains a small convolutional network on handwritten digits.

It is a normal user script, for one device (`--plain`, without kdist) or for several workers (`kdist run`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

BATCH_SIZE = 128
NUM_TEST = 297


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns scikit-learn's 1,797 handwritten digits, 8 × 8 pixels: 1,500 to train on and 297 to test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.RandomState(0).permutation(len(data.images))
    images = (data.images[order, ..., None] / 16).astype("float32")
    labels = data.target[order].astype("int32")
    return (images[:-NUM_TEST], labels[:-NUM_TEST]), (images[-NUM_TEST:], labels[-NUM_TEST:])


def build() -> Any:
    """Returns the compiled network."""
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="tanh"),
            keras.layers.Conv2D(64, 3, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.002),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(strategy: Any, epochs: int, verbose: int) -> dict[str, Any]:
    """Trains the network and returns the results that the demo compares."""
    import keras

    class Clock(keras.callbacks.Callback):
        """Measures the duration of each epoch. The first epoch includes compilation."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.started = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            durations.append(time.perf_counter() - self.started)

    durations: list[float] = []
    (x, y), (x_test, y_test) = digits()
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = build()
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs, verbose=verbose, callbacks=[Clock()])
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    steps = -(-len(x) // BATCH_SIZE)
    return {
        "loss": loss,
        "accuracy": accuracy,
        "steps_per_second": steps / float(np.median(durations[1:] or durations)),
        "weights": [w.tolist() for w in model.get_weights()],
    }


def main() -> None:
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="without kdist, on one device")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    strategy = None
    if not options.plain:
        import kdist

        strategy = kdist.MultiWorkerMirroredStrategy()
    # A progress bar in a terminal, otherwise one line per epoch.
    result = train(strategy, options.epochs, verbose=1 if sys.stdout.isatty() else 2)
    if strategy is None or strategy.runtime.worker_index == 0:
        options.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
