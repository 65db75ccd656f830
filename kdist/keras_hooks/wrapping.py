"""Shared helpers for hooks: patching, the strategy of a model, and the running replica."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from kdist import context

# The strategy of each model, kept outside the models so that saved files do not depend on kdist.
strategies: weakref.WeakKeyDictionary[Any, context.StrategyLike] = weakref.WeakKeyDictionary()


# The attribute of an optimizer's variable that contains the path of its model variable.
OWNER = "_kdist_owner"


def strategy_of(model: Any) -> context.StrategyLike | None:
    """Returns the strategy that a model was created under, or `None`."""
    return strategies.get(model)


def running_replica() -> Any:
    """Returns the replica that runs a step in this thread, or `None`."""
    replica = context.current_replica()
    return replica if getattr(replica, "scope", None) is not None else None


def running_model_replica() -> Any:
    """Returns the replica that runs a model's step, whose losses must cover all rows, or `None`.

    In functions that `strategy.run` runs, losses keep the reduction that the function uses.
    """
    replica = running_replica()
    return replica if replica is not None and replica.is_model_step else None


def wrap(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Replaces a Keras function with a hook, which receives the original function and its arguments."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        return wrapper

    replace(owner, name, make)


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a Keras function with the result of `make`, which receives the original; see `wrap`."""
    original = getattr(owner, name)
    wrapper = functools.wraps(original)(make(original))
    # Keras reads the arguments of layers' constructors with `inspect.getfullargspec`, which ignores
    # `__wrapped__` but uses this attribute.
    wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
