"""Splits objects into parts: Keras objects into named variables, other objects into a state or a plain value.

Names of variables consist of positions and Keras names, without the counters that Keras appends. Therefore
they are the same in every process and on every backend.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from kdist import keras_hooks
from kdist.backends import get_backend
from kdist.checkpoint.checked_reading import dtype_of
from kdist.checkpoint.shards import Span
from kdist.context import StrategyLike
from kdist.errors import CheckpointError, InvalidArgumentError

_COUNTER = re.compile(r"_[0-9]+$")
_KINDS: tuple[tuple[type, str], ...] = (
    (keras.Model, "model"),
    (keras.layers.Layer, "layer"),
    (keras.optimizers.Optimizer, "optimizer"),
    (keras.metrics.Metric, "metric"),
    (keras.Variable, "variable"),
    (keras.random.SeedGenerator, "seed generator"),
)


@dataclass
class Part:
    """One object of a checkpoint."""

    name: str  # such as "model" or "model.optimizer"
    # "model", "optimizer", …; "state" for an object with `get_state`, "value" for a plain value.
    kind: str
    owner: Any
    variables: Mapping[str, keras.Variable | keras_hooks.Buffer] = field(default_factory=dict)  # By name.
    aliases: tuple[str, ...] = ()  # Other names of the same object.
    may_differ: bool = False  # Whether to skip it, instead of raising, if the saved variables differ.
    put: Callable[[object], None] | None = None  # Replaces a plain value.
    trained: Sequence[int] = ()  # The positions of an optimizer's weights in the variables of its model.


def kind_of(value: object) -> str:
    for cls, kind in _KINDS:
        if isinstance(value, cls):
            return kind
    if callable(getattr(value, "get_state", None)) and callable(getattr(value, "set_state", None)):
        return "state"
    return "value"


def collect(objects: Mapping[str, object], trained: Mapping[str, Sequence[int]] | None = None) -> list[Part]:
    """Returns the parts of objects, including objects inside lists and dictionaries.

    `trained` is `Part.trained` of saved optimizers. It builds the optimizers of models that have no variables
    yet.

    Raises:
        CheckpointError: If a model or layer has no variables yet.
    """
    found = list(_flatten(objects))
    models = [value for _, value, _ in found if isinstance(value, keras.Model)]
    sync(objects)
    given = {id(value): name for name, value, _ in found}
    parts: list[Part] = []
    for name, value, put in found:
        kind = kind_of(value)
        if kind == "optimizer":
            _build(value, models)
        parts.append(Part(name, kind, value, _named(kind, value, name), put=put))
        parts += _untracked(parts[-1])
        if kind == "model":
            parts += _compiled(name, value, given, parts, trained or {})
    for name, number in collections.Counter(part.name for part in parts).items():
        if number > 1:
            raise InvalidArgumentError(
                "Two objects in the checkpoint have the same name.",
                received={"name": name},
                hint='Rename one of them. The keys 1 and "1" of a dictionary give the same name.',
            )
    # An optimizer that was passed separately keeps its name, and "model.optimizer" is an alias.
    for name, value, _ in found:
        optimizer = getattr(value, "optimizer", None) if isinstance(value, keras.Model) else None
        own = f"{name}.optimizer"
        for part in parts:
            if optimizer is not None and part.owner is optimizer and part.name != own:
                part.aliases = (*part.aliases, own)
    return parts


def collect_layers(models: Mapping[str, keras.Model]) -> list[Part]:
    """Returns the parts of models without the optimizer and metrics from `compile`.

    Raises:
        CheckpointError: If a model has no variables yet.
    """
    parts = [Part(name, "model", model, _named("model", model, name)) for name, model in models.items()]
    return [*parts, *(inner for part in parts for inner in _untracked(part))]


def sync(objects: Mapping[str, object]) -> None:
    """Copies the state of models in training to their variables."""
    for _, value, _ in _flatten(objects):
        if isinstance(value, keras.Model):
            keras_hooks.sync_state(value)


def strategy_of(value: object) -> StrategyLike | None:
    """Returns the strategy of an object, or the first strategy found in a dictionary, list or tuple."""
    if isinstance(value, (dict, list, tuple)):
        parts = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(strategy_of, parts)), None)
    with contextlib.suppress(TypeError):  # the object does not support weak references
        return keras_hooks.strategy_of(value)
    return None


def _flatten(
    objects: Any, prefix: str = "", put_all: Callable[[Any], None] | None = None
) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Yields the name, the object and its setter, for all objects including those inside containers.

    `put_all` replaces a tuple, which cannot be changed.
    """
    items = list(objects) if isinstance(objects, tuple) else objects

    def put(key: Any, value: Any) -> None:
        items[key] = value
        if put_all is not None:
            put_all(objects._make(items) if hasattr(objects, "_make") else tuple(items))

    for key, value in list(objects.items() if isinstance(objects, Mapping) else enumerate(objects)):
        name = f"{prefix}{key}"
        if "/" in name:
            raise InvalidArgumentError(
                "The name of an object in the checkpoint contains a slash.",
                received={"name": name},
                hint="Choose a name without a slash.",
            )
        if isinstance(value, (dict, list, tuple)) and _holds_objects(value):
            yield from _flatten(
                value, f"{name}.", functools.partial(put, key) if isinstance(value, tuple) else None
            )
        else:
            yield name, value, functools.partial(put, key)


