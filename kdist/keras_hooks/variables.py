"""Variables: those that a strategy in scope sees, and the state that Keras keeps outside of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kdist import context
from kdist.keras_hooks.wrapping import OWNER, replace, wrap


def hook_variables() -> None:
    """A strategy whose scope sees a new variable is to make it equal on all workers."""
    import keras

    def note(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        strategy = context.current_strategy()
        if strategy is not None and context.in_cross_replica_context():
            strategy.new_variables.add(self)

    def addition(original: Callable[..., Any], self: Any, value: Any) -> Any:
        adding = getattr(stateless_scope(), "adding", contextlib.nullcontext)
        with adding():
            return original(self, value)

    wrap(keras.Variable, "__init__", note)
    for name in ("assign_add", "assign_sub"):
        wrap(keras.Variable, name, addition)


def hook_assignments(
    assigned: Callable[[Any], None], value_of: Callable[[Any, Any], Any] = lambda variable, value: value
) -> None:
    """Has functions called where a Keras variable is assigned to outside of replicas; called once, by the backend.

    Args:
        assigned: Called with the variable after.
        value_of: Called with the variable and the value before; returns what is assigned.
    """
    import keras

    def direct(original: Callable[..., Any], self: Any, value: Any) -> None:
        original(self, value_of(self, value))
        assigned(self)

    wrap(keras.Variable, "_direct_assign", direct)


def hook_reading(read: Callable[[Any], Any], shown: Callable[[Any, Any], Any]) -> None:
    """Lets a function read the value of a Keras variable as a NumPy array; called once, by the backend.

    `keras.ops.convert_to_numpy`, `get_weights` and all files of Keras's come to this, and an array that several workers
    hold together must be gathered first.

    Args:
        read: Returns the value of a variable; `None` for what Keras makes of it.
        shown: Called with a variable and a value that does not have its shape; returns its value without padding.
    """
    import keras

    def array(original: Callable[..., Any], self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
        value = read(self) if stateless_scope() is None else None
        if value is None:
            value = original(self, dtype)
        elif dtype is not None:
            value = value.astype(dtype, copy=False)
        return value.copy() if copy else value  # NumPy has it done here, where it may be

    native: Any = keras.Variable.value.fget

    def value(self: Any) -> Any:
        found = native(self)
        return found if found.shape == self.shape else shown(self, found)

    def text(original: Callable[..., Any], self: Any) -> str:
        if self._value is None or self._value.shape == self.shape:
            return original(self)
        return f"<Variable path={self.path}, shape={self.shape}, dtype={self.dtype}>"

    wrap(keras.Variable, "__array__", array)
    wrap(keras.Variable, "__repr__", text)
    keras.Variable.value = property(value, doc=keras.Variable.value.__doc__)


def owner_path(variable: Any) -> str:
    """Returns the path of a variable; of one of an optimizer's, that of the variable that it belongs to."""
    return vars(variable).get(OWNER) or variable.path


def native_value(variable: Any) -> Any:
    """Returns the native variable or tensor of a Keras variable, in any scope; `None` before it has one."""
    return variable._value


def set_native_value(variable: Any, value: Any) -> None:
    """Puts another native value behind a Keras variable, past every scope and without a copy."""
    variable._value = value


def first_value(variable: Any) -> Any:
    """Returns a new value for a variable that has none yet, of its own initializer."""
    return variable._initializer(variable.shape, dtype=variable.dtype)


# The second is what Keras 3.16 calls it.
_STATE_SYNC = ("jax_state_sync", "state_sync")


def show_state(model: Any, write: Callable[[], None]) -> None:
    """Lets callbacks that look at `self.model` in the middle of an epoch see the present weights.

    Keras's `Callback.model` calls `model.jax_state_sync()` before it hands out the model; on JAX the state
    lives outside the variables during an epoch.

    Args:
        model: The model that trains.
        write: Writes the state into the variables; may be called at any time between steps.
    """
    for name in _STATE_SYNC:
        model.__dict__[name] = write


def hide_state(model: Any) -> None:
    """Undoes `show_state`."""
    for name in _STATE_SYNC:
        model.__dict__.pop(name, None)


def sync_state(model: Any) -> None:
    """Brings the present state into the variables in the middle of an epoch: what `Callback.model` calls."""
    for name in _STATE_SYNC:
        if callable(getattr(model, name, None)):
            getattr(model, name)()
            return


def stateless_scope() -> Any:
    """Returns the innermost `keras.StatelessScope` of this thread, or `None`; Keras has no public way to."""
    from keras.src.backend.common.stateless_scope import get_stateless_scope

    return get_stateless_scope()


@contextlib.contextmanager
def without_scope() -> Iterator[None]:
    """Within this, variables are as outside of any `keras.StatelessScope`."""
    from keras.src.backend.common import global_state

    scope = stateless_scope()
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def hook_cond(cond: Callable[..., Any]) -> None:
    """Wraps `keras.ops.cond` on JAX; called once, by the backend.

    A `LossScaleOptimizer` writes variables in the branches, which JAX does not let out.
    """
    from keras.src import backend

    # Keras 3.16 keeps the operations of a backend in a package of their own.
    replace(backend.core if hasattr(backend, "core") else backend.ops.core, "cond", cond)
