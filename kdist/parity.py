"""Trains a user's model on one device and under a strategy, and compares the results."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kdist.errors import InvalidArgumentError, check_function, check_whole

# Sums over other groups of rows differ in the last digits of float32; the effect of an error is far larger.
RTOL, ATOL = 1e-5, 2e-6
# Training can enlarge these differences: Adam divides by gradients, and relu has a kink.
_GROWN = 1e-2
_MOST = 8
_ARGUMENTS = ("x", "y", "sample_weight")


@dataclasses.dataclass(frozen=True)
class Training:
    """The results of a run."""

    title: str  # the strategy and the backend, for messages
    num_replicas: int
    numbers: dict[str, Any]  # all values to compare, in the order in which the run created them
    suspects: tuple[str, ...]  # reasons why the model may give different results on several replicas


def train(
    make_model: Callable[[], Any],
    data: Any,
    make_strategy: Callable[[], Any] | None,
    epochs: int,
    seed: int,
    fit_arguments: Mapping[str, Any],
) -> Training:
    """Trains a model and predicts; see `kdist.testing.assert_parity`. Without `make_strategy`, uses plain Keras."""
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    strategy = None if make_strategy is None else make_strategy()
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = make_model()
    if not getattr(model, "compiled", False):
        raise InvalidArgumentError(
            "`make_model` did not return a compiled Keras model.",
            received={"make_model()": model},
            hint='Compile the model and return it, for example:\nmodel.compile("adam", "mse"); return model',
        )
    if strategy is None and _strategy_of(model) is not None:
        raise InvalidArgumentError(
            "`make_model` creates the model in the scope of a strategy, so it cannot train on one device.",
            received={"strategy": type(_strategy_of(model)).__name__},
            hint="Create the model without a strategy, and pass a function that creates the strategy as `strategy`.",
        )
    numbers = {f"before training, {name}": value for name, value in _weights(model)}
    history = model.fit(**_arguments(data), epochs=epochs, **{"verbose": 0, **fit_arguments}).history
    numbers |= {f"history, {name}": value for name, value in history.items()}
    numbers |= _weights(model)
    options = {"batch_size": fit_arguments.get("batch_size"), "steps": fit_arguments.get("steps_per_epoch")}
    outputs = keras.tree.flatten(model.predict(_arguments(data)["x"], verbose=0, **options))
    numbers |= {f"predictions {i}" if len(outputs) > 1 else "predictions": o for i, o in enumerate(outputs)}
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    title = "one device" if strategy is None else f"{type(strategy).__name__} with {replicas} replicas"
    return Training(f"{title} on {keras.backend.backend()}", replicas, numbers, tuple(_suspects(model)))


def _strategy_of(model: Any) -> Any:
    # Not imported here, because a process without a strategy must run plain Keras.
    hooks = sys.modules.get("kdist.keras_hooks")
    return None if hooks is None else hooks.strategy_of(model)


def _arguments(data: Any) -> dict[str, Any]:
    given = data() if callable(data) else data
    if isinstance(given, (tuple, list)):
        return dict(zip(_ARGUMENTS, given, strict=False))
    return {"x": given}


def _weights(model: Any) -> Iterator[tuple[str, Any]]:
    for index, (variable, value) in enumerate(zip(model.weights, model.get_weights(), strict=True)):
        yield f"weight {index} ({variable.path})", value


def _suspects(model: Any) -> Iterator[str]:
    import keras

    for layer in _layers(model, set()):
        name = f"{type(layer).__name__} {layer.name!r}"
        if getattr(layer, "rate", 1) and isinstance(
            getattr(layer, "seed_generator", None), keras.random.SeedGenerator
        ):
            yield f"{name} uses random numbers, which differ between replicas. Remove it for the comparison."
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized:
            yield (
                f"On TensorFlow and PyTorch, {name} computes the statistics of each replica's rows. "
                "Pass synchronized=True."
            )


def _layers(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the layers in a value, which may be a layer itself, and in their attributes."""
    import keras

    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, keras.Layer):
        yield value
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _layers(item, seen)


