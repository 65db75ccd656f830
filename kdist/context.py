"""The current strategy and replica of each thread."""

from __future__ import annotations

import contextlib
import numbers
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from kdist.errors import InvalidArgumentError, StrategyScopeError
from kdist.values import ReduceOp, Tensor


class StrategyLike(Protocol):
    """The parts of a `kdist.Strategy` that lower layers use."""

    new_variables: Any
    """The `NewVariables` of its scope."""
    own_ops: Any
    """The custom `CrossDeviceOps` that reduces gradients and values; `None` if the backend reduces them."""

    @property
    def runtime(self) -> Any:
        """The `Runtime` of its devices and workers."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all workers."""

    def scope(self) -> Scope[Any]:
        """Returns a context manager that makes this strategy current."""

    def reduce(self, reduce_op: ReduceOp | str, value: object, axis: int | Sequence[int] | None) -> Any:
        """Reduces a value over all replicas."""


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope[Any]] = []
        self.global_scope: Scope[Any] | None = None
        self.replica: ReplicaContext | None = None
        self.functions = 0
        self.is_merging = False


_state = _ThreadState()
# The strategy that joined this process to other workers. A process joins only once, so the strategy is kept
# even if the user drops it. Otherwise, `broadcast` would silently return each worker's own value.
_joined: list[StrategyLike] = []


def in_function() -> bool:
    """Returns whether a function of `kdist.function` runs in this thread."""
    return _state.functions > 0


@contextlib.contextmanager
def entered_function() -> Iterator[None]:
    """Makes `in_function` return `True` within a `with` block."""
    _state.functions += 1
    try:
        yield
    finally:
        _state.functions -= 1


def note_joined(strategy: StrategyLike) -> None:
    """Stores the strategy that joined this process to other workers."""
    _joined[:] = [strategy]


def joined_strategy() -> StrategyLike | None:
    """Returns the strategy that joined this process to other workers, or `None`."""
    return _joined[0] if _joined else None


