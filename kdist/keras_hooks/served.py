"""Keras variables whose values are on servers, and pickling of Keras objects for other tasks of the job."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kdist.keras_hooks.seeds import SEED_STRIDE
from kdist.keras_hooks.wrapping import OWNER, strategies

if TYPE_CHECKING:
    import keras
    import numpy as np

    from kdist.context import StrategyLike


_RECORD = "_kdist_record"
# Attributes of models and layers that are not pickled, because each process creates its own.
_LEFT_BEHIND = frozenset(
    (
        "train_function",
        "test_function",
        "predict_function",
        "history",
        "_torch_params",
        "_jax_state_synced",
        "_jax_state",
        "jax_state_sync",
        "state_sync",
        "_kdist_recorded",
    )
)


@functools.cache
def _served_class(cls: type[keras.Variable]) -> type:
    def direct_assign(self: keras.Variable, value: object) -> None:
        self.__dict__[_RECORD].read()  # kdist detects an assignment by comparison with the old value
        cls._direct_assign(self, value)

    names = {
        "__module__": cls.__module__,
        "_direct_assign": direct_assign,
        "_kdist_base": cls,
        "_value": property(
            lambda self: self.__dict__[_RECORD].read(),
            lambda self, value: self.__dict__[_RECORD].write(value),
        ),
    }
    return type(cls.__name__, (cls,), names)


def serve(variable: keras.Variable, record: object) -> None:
    """Makes a Keras variable access its native value through the record's `read()` and `write(value)`."""
    vars(variable).pop("_value", None)
    vars(variable)[_RECORD] = record
    kind: Any = type(variable)
    variable.__class__ = _served_class(kind)


def record_of(variable: keras.Variable) -> Any:
    """Returns the record of a variable on servers, or `None` for other variables."""
    return vars(variable).get(_RECORD)


def variable_state(variable: keras.Variable) -> tuple[type, dict[str, object]]:
    """Returns the class of a Keras variable and its attributes except the value."""
    state = {name: value for name, value in vars(variable).items() if name not in ("_value", _RECORD)}
    return getattr(type(variable), "_kdist_base", type(variable)), state


def new_variable(cls: type, state: dict[str, object], value: object = None) -> keras.Variable:
    """Creates a variable from the result of `variable_state`, with a new value or without one."""
    variable: keras.Variable = object.__new__(cls)
    vars(variable).update(state)
    vars(variable)["_value"] = None
    if value is not None:
        variable._initialize(value)
    return variable


def stays_local(variable: keras.Variable) -> bool:
    """Returns whether a new variable stays in its task: random state, or an optimizer's variable.

    An optimizer's variable is later placed with the variable that it belongs to.
    """
    return _is_seed(vars(variable)) or OWNER in vars(variable)


def _is_seed(state: dict[str, object]) -> bool:
    return state["_name"] == "seed_generator_state"


def offset_seed(state: dict[str, object], value: np.ndarray, index: int) -> np.ndarray:
    """Returns the value of a local variable in a task; each task gets different random state."""
    if _is_seed(state):
        value = value.copy()
        value[0] += index * SEED_STRIDE
    return value


def seed_stride(variable: keras.Variable) -> int:
    """Returns the difference of the first word of random state between workers; 0 for other variables."""
    return SEED_STRIDE if _is_seed(vars(variable)) else 0


def variable_like(array: np.ndarray, path: str, trainable: bool) -> keras.Variable:
    """Creates a Keras variable with a given path, by which optimizers identify it."""
    import keras

    variable = keras.Variable(array, dtype=array.dtype.name, trainable=trainable, name=path.split("/")[-1])
    variable._path = path
    return variable


def reduced(value: object) -> Any:
    """Returns, in the format of `__reduce__`, how to pickle a Keras object by its attributes, not as a saved file.

    Returns `NotImplemented` for objects that are pickled as usual.
    """
    import keras
    from keras.src.saving.keras_saveable import KerasSaveable
    from keras.src.utils import tracking

    if isinstance(value, (tracking.TrackedList, tracking.TrackedSet)):
        return _new, (type(value),), (value.tracker, list(value)), None, None, _fill_container
    if isinstance(value, tracking.TrackedDict):
        return _new, (type(value),), (value.tracker, dict(value)), None, None, _fill_container
    if isinstance(value, tracking.Tracker):
        return _new, (type(value),), vars(value) | {"stored_ids": {}}, None, None, _fill
    if isinstance(value, KerasSaveable) and not hasattr(
        value, "lookup_table"
    ):  # TensorFlow's table, created again
        state = {name: kept for name, kept in vars(value).items() if name not in _LEFT_BEHIND}
        if "_modules" in state:  # the layer is a torch module
            state["_modules"] = {n: m for n, m in state["_modules"].items() if n not in _LEFT_BEHIND}
        if isinstance(value, keras.Model):
            state |= dict.fromkeys(("train_function", "test_function", "predict_function"))
        return _new, (type(value),), state, None, None, _fill
    return NotImplemented


def _new(cls: Any) -> object:
    return cls.__new__(cls) if issubclass(cls, (list, dict, set)) else object.__new__(cls)


class _Filled(threading.local):
    objects: list[object] | None = None


_filled = _Filled()


def _fill(value: object, state: dict[str, object]) -> None:
    vars(value).update(state)
    if _filled.objects is not None:
        _filled.objects.append(value)


def _fill_container(value: Any, state: tuple[object, Any]) -> None:
    value.tracker, items = state
    kind: Any = next(kind for kind in (list, dict, set) if isinstance(value, kind))
    (kind.extend if kind is list else kind.update)(value, items)


@contextlib.contextmanager
def arriving(strategy: StrategyLike | None) -> Iterator[None]:
    """A context for unpickling Keras objects. Afterwards, the models belong to the strategy."""
    import keras
    from keras.src.utils import tracking

    outer, _filled.objects = _filled.objects, []
    try:
        yield
        # Keras identifies some objects by `id`, which differs in this process.
        for value in _filled.objects:
            if isinstance(value, tracking.Tracker):
                value.stored_ids = {name: set(map(id, store)) for name, (_, store) in value.config.items()}
            elif isinstance(value, keras.optimizers.Optimizer):
                _rename_keys(value)
            elif isinstance(value, keras.Model):
                strategies[value] = strategy
    finally:
        _filled.objects = outer


def _rename_keys(optimizer: keras.optimizers.Optimizer) -> None:
    places, variables = optimizer._trainable_variables_indices, optimizer._trainable_variables
    keys = {key: optimizer._var_key(variables[place]) for key, place in places.items()}
    # The second is from Keras 3.16, the third is from `MultiOptimizer`.
    for name in ("_trainable_variables_indices", "_weight_decay_by_var_key", "_var_to_optimizer_idx"):
        if hasattr(optimizer, name):
            setattr(optimizer, name, {keys[key]: value for key, value in getattr(optimizer, name).items()})
    if excluded := getattr(optimizer, "_exclude_from_weight_decay", None):
        optimizer._exclude_from_weight_decay = {keys.get(key, key) for key in excluded}
        optimizer._exclude_from_weight_decay_cache = {}  # it contains old keys