def _holds_objects(value: object) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(map(_holds_objects, value.values() if isinstance(value, dict) else value))
    return kind_of(value) != "value"


def _compiled(
    name: str,
    model: keras.Model,
    given: Mapping[int, str],
    before: list[Part],
    trained: Mapping[str, Sequence[int]],
) -> list[Part]:
    """Returns the metrics from `compile`, and the optimizers of a model that have no separate part."""
    parts: list[Part] = []
    for key, optimizer in {"optimizer": getattr(model, "optimizer", None), **vars(model)}.items():
        taken = any(part.owner is optimizer for part in (*before, *parts))
        if not isinstance(optimizer, keras.optimizers.Optimizer) or id(optimizer) in given or taken:
            continue
        own, variables = f"{name}.{key}", model.variables
        saved = [variables[i] for i in trained.get(own, ()) if i < len(variables)]
        is_compiled = key == "optimizer"
        if is_compiled and not keras_hooks.overrides(model, "train_step"):
            saved = []  # `fit` trains all weights
        _build(optimizer, [model] if is_compiled else [], saved)
        if is_compiled or optimizer.built:  # others, for example of a GAN, are built by its first step
            places = {id(variable): i for i, variable in enumerate(variables)}
            positions = [places.get(id(v), -1) for v in keras_hooks.trained_variables(optimizer)]
            part = Part(own, "optimizer", optimizer, _named("optimizer", optimizer, own))
            part.trained = positions if min(positions, default=-1) >= 0 else ()
            parts.append(part)
    if getattr(model, "compiled", False) and model.metrics_variables:
        own = f"{name}.metrics"
        variables = _by_position(own, model.metrics_variables)
        # Metrics are reset in every epoch, and do not exist before the first one.
        parts.append(Part(own, "metrics", model, variables, may_differ=True))
    return parts


def _untracked(part: Part) -> list[Part]:
    """Returns parts with the state of layers that is not in variables."""
    if part.kind not in ("model", "layer"):
        return []
    adapted = enumerate(keras_hooks.boundaries(part.owner))
    parts = [Part(f"{part.name}.boundaries.{i}", "state", owner) for i, owner in adapted]
    own = f"{part.name}.buffers"
    buffers = {f"{own}/{name}": buffer for name, buffer in keras_hooks.buffers(part.owner).items()}
    return [*parts, Part(own, "buffers", part.owner, buffers)] if buffers else parts


