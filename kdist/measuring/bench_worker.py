"""The script of each worker of `kdist bench`: trains for some rounds and reports the times."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import kdist
from kdist.cluster import discover
from kdist.errors import InvalidArgumentError
from kdist.measuring import collectives
from kdist.measuring.native import native
from kdist.named import call_function
from kdist.tracing import Meter

_ANY_LENGTH = 16  # for dimensions without a fixed size


def make_model() -> Any:
    """Returns a small compiled convolutional network for images of 28 × 28 pixels."""
    model = keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def made_up(model: Any, rows: int) -> tuple[Any, Any]:
    """Returns random inputs and targets for a model.

    Raises:
        InvalidArgumentError: If the model does not define its inputs and outputs.
    """
    if not (getattr(model, "inputs", None) and getattr(model, "outputs", None)):
        raise InvalidArgumentError(
            "The model does not define its inputs, so kdist cannot create data for it.",
            received={"model": type(model).__name__},
            hint="Start the model with keras.Input(shape), or return (model, x, y) from the function.",
        )
    random = np.random.RandomState(0)

    def draw(tensor: Any, most: int) -> np.ndarray:
        shape = (rows, *(length or _ANY_LENGTH for length in tensor.shape[1:]))
        kind = keras.backend.standardize_dtype(tensor.dtype)
        if kind.startswith(("int", "uint")):
            return random.randint(0, most, shape).astype(kind)
        return random.random_sample(shape).astype("float32")

    def targets(tensor: Any) -> np.ndarray:
        loss = model.loss if isinstance(model.loss, str) else type(model.loss).__name__
        if "sparse" in loss.lower():
            return random.randint(0, tensor.shape[-1], (rows, *tensor.shape[1:-1]))
        return draw(tensor, 2)

    inputs = [draw(tensor, 2) for tensor in model.inputs]
    outputs = [targets(tensor) for tensor in model.outputs]
    return tuple(found[0] if len(found) == 1 else found for found in (inputs, outputs))  # type: ignore[return-value]


class Rounds(keras.callbacks.Callback):
    """Stores the totals of each epoch, except the first one, which compiles and warms up."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter
        self.totals: list[dict[str, Any]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Excludes the time between epochs from the measurement."""
        self.meter.take()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        totals = self.meter.take()
        if epoch > 0:
            self.totals.append(totals.as_json())


def prepare(scope: Any, function: str | None, batch_size: int, steps: int) -> tuple[Any, Any, Any]:
    """Returns a compiled model that was created in a scope, and its data."""
    keras.utils.set_random_seed(0)
    with scope:
        made = call_function(function) if function else make_model()
    rows = steps * batch_size
    if isinstance(made, tuple) and len(made) != 3:
        raise InvalidArgumentError(
            "The function of --model returned neither a compiled model nor (model, x, y).",
            received={"model": function, "returned": tuple(type(part).__name__ for part in made)},
            hint="End the function with: return model, x, y",
        )
    model, x, y = made if isinstance(made, tuple) else (made, *made_up(made, rows))
    if not getattr(model, "compiled", False):
        raise InvalidArgumentError(
            "The function of --model returned a model that is not compiled.",
            received={"model": function},
            hint='Compile it in the function, for example: model.compile("adam", "mse")',
        )
    found = len(keras.tree.flatten(x)[0])
    rows = min(rows, found // batch_size * batch_size) or found  # whole batches, as the contenders train
    return model, *keras.tree.map_structure(lambda array: array[:rows], (x, y))


def measure_contender(
    name: str, function: str | None, batch_size: int, steps: int, rounds: int
) -> dict[str, Any]:
    """Trains the model without a strategy. Returns the seconds of each round, and the loss of the last round."""

    def made() -> tuple[Any, Any, Any]:
        return prepare(contextlib.nullcontext(), function, batch_size, steps)

    times: list[float] = []  # of the begin and the end of each round

    def note(*_: object) -> None:
        times.append(time.perf_counter())

    if name == "keras":
        (model, x, y), clock = made(), keras.callbacks.LambdaCallback(on_epoch_begin=note, on_epoch_end=note)
        told = {"batch_size": batch_size, "shuffle": False, "verbose": 0, "callbacks": [clock]}
        loss = model.fit(x, y, epochs=1 + rounds, **told).history["loss"][-1]
    else:
        epoch = native().train(name, made, batch_size)
        for _ in range(1 + rounds):
            note()
            loss = epoch()
            note()
    seconds = [end - begin for begin, end in zip(times[::2], times[1::2], strict=True)]
    return {"seconds": seconds[1:], "loss": loss}  # the first round compiles


def measure(strategy: Any, function: str | None, batch_size: int, steps: int, rounds: int) -> dict[str, Any]:
    """Trains the model, and returns the results of all workers."""
    model, x, y = prepare(strategy.scope(), function, batch_size, steps)
    with Meter() as meter:
        kept = Rounds(meter)
        told = {"batch_size": batch_size, "shuffle": False, "verbose": 0, "callbacks": [kept]}
        losses = model.fit(x, y, epochs=1 + rounds, **told).history["loss"]
    everyone = kdist.all_gather_object(json.dumps(kept.totals), strategy)
    runtime = strategy.runtime
    return {
        "about": {
            "backend": keras.backend.backend(),
            "num_workers": runtime.num_workers,
            "num_replicas": runtime.num_replicas,
            "device": runtime.devices[0],
            "exchanges_in_programs": runtime.exchanges_in_programs,
            "loss": losses[-1],
        },
        # Grouped by round, not by worker.
        "rounds": [list(workers) for workers in zip(*map(json.loads, everyone), strict=True)],
    }


def main() -> None:
    """Runs the module, which `kdist bench` starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--kind", required=True)
    for name in ("--batch-size", "--steps", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    sizes = (options.model, options.batch_size, options.steps, options.rounds)
    if options.kind == "collectives":
        result = collectives.measure(options.rounds)
    elif options.kind == "kdist":
        result = measure(kdist.MultiWorkerMirroredStrategy(), *sizes)
    else:
        result = measure_contender(options.kind, *sizes)
    if discover().is_chief:
        options.result.write_text(json.dumps(result))
    if options.kind not in ("collectives", "kdist"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # after DDP, threads of gloo sometimes abort the process at its normal end


if __name__ == "__main__":
    main()