class ReplicaContext:
    """The replica that runs the current function, inside `Strategy.run` or a training step.

    Source: `tf.distribute.ReplicaContext`,
    https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext

    Args:
        strategy: The strategy that runs the replica.
        replica_id_in_sync_group: The index of the replica among the replicas of all workers, from 0.
    """

    def __init__(self, strategy: StrategyLike, replica_id_in_sync_group: int) -> None:
        self._strategy = strategy
        self._replica_id_in_sync_group = replica_id_in_sync_group
        # A list, because an autograd thread may enter the replica while the replica's own thread waits.
        self._outer: list[ReplicaContext | None] = []

    @property
    def is_entered(self) -> bool:
        """Whether a thread currently runs this replica."""
        return bool(self._outer)

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The index of this replica among the replicas of all workers, from 0."""
        return self._replica_id_in_sync_group

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all workers."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a tuple with one name; empty for the default strategy."""
        return ()

    def all_reduce(self, reduce_op: ReduceOp | str, value: object, options: object = None) -> Any:
        """Reduces a value and returns the result on all replicas. You can differentiate through it.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext

        Args:
            reduce_op: `kdist.ReduceOp.SUM` or `MEAN`, or its name.
            value: The tensor or structure of tensors of this replica. All replicas must pass equal shapes.
            options: A `kdist.experimental.CommunicationOptions`. Ignored: the options of the strategy apply.

        Returns:
            A structure like `value`. `Strategy.reduce` returns the same dtypes: a `SUM` counts Booleans, and
            the `MEAN` of integers is floating point.

        Raises:
            InvalidArgumentError: If `reduce_op` is unknown, or `value` contains a distributed value.
            StrategyScopeError: If this thread does not run this replica.

        Example:

        ```python
        def step(x):
            return kdist.get_replica_context().all_reduce("SUM", x)

        strategy.run(step, args=(keras.ops.ones(()),))  # the number of replicas, on each
        ```
        """
        op = ReduceOp.of(reduce_op)

        def reduce(tensor: Tensor) -> Tensor:
            from kdist.arrays.structures import as_summand

            return self.reduce_tensor(op, as_summand(op, tensor))

        return self._map("all_reduce", reduce, value)

    def all_gather(self, value: object, axis: int, options: object = None) -> Any:
        """Concatenates the tensors of all replicas along an axis. You can differentiate through it.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext

        Args:
            value: The tensor or structure of tensors of this replica, of rank 1 or higher. Only the lengths
                along `axis` may differ between replicas.
            axis: The axis to concatenate along.
            options: See `all_reduce`.

        Returns:
            A structure like `value`, equal on all replicas.

        Raises:
            InvalidArgumentError: If a tensor does not have the axis, or `value` contains a distributed value.
            StrategyScopeError: If this thread does not run this replica.
        """

        def gather(tensor: Tensor) -> Tensor:
            return self.gather_tensor(tensor, checked_axis(axis, len(tensor.shape)))

        return self._map("all_gather", gather, value)

    def merge_call(
        self,
        merge_fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        """Calls a function once for all replicas of this worker, in the cross-replica context.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext

        Args:
            merge_fn: The function. It gets the strategy, then `args` and `kwargs`, in which the values of all
                local replicas are joined into `kdist.DistributedValues`. It cannot call `strategy.run`.
            args: The positional arguments of this replica.
            kwargs: The keyword arguments of this replica.

        Returns:
            The result of `merge_fn`. If it contains distributed values, this replica's components of them.

        Raises:
            StrategyScopeError: If this thread does not run this replica.
        """
        self.require_running("merge_call")
        with cross_replica(self._strategy):
            return merge_fn(self._strategy, *args, **(kwargs or {}))

    def reduce_tensor(self, op: ReduceOp, tensor: Tensor) -> Tensor:
        """Reduces a tensor over all replicas. The default strategy has only one replica."""
        return tensor

    def gather_tensor(self, tensor: Tensor, axis: int) -> Tensor:
        """Concatenates a tensor over all replicas."""
        return tensor

    def require_running(self, method: str) -> None:
        """Raises an error unless this thread runs this replica.

        A collective of another replica, or of a replica that has ended, would wait for the others forever.
        """
        is_default = type(self) is ReplicaContext and not has_strategy()
        if _state.replica is not self and not is_default:
            raise StrategyScopeError(
                f"Cannot call `{method}` on this replica context: its replica is not running in this thread.",
                hint="Call kdist.get_replica_context() inside the function that you pass to `strategy.run`.",
            )

    def _map(self, method: str, function: Callable[[Tensor], Tensor], value: object) -> Any:
        self.require_running(method)
        from kdist.arrays.structures import map_tensors

        return map_tensors(method, function, value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}>"

    def __enter__(self) -> ReplicaContext:
        self._outer.append(_state.replica)
        _state.replica = self
        return self

    def __exit__(self, *exc: object) -> None:
        _state.replica = self._outer.pop()


S = TypeVar("S", bound=StrategyLike)


class Scope(Generic[S]):
    """The context manager that `Strategy.scope` returns. It sets the current strategy of this thread."""

    def __init__(self, strategy: S, resources: Callable[[], AbstractContextManager[object]]) -> None:
        self.strategy = strategy
        self._resources = resources
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> S:
        if _state.replica is not None:
            raise StrategyScopeError(
                "Cannot enter a strategy's scope inside a replica.",
                received={"replica_id_in_sync_group": _state.replica.replica_id_in_sync_group},
                hint="Enter `strategy.scope()` before `strategy.run` or `model.fit`.",
            )
        if _state.scopes and _state.scopes[-1].strategy is not self.strategy:
            raise StrategyScopeError(
                "Cannot enter the scope of this strategy inside the scope of another strategy.",
                received={"current": _state.scopes[-1].strategy, "entered": self.strategy},
                hint="Leave the current scope first, or create one strategy and use it everywhere.",
            )
        resource = self._resources()
        resource.__enter__()
        self._entered.append(resource)
        _state.scopes.append(self)
        return self.strategy

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not _state.scopes or _state.scopes[-1] is not self:
            raise StrategyScopeError(
                "Cannot leave this scope: it is not the innermost scope of this thread.",
                received={"left": self.strategy},
                hint="Use `with strategy.scope():` instead of calling __enter__ and __exit__.",
            )
        _state.scopes.pop()
        self._entered.pop().__exit__(kind, value, trace)


def checked_axis(axis: int, rank: int) -> int:
    """Returns an axis of a tensor as a non-negative number. Raises an error if there is no such axis."""
    if isinstance(axis, numbers.Integral) and -rank <= axis < rank:
        return axis % rank
    raise InvalidArgumentError(
        f"The value has no axis {axis!r}.",
        received={"axis": axis, "rank": rank},
        hint=f"Choose an axis from {-rank} to {rank - 1}."
        if rank
        else "Add an axis to the scalar: keras.ops.expand_dims(value, 0)",
    )


@contextlib.contextmanager
def cross_replica(strategy: StrategyLike) -> Iterator[None]:
    """Switches a thread that runs a replica to the cross-replica context, within a `with` block."""
    before = _state.replica, _state.scopes, _state.is_merging
    _state.replica, _state.scopes = None, [Scope(strategy, contextlib.nullcontext)]
    _state.is_merging |= before[0] is not None  # the default strategy has no replicas
    try:
        yield
    finally:
        _state.replica, _state.scopes, _state.is_merging = before


def require_no_merge_call() -> None:
    """Raises a `StrategyScopeError` in a function of `merge_call`, which would wait for its own replicas."""
    if _state.is_merging:
        raise StrategyScopeError(
            "Cannot run the replicas in a function of `merge_call`, because they wait for this function.",
            hint="Call `strategy.run` after the outer `strategy.run`, or compute with the values of all replicas.",
        )


def current_strategy() -> StrategyLike | None:
    """Returns the strategy of the replica that this thread runs, or of its innermost scope, or `None`."""
    if _state.replica is not None:
        return _state.replica.strategy
    return _state.scopes[-1].strategy if _state.scopes else None


def has_strategy() -> bool:
    """Returns whether this thread is in the scope of a strategy other than the default strategy.

    Returns:
        `True` inside `strategy.scope()` and inside a replica of a strategy.

    Example:

    >>> import kdist
    >>> kdist.has_strategy()
    False
    """
    return _state.replica is not None or bool(_state.scopes)


def in_cross_replica_context() -> bool:
    """Returns whether this thread is in the cross-replica context, in which it acts for all replicas.

    Returns:
        `True` inside `strategy.scope()` and outside `strategy.run`. `False` in a replica, and if no strategy
        is in scope, because the default strategy has only a replica context.

    Example:

    >>> import kdist
    >>> kdist.in_cross_replica_context()
    False
    """
    return _state.replica is None and bool(_state.scopes)


def current_replica() -> ReplicaContext | None:
    """Returns the context of the replica that this thread runs, or `None`."""
    return _state.replica


def experimental_set_strategy(strategy: StrategyLike | None) -> None:
    """Sets the current strategy of this thread without a `with` block.

    Use it in notebooks, because a scope cannot span cells.

    Args:
        strategy: The strategy to set, or `None` to return to the default strategy.

    Raises:
        StrategyScopeError: If you call it inside `with strategy.scope():`. This is a `RuntimeError`.

    Example:

    >>> import kdist
    >>> kdist.experimental_set_strategy(None)
    >>> kdist.has_strategy()
    False
    """
    if _state.global_scope is not None and _state.scopes and _state.scopes[-1] is _state.global_scope:
        _state.global_scope.__exit__(None, None, None)
        _state.global_scope = None
    if has_strategy():
        raise StrategyScopeError(
            "Cannot call experimental_set_strategy inside a strategy's scope.",
            received={"current": current_strategy()},
            hint="Leave the `with strategy.scope():` block first.",
        )
    if strategy is not None:
        scope = strategy.scope()
        scope.__enter__()
        _state.global_scope = scope