def check_options(epochs: int, rtol: float, atol: float, strategy: Any) -> None:
    """Checks the options of a comparison.

    Raises:
        InvalidArgumentError: If there is nothing to compare, or `strategy` is not a function.
    """
    check_whole("epochs", epochs, "Pass the number of epochs, for example: epochs=2")
    if not (rtol >= 0 and atol >= 0):
        raise InvalidArgumentError(
            "`rtol` or `atol` is not a number of at least 0.",
            received={"rtol": rtol, "atol": atol},
            hint=f"Pass tolerances, for example: rtol={RTOL:g}, atol={ATOL:g}",
        )
    if strategy is not None:
        hint = "Pass a function that creates the strategy, because each worker creates its own:\n"
        hint += 'strategy=lambda: kdist.MirroredStrategy(["cpu:0", "cpu:1"])'
        check_function("strategy", strategy, hint)


def differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any], rtol: float = RTOL, atol: float = ATOL
) -> dict[str, str]:
    """Returns a text for each value that differs, by name. NaN differs from everything."""
    import numpy as np

    found = dict.fromkeys(expected.keys() ^ actual.keys(), "only one of the two runs has this value")
    for name in [name for name in expected if name in actual]:
        # Some dtypes can be neither subtracted nor printed.
        one, many = (np.asarray(np.asarray(run[name]), "float64") for run in (expected, actual))
        if one.shape != many.shape:
            found[name] = f"shape {one.shape} on one device, {many.shape} with the strategy"
            continue
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            distance = np.abs(many - one)
            agrees = distance <= atol + rtol * np.abs(one)
        if agrees.all():
            continue
        where = np.unravel_index(
            np.argmax(np.where(agrees, -1, np.nan_to_num(distance, nan=np.inf))), one.shape
        )
        place = f" at {[int(i) for i in where]}" if where else ""
        count = (
            f"{int((~agrees).sum())} of {one.size} differ, largest difference{place}: "
            if one.size > 1
            else ""
        )
        found[name] = f"{count}{one[where]:.8g} on one device, {many[where]:.8g} with the strategy"
    return found


def explain(expected: Training, workers: Sequence[Training], rtol: float, atol: float) -> str | None:
    """Compares each worker with one device. Returns differences and likely reasons, or `None` if all agree.

    Raises:
        InvalidArgumentError: If the strategy has only one replica, so that a comparison proves nothing.
    """
    if workers[0].num_replicas < 2:
        raise InvalidArgumentError(
            "The strategy has only one replica, so a comparison with one device proves nothing.",
            received={"strategy": workers[0].title},
            hint="Pass num_workers=2, or a strategy with several devices.",
        )
    for index, run in enumerate(workers):
        found = differences(expected.numbers, run.numbers, rtol, atol)
        if not found:
            continue
        lines = [f"  {name}: {text}" for name, text in found.items()]
        left_out = [f"  and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
        who = f"{run.title}, worker {index}," if len(workers) > 1 else f"{run.title}"
        return "\n".join(
            [
                f"{who} gives different results than one device: {len(found)} of {len(expected.numbers)} differ "
                f"(rtol={rtol:g}, atol={atol:g}).",
                *lines[:_MOST],
                *left_out,
                "Likely reasons:",
                *(f"  - {reason}" for reason in _reasons(expected, run, list(found))),
            ]
        )
    return None


def _reasons(expected: Training, run: Training, found: Sequence[str]) -> list[str]:
    if any(name.startswith("before training") for name in found):
        return [
            "The initial weights differ. In `make_model`, take all random numbers from Keras, or from a generator "
            "with a fixed seed."
        ]
    reasons = list(expected.suspects)
    if not differences(expected.numbers, run.numbers, _GROWN, _GROWN):
        reasons.append(
            "Rounding: sums are added in a different order, and training enlarges the difference. Compare after fewer "
            "steps, use SGD instead of Adam, or pass rtol=1e-3 and atol=1e-4."
        )
    return reasons or [
        "The rows differ. `data` must return the same rows in the same order, in every process and on every call.",
        "A custom loss, metric or layer combines the rows of a batch. On TensorFlow and PyTorch, it sees only the rows "
        "of one replica.",
    ]
