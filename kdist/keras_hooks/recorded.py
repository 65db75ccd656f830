"""The Python state of a model that its step reads, to decide whether a recorded step is still valid."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kdist.keras_hooks.served import record_of

if TYPE_CHECKING:
    import keras


# Packages whose layers and functions compute the same operations for each batch of the same shapes. Keras
# requires this of its own code, because JAX and TensorFlow compile it.
_PURE = frozenset(("keras", "keras_hub", "keras_rs", "torch", "numpy", "builtins", "kdist"))
# What `fit` and the methods beside it set on a model.
_OF_LOOPS = (
    *("history", "stop_training", "stop_evaluating", "stop_predicting", "training", "_initial_epoch"),
    *("train_function", "test_function", "predict_function", "_kdist_recorded"),
)
_ANY_MODE = {"training": None}


class StepState:
    """The attributes of a model's layers, metrics, losses, optimizer, variables and their parts, at one time.

    A replayed step does not run the Python code that reads these attributes, so a new value would have no
    effect. The comparison of dictionaries compares equal objects fast, because it starts with their identity.
    Arrays need copies, because code may write to them in place.
    """

    def __init__(self, model: keras.Model) -> None:
        import numpy as np

        parts = _parts(model)
        self._settings = _settings()
        inner = {id(module): module for module in _wrapped(parts)}
        self._now = [vars(part) for part in parts if part is not model and id(part) not in inner]
        self._then = [_copy(attributes) for attributes in self._now]
        # The wrapper sets its mode and the mode of its modules in each step that runs.
        self._modules = [(vars(module), _copy(vars(module)) | _ANY_MODE) for module in inner.values()]
        leaves = [leaf for part in parts for value in vars(part).values() for leaf in _leaves(value)]
        self._arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
        self._copies = [array.copy() for array in self._arrays]
        self._model = _copy(vars(model))
        tensors = {id(tensor): tensor for part in (model, *inner.values()) for tensor in part.parameters()}
        self._hooks = [(tensor, tensor.requires_grad, *_hooks_of(tensor)) for tensor in tensors.values()]

    def is_that_of(self, model: keras.Model) -> bool:
        """Returns whether no attribute, setting of Keras, hook or frozen parameter has changed."""
        import numpy as np

        try:
            return (
                self._settings == _settings()
                and self._now == self._then
                and all(now | _ANY_MODE == then for now, then in self._modules)
                and (vars(model) == self._model or self._has_only_looped(model))
                and all(map(np.array_equal, self._arrays, self._copies))
                and all(
                    tensor.requires_grad == is_trained
                    and (tensor._backward_hooks or None) == before
                    and (tensor._post_accumulate_grad_hooks or None) == after
                    for tensor, is_trained, before, after in self._hooks
                )
            )
        except Exception:  # arrays cannot be compared as a whole
            return False

    def _has_only_looped(self, model: keras.Model) -> bool:
        now = _copy(vars(model))
        changed = {name for name in {*now, *self._model} if now.get(name) is not self._model.get(name)}
        if any(now.get(name) != self._model.get(name) for name in changed.difference(_OF_LOOPS)):
            return False
        self._model = now
        return True


def _copy(attributes: dict[str, object]) -> dict[str, object]:
    """Returns a copy in which lists and dictionaries are also copies, because code may add to them."""
    return {
        name: value.copy() if isinstance(value, (list, dict, set)) else value
        for name, value in attributes.items()
    }


def _settings() -> tuple[object, ...]:
    """Returns the settings of Keras that its layers and losses read in each step."""
    from keras import config

    return config.epsilon(), config.floatx(), config.image_data_format()


def _hooks_of(tensor: Any) -> tuple[dict[int, object] | None, dict[int, object] | None]:
    """Returns copies of the hooks of a tensor; `None` if there are none."""
    hooks = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return dict(hooks[0] or {}) or None, dict(hooks[1] or {}) or None


def _wrapped(parts: Iterable[object]) -> Iterator[Any]:
    """Yields Keras's wrappers of modules of PyTorch, and the modules in them."""
    import keras

    for part in parts:
        if isinstance(part, keras.layers.TorchModuleWrapper):
            yield part
            yield from part.module.modules()


def has_own_values(model: keras.Model) -> bool:
    """Returns whether all variables of a model are stored in this process."""
    return all(record_of(part) is None for part in _parts(model))


def step_tensors(model: keras.Model) -> list[Any]:
    """Returns the native tensors of a model that its step may write: its variables, and PyTorch's buffers."""
    values = [vars(part).get("_value") for part in _parts(model)]
    return [*(value for value in values if value is not None), *model.parameters(), *model.buffers()]


def own_code(model: keras.Model) -> str:
    """Returns the name of custom code in the step of a model, or an empty string."""
    parts = [*model.modules(), *_parts(model)]
    # Operations of functional models can contain functions, for example `keras.ops.map(fn, x)`.
    operations = [operation for part in parts for operation in vars(part).get("_operations") or ()]
    parts += operations
    for part in parts:
        if not _is_pure(type(part)):
            return type(part).__name__
    for part in parts:
        for name, value in vars(part).items():
            if not all(_is_pure(_code_of(leaf)) for leaf in _leaves(value)):
                return f"{type(part).__name__}.{name}"
    for operation in operations:
        arguments = [[node.arguments.args, node.arguments.kwargs] for node in operation._inbound_nodes]
        if not all(_is_pure(_code_of(leaf)) for leaf in _leaves(arguments)):
            return f"an argument of {type(operation).__name__}"
    parameters = [p for part in (model, *_wrapped(parts)) for p in part.parameters()]
    return "a hook of a parameter" if any(any(_hooks_of(p)) for p in parameters) else ""


def _is_pure(code: object) -> bool:
    module = getattr(code, "__module__", None) or ""
    return code is None or module.partition(".")[0] in _PURE


def _code_of(value: object) -> object:
    """Returns the function or the class that a callable runs; `None` for data."""
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return value
    return type(value) if callable(value) and not isinstance(value, type) else None


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _parts(model: keras.Model) -> list[Any]:
    import keras

    # Keras's objects whose attributes a step reads, and which a layer or a variable refers to.
    read = (keras.regularizers.Regularizer, keras.constraints.Constraint)
    found: dict[int, Any] = {}
    stack = [
        *model._flatten_layers(),
        *model.variables,
        *model.metrics,
        *(getattr(model, name, None) for name in ("optimizer", "_compile_loss", "_compile_metrics")),
    ]
    while stack:
        part = stack.pop()
        if part is None or id(part) in found or not hasattr(part, "__dict__"):
            continue
        found[id(part)] = part
        stack += getattr(part, "variables", ())
        stack += getattr(part, "metrics", None) or ()
        stack += [entry.loss for entry in getattr(part, "_flat_losses", None) or ()]
        stack.append(getattr(part, "inner_optimizer", None))
        stack.append(getattr(part, "_learning_rate", None))
        stack += [value for value in vars(part).values() if isinstance(value, read)]
        stack += _wrapped([part])
    return list(found.values())
