"""Hooks for variables, and for the state that Keras keeps outside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kdist import context
from kdist.keras_hooks.wrapping import OWNER, replace, wrap

if TYPE_CHECKING:
    import keras
    import numpy as np

    from kdist.arrays.types import Function
    from kdist.values import Tensor


def hook_variables() -> None:
    """Registers new variables with the strategy in scope, which makes them equal on all workers."""
    import keras

    def note(original: Function, self: keras.Variable, /, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        strategy = context.current_strategy()
        if strategy is not None and context.in_cross_replica_context():
            strategy.new_variables.add(self)

    def addition(original: Function, self: keras.Variable, value: object) -> object:
        adding = getattr(stateless_scope(), "adding", contextlib.nullcontext)
        with adding():
            return original(self, value)

    wrap(keras.Variable, "__init__", note)
    for name in ("assign_add", "assign_sub"):
        wrap(keras.Variable, name, addition)


def hook_assignments(
    assigned: Callable[[keras.Variable], None],
    value_of: Callable[[keras.Variable, Tensor], Tensor] = lambda variable, value: value,
) -> None:
    """Calls functions when a Keras variable is assigned outside replicas; the backend calls this once.

    Args:
        assigned: Receives the variable after the assignment.
        value_of: Receives the variable and the new value before the assignment; returns the value to assign.
    """
    import keras

    def direct(original: Function, self: keras.Variable, value: Tensor) -> None:
        original(self, value_of(self, value))
        assigned(self)

    wrap(keras.Variable, "_direct_assign", direct)


def hook_reading(
    read: Callable[[keras.Variable], np.ndarray | None],
    shown: Callable[[keras.Variable, Tensor], Tensor],
) -> None:
    """Sets a function that reads a Keras variable as a NumPy array; the backend calls this once.

    `keras.ops.convert_to_numpy`, `get_weights` and all Keras files use it. An array that is sharded over
    several workers must be gathered first. `read` returns `None` to use Keras's conversion, and `shown` removes the
    padding of a value.
    """
    import keras

    def array(
        original: Callable[..., np.ndarray],
        self: keras.Variable,
        dtype: str | None = None,
        copy: bool | None = None,
    ) -> np.ndarray:
        value = read(self) if stateless_scope() is None else None
        if value is None:
            value = original(self, dtype)
        elif dtype is not None:
            value = value.astype(dtype, copy=False)
        return value.copy() if copy else value  # NumPy leaves the copy to `__array__`

    native: Callable[[keras.Variable], Tensor] = keras.Variable.value.fget

    def value(self: keras.Variable) -> Tensor:
        found = native(self)
        return found if found.shape == self.shape else shown(self, found)

    def text(original: Callable[..., str], self: keras.Variable) -> str:
        if self._value is None or self._value.shape == self.shape:
            return original(self)
        return f"<Variable path={self.path}, shape={self.shape}, dtype={self.dtype}>"

    wrap(keras.Variable, "__array__", array)
    wrap(keras.Variable, "__repr__", text)
    keras.Variable.value = property(value, doc=keras.Variable.value.__doc__)


def owner_path(variable: keras.Variable) -> str:
    """Returns the path of a variable; for an optimizer's variable, the path of its model variable."""
    return vars(variable).get(OWNER) or variable.path


def native_value(variable: keras.Variable) -> Any:
    """Returns the native variable or tensor of a Keras variable in any scope; `None` before it is built."""
    return variable._value


def set_native_value(variable: keras.Variable, value: object) -> None:
    """Replaces the native value of a Keras variable, without a copy and regardless of scopes."""
    variable._value = value


def first_value(variable: keras.Variable) -> Any:
    """Returns an initial value for a variable without a value, from its initializer."""
    return variable._initializer(variable.shape, dtype=variable.dtype)


# Keras 3.16 uses the second name.
_STATE_SYNC = ("jax_state_sync", "state_sync")


def show_state(model: keras.Model, write: Callable[[], None]) -> None:
    """Makes the current weights visible to callbacks that use `self.model` in the middle of an epoch.

    On JAX, the state is not in the variables during an epoch. Keras's `Callback.model` calls
    `model.jax_state_sync()` before it returns the model, so `write` may be called at any time between steps.
    """
    for name in _STATE_SYNC:
        model.__dict__[name] = write


def hide_state(model: keras.Model) -> None:
    """Undoes `show_state`."""
    for name in _STATE_SYNC:
        model.__dict__.pop(name, None)


def sync_state(model: keras.Model) -> None:
    """Writes the current state to the variables in the middle of an epoch, as `Callback.model` does."""
    for name in _STATE_SYNC:
        if callable(getattr(model, name, None)):
            getattr(model, name)()
            return


def stateless_scope() -> Any:
    """Returns the innermost `keras.StatelessScope` of this thread, or `None`; it is private in Keras."""
    from keras.src.backend.common.stateless_scope import get_stateless_scope

    return get_stateless_scope()


@contextlib.contextmanager
def without_scope() -> Iterator[None]:
    """A context without an active `keras.StatelessScope`."""
    from keras.src.backend.common import global_state

    scope = stateless_scope()
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def hook_cond(cond: Callable[..., Function]) -> None:
    """Wraps `keras.ops.cond` on JAX; the backend calls this once.

    A `LossScaleOptimizer` writes variables in the branches. JAX does not let such values leave a branch.
    """
    from keras.src import backend

    # Keras 3.16 moves the operations of a backend to a separate package.
    replace(backend.core if hasattr(backend, "core") else backend.ops.core, "cond", cond)
