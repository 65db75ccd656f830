"""Custom losses, layers and metrics of a compiled model, and a step that only computes them."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kdist.keras_hooks.scalars import OwnLoss

if TYPE_CHECKING:
    import keras

# Packages whose functions do not call `add_loss` of a custom layer, and limits for the search for `add_loss`.
_LIBRARIES = frozenset(("builtins", "jax", "kdist", "keras", "numpy", "tensorflow", "torch"))
_MOST_FUNCTIONS, _MOST_ITEMS = 5000, 100


def is_own(value: object) -> bool:
    """Returns whether a function, or the class of an object, is not part of Keras."""
    # The module of a function created by `exec` may be `None`.
    return value is not None and (value.__module__ or "").partition(".")[0] != "keras"


def own_losses(model: keras.Model) -> list[OwnLoss]:
    """Wraps each loss whose reduction over the rows is unknown in an `OwnLoss`, and returns the wrappers.

    They include some of Keras's losses.
    """
    import keras

    couple_rows = (keras.losses.dice, keras.losses.tversky, keras.losses.circle)
    compiled = model._compile_loss
    found: dict[int, OwnLoss] = {}
    for entry in getattr(compiled, "_flat_losses", None) or ():
        loss, fn = entry.loss, getattr(entry.loss, "fn", None)
        if isinstance(loss, OwnLoss):
            found[id(loss)] = loss
        elif id(loss) not in found and (is_own(loss) or is_own(fn) or fn in couple_rows):
            found[id(loss)] = OwnLoss(loss)
    if found:
        compiled._flat_losses = [
            entry._replace(loss=found.get(id(entry.loss), entry.loss)) for entry in compiled._flat_losses
        ]
    return list(found.values())


def own_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers that may add custom losses, including the model itself."""
    return [
        layer
        for layer in model._flatten_layers()
        if _names_add_loss(type(layer)) or is_own(getattr(layer, "activity_regularizer", None))
    ]


def _names_add_loss(kind: type) -> bool:
    """Returns whether custom methods of a class, or functions that they can reach, use `add_loss`.

    kdist does not probe other layers, because the probe calls them once more.
    """
    waiting: list[object] = [value for base in kind.__mro__ if is_own(base) for value in vars(base).values()]
    seen: dict[int, object] = {}  # keeps the objects, so that no other object gets their `id`
    while waiting and len(seen) < _MOST_FUNCTIONS:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if not isinstance(value, types.FunctionType):
            waiting += _functions_of(value)
        elif (value.__module__ or "").partition(".")[0] not in _LIBRARIES:
            codes = [value.__code__]
            for code in codes:  # grows by inner functions
                if "add_loss" in code.co_names:
                    return True
                codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
                waiting += _named_in(code, value)
    return False


def _functions_of(value: object) -> list[object]:
    """Returns the functions that a method, an object that can be called, or a small container contains."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, functools.partial):
        return [value.func]
    if isinstance(value, (list, tuple, dict)):
        return list(value.values() if isinstance(value, dict) else value)[:_MOST_ITEMS]
    call = getattr(type(value), "__call__", None)  # noqa: B004
    return [call] if isinstance(call, types.FunctionType) else []


def _named_in(code: types.CodeType, function: types.FunctionType) -> list[object]:
    """Returns the values of global names, of names in modules, and of variables of outer functions."""
    found = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            found.append(cell.cell_contents)
    for module in [value for value in found if isinstance(value, types.ModuleType)]:
        if module.__name__.partition(".")[0] not in _LIBRARIES:
            found += [vars(module)[name] for name in code.co_names if name in vars(module)]
    return found


def own_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics that are custom or call a custom function.

    They include metrics that are attributes of the model or of a layer, which `compute_loss` or `call` updates.
    """
    found = [*getattr(model._compile_metrics, "metrics", ()), *model.metrics]
    metrics = {id(metric): metric for metric in found}.values()
    return [metric for metric in metrics if is_own(metric) or is_own(getattr(metric, "_fn", None))]


def compute_step(model: keras.Model, x: object, y: object, sample_weight: object, training: bool) -> None:
    """Calls the model, its loss and its metrics, as a step of Keras does."""
    y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
    rest: dict[str, object] = {"y": y, "y_pred": y_pred, "sample_weight": sample_weight}
    with contextlib.suppress(Exception):  # the model may have no loss for this data
        model._compute_loss(x=x, **rest, training=training)
    with contextlib.suppress(Exception):
        model.compute_metrics(x, **rest)


@contextlib.contextmanager
def kept_buffers(model: keras.Model) -> Iterator[None]:
    """Restores PyTorch's buffers, which are not Keras variables, at the end of the context."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if hasattr(model, "buffers") else []
    try:
        yield
    finally:
        for buffer, value in buffers:
            buffer.detach().copy_(value)


def has_torch_modules(model: keras.Model) -> bool:
    """Returns whether a model wraps PyTorch modules, whose statistics are not Keras variables."""
    import keras

    return any(isinstance(layer, keras.layers.TorchModuleWrapper) for layer in model._flatten_layers())
