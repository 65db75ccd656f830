"""What all hooks share: how they are put in, the strategy of a model, and the replica that runs."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from kdist import context

# The strategy of each model. Kept outside the models, so that saved files contain nothing of kdist.
strategies: weakref.WeakKeyDictionary[Any, context.StrategyLike] = weakref.WeakKeyDictionary()


# An attribute of an optimizer's variable: the path of the variable that it belongs to.
OWNER = "_kdist_owner"


def strategy_of(model: Any) -> context.StrategyLike | None:
    """Returns the strategy that a model was created under, or `None`."""
    return strategies.get(model)


def running_replica() -> Any:
    """The replica that this thread runs on behalf of a step, or `None`."""
    replica = context.current_replica()
    return replica if getattr(replica, "scope", None) is not None else None


def running_model_replica() -> Any:
    """The replica that runs a step of a model's, whose losses are to be those of all rows; or `None`.

    In a function that `strategy.run` runs, losses are what the function makes of them.
    """
    replica = running_replica()
    return replica if replica is not None and replica.is_model_step else None


def wrap(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Puts a hook in place of a function of Keras's: it is called with the original, then its arguments."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        return wrapper

    replace(owner, name, make)


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts in place of a function of Keras's what another one makes of it; see `wrap`."""
    original = getattr(owner, name)
    wrapper = functools.wraps(original)(make(original))
    # Keras reads the arguments of layers' constructors with `inspect.getfullargspec`, which does not look
    # behind a wrapper but believes this attribute.
    wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
