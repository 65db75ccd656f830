"""Shared helpers for hooks: patching, the strategy of a model, and the running replica."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from kdist import context

if TYPE_CHECKING:
    import keras

    from kdist.values import Tensor


class Rows(Protocol):
    """The `RowShare` of a replica: numbers or scalars of the backend."""

    counts: Any
    scalar_weight: Any


class RunningReplica(Protocol):
    """The parts of a backend's `Replica` that hooks use; see `kdist/backends/replica.py`."""

    is_model_step: bool
    rows: Rows
    applying: keras.Optimizer | None
    scope: Any

    @property
    def is_entered(self) -> bool: ...
    @property
    def replica_id_in_sync_group(self) -> int: ...
    @property
    def num_replicas_in_sync(self) -> int: ...
    @property
    def divides_variables(self) -> bool: ...
    def __enter__(self) -> object: ...
    def __exit__(self, *error: Any) -> None: ...
    def scalar(self, number: Any, dtype: Any) -> Tensor: ...
    def moments(
        self, x: Tensor, axes: Sequence[int], keepdims: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...
    def all_reduce_packed(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...
    def mean_over_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...
    def weight_loss(self, loss: Tensor, optimizer: keras.Optimizer) -> Tensor: ...
    def end_apply(self) -> None: ...
    def sum_gradients(
        self, gradients: Sequence[Tensor], variables: Sequence[keras.Variable]
    ) -> list[Tensor]: ...
    def take_variables(self, variables: Sequence[keras.Variable]) -> None: ...
    def apply_gradients(self, apply: Callable[[], object]) -> object: ...


# The strategy of each model, kept outside the models so that saved files do not depend on kdist.
strategies: weakref.WeakKeyDictionary[keras.Model, context.StrategyLike | None] = weakref.WeakKeyDictionary()


# The attribute of an optimizer's variable that contains the path of its model variable.
OWNER = "_kdist_owner"


def strategy_of(model: keras.Model) -> context.StrategyLike | None:
    """Returns the strategy that a model was created under, or `None`."""
    return strategies.get(model)


def running_replica() -> RunningReplica | None:
    """Returns the replica that runs a step in this thread, or `None`."""
    replica: Any = context.current_replica()
    return replica if getattr(replica, "scope", None) is not None else None


def running_model_replica() -> RunningReplica | None:
    """Returns the replica that runs a model's step, whose losses must cover all rows, or `None`.

    In functions that `strategy.run` runs, losses keep the reduction that the function uses.
    """
    replica = running_replica()
    return replica if replica is not None and replica.is_model_step else None


@contextlib.contextmanager
def temporarily(owner: object, /, **attributes: object) -> Iterator[None]:
    """A context with other attributes of an object. Bypasses `__setattr__`, with which Keras tracks attributes."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


def wrap(owner: type | ModuleType, name: str, hook: Callable[..., object]) -> None:
    """Replaces a Keras function with a hook, which receives the original function and its arguments."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object, **kwargs: object) -> object:
            return hook(original, *args, **kwargs)

        return wrapper

    replace(owner, name, make)


def replace(owner: type | ModuleType, name: str, make: Callable[..., Callable[..., object]]) -> None:
    """Replaces a Keras function with the result of `make`, which receives the original; see `wrap`."""
    original = getattr(owner, name)
    wrapper = functools.wraps(original)(make(original))
    # Keras reads the arguments of layers' constructors with `inspect.getfullargspec`, which ignores
    # `__wrapped__` but uses this attribute.
    wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