def _build(
    optimizer: keras.optimizers.Optimizer, models: list[keras.Model], trained: Sequence[keras.Variable] = ()
) -> None:
    if optimizer.built:
        return
    if trained:
        optimizer.build(list(trained))
        return
    owners = [model for model in models if getattr(model, "optimizer", None) is optimizer] or models
    if len(owners) == 1 and owners[0].built:
        optimizer.build(owners[0].trainable_variables)


def _named(kind: str, value: Any, name: str) -> dict[str, keras.Variable]:
    if kind in ("model", "layer") and not keras_hooks.has_all_variables(value):
        raise CheckpointError(
            f"Cannot save or restore the {kind} {name!r}: it has no variables yet.",
            received={"name": name, kind: value.name},
            hint="Add an Input layer, or call it on a batch first: model(x)",
        )
    if kind in ("model", "layer", "metric"):
        return _by_position(name, value.variables)
    if kind == "optimizer":
        return {f"{name}/{i}/{_slot(variable, i)}": variable for i, variable in enumerate(value.variables)}
    if kind == "variable":
        return {name: value}
    if kind == "seed generator":
        return {name: value.state}
    return {}


def _by_position(name: str, variables: Iterable[keras.Variable]) -> dict[str, keras.Variable]:
    return {f"{name}/{i}/{_short(variable.path)}": variable for i, variable in enumerate(variables)}


def _short(path: str) -> str:
    """Returns the last two names of a path, without counters. The rest depends on how the model was built."""
    return "/".join(_COUNTER.sub("", part) for part in path.split("/")[-2:])


def _slot(variable: keras.Variable, position: int) -> str:
    """Returns the name of an optimizer variable ("iteration"), or the kind of a slot ("momentum")."""
    name = _COUNTER.sub("", variable.path.split("/")[-1])
    # Use `len`, because the truth value of a TensorFlow shape does not depend on its rank.
    return name if position < 2 and len(variable.shape) == 0 else name.rpartition("_")[2]


# Values and states --------------------------------------------------------------------------------------------


def to_host(source: object) -> np.ndarray:
    """Returns the value of a variable or an array as a NumPy array, which may share memory with it."""
    if not isinstance(source, keras.Variable):
        return np.asarray(source)
    array = keras.ops.convert_to_numpy(source)
    wanted = dtype_of(dtype_name(source))
    return array if array.dtype == wanted else array.astype(wanted)


def bytes_of(source: keras.Variable | np.ndarray, span: Span) -> np.ndarray:
    """Returns the bytes of a range of elements."""
    array = np.ascontiguousarray(to_host(source)).reshape(-1)
    return array[span.first : span.last].view(np.uint8)


def dtype_name(source: object) -> str:
    """Returns Keras's dtype name of a variable or an array."""
    if isinstance(source, keras.Variable):
        return keras.backend.standardize_dtype(source.dtype)
    return np.asarray(source).dtype.name


def random_state() -> dict[str, object]:
    """Returns the global random states of this process: Python, NumPy, Keras and the backend."""
    seed = keras_hooks.global_seed_generator()
    version, integers, next_gauss = random.getstate()
    name, words, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": (
            version,
            np.asarray(integers, np.uint32),
            next_gauss,
        ),  # as an array, which is stored as bytes
        "numpy": (name, np.asarray(words), int(position), int(has_gauss), float(gauss)),
        "keras": keras.ops.convert_to_numpy(seed.state),
        "backend": keras.backend.backend(),
        "backend_state": get_backend().random_state(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores the state from `random_state`. Skips the backend's state if it comes from another backend."""
    version, integers, next_gauss = state["python"]
    random.setstate((version, tuple(int(number) for number in integers), next_gauss))
    np.random.set_state(state["numpy"])
    keras_hooks.global_seed_generator().state.assign(state["keras"])
    if state["backend"] == keras.backend.backend():
        get_backend().set_random_state(state["backend_state"])


def config_of(model: keras.Model) -> object:
    """Returns the Keras configuration of a model as JSON, or `None` if it cannot be converted to JSON."""
    try:
        with keras_hooks.without_tensorflow():
            return json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
    except Exception:  # a user's `get_config` may raise anything
        return None
