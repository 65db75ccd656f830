"""One run of a comparison: in a plain process, or in each worker of a strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kdist.errors import InvalidArgumentError

_ARGUMENTS = ("x", "y", "sample_weight")


@dataclasses.dataclass(frozen=True)
class Training:
    """The results of a run.

    Args:
        title: A description of the strategy and the backend, for messages.
        num_replicas: The number of replicas.
        numbers: All values to compare, in the order in which the run created them.
        suspects: Reasons why the model may give different results on several replicas.
    """

    title: str
    num_replicas: int
    numbers: dict[str, Any]
    suspects: tuple[str, ...]


def train(
    make_model: Callable[[], Any],
    data: Any,
    make_strategy: Callable[[], Any] | None,
    epochs: int,
    seed: int,
    fit_arguments: Mapping[str, Any],
) -> Training:
    """Trains a model and predicts; see `kdist.testing.assert_parity`.

    Args:
        make_model: Returns the compiled model.
        data: A tuple of `x`, `y` and optionally `sample_weight`, or a dataset, or a function that returns it.
        make_strategy: Returns the strategy; `None` for plain Keras on one device.
        epochs: The number of epochs.
        seed: The seed of all random numbers.
        fit_arguments: Other arguments of `fit`.
    """
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
