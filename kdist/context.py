"""The current strategy of this thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from kdist.errors import InvalidArgumentError, StrategyScopeError
from kdist.values import ReduceOp


class StrategyLike(Protocol):
    """What the rooms below the strategies need to know of a `kdist.Strategy`."""

    new_variables: Any
    """The `NewVariables` of its scope."""
    own_ops: Any
    """The `CrossDeviceOps` of the user's own by which gradients and values are reduced; `None` for the engine's."""

    @property
    def runtime(self) -> Any:
        """The `Runtime` of its devices and workers."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over all workers."""

    def scope(self) -> Scope[Any]:
        """Returns a context manager that makes it current."""

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None) -> Any:
        """Reduces a value over all replicas."""


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope[Any]] = []
        self.global_scope: Scope[Any] | None = None
        self.replica: ReplicaContext | None = None
        self.functions = 0


_state = _ThreadState()
# The strategy by which this process has joined others: a process joins once, and for good. So it is kept, though the
# user may drop it: `broadcast` would give each worker its own value else, without a word.
_joined: list[StrategyLike] = []


def in_function() -> bool:
    """Says whether a function of `kdist.function` runs in this thread."""
    return _state.functions > 0


@contextlib.contextmanager
def entered_function() -> Iterator[None]:
    """Within this, `in_function` is true."""
    _state.functions += 1
    try:
        yield
    finally:
        _state.functions -= 1


def note_joined(strategy: StrategyLike) -> None:
    """Remembers the strategy by which this process has joined other workers."""
    _joined[:] = [strategy]


def joined_strategy() -> StrategyLike | None:
    """Returns the strategy by which this process has joined other workers, if there is one."""
    return _joined[0] if _joined else None


class ReplicaContext:
    """What a function learns about the replica that runs it, inside `Strategy.run` or a training step.

    Source: `tf.distribute.ReplicaContext`,
    https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext

    Args:
        strategy: The strategy that runs the replica.
        replica_id_in_sync_group: Index of the replica over all workers, from 0.
    """

    def __init__(self, strategy: StrategyLike, replica_id_in_sync_group: int) -> None:
        self._strategy = strategy
        self._replica_id_in_sync_group = replica_id_in_sync_group
        # A thread of autograd's may enter it while its own thread waits there.
        self._outer: list[ReplicaContext | None] = []

    @property
    def is_entered(self) -> bool:
        """Whether a thread runs this replica."""
        return bool(self._outer)

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """Index of this replica over all workers, from 0."""
        return self._replica_id_in_sync_group

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over all workers."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a tuple of one name."""
        return ()

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Reduces a value over all replicas; every replica gets the result. Differentiable.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext

        Args:
            reduce_op: `kdist.ReduceOp.SUM` or `MEAN`, or its name.
            value: This replica's tensor or structure of tensors; of equal shapes on all replicas.
            options: A `kdist.experimental.CommunicationOptions`, for the sake of the signature: the strategy's
                options count.

        Returns:
            A structure like `value`. The `MEAN` of integers is floating point, as in `Strategy.reduce`.

        Raises:
            InvalidArgumentError: There is no such operation, or the value is a distributed one.
            StrategyScopeError: This is not the context of the replica that runs.

        Example:

        ```python
        def step(x):
            return kdist.get_replica_context().all_reduce("SUM", x)

        strategy.run(step, args=(keras.ops.ones(()),))  # the number of replicas, on each
        ```
        """
        op = ReduceOp.of(reduce_op)

        def reduce(tensor: Any) -> Any:
            from kdist.arrays.structures import as_float, is_integer

            if op is ReduceOp.SUM or not is_integer(tensor):
                return self.reduce_tensor(op, tensor)
            return as_float(self.reduce_tensor(ReduceOp.SUM, tensor)) / self.num_replicas_in_sync

        return self._map("all_reduce", reduce, value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenates the tensors of all replicas along an axis; every replica gets the result. Differentiable.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext

        Args:
            value: This replica's tensor, or structure of tensors, of rank 1 at least. Only the lengths along
                `axis` may differ between replicas.
            axis: The axis to concatenate along.
            options: As in `all_reduce`.

        Returns:
            A structure like `value`.

        Raises:
            InvalidArgumentError: A tensor has no such axis, or the value is a distributed one.
            StrategyScopeError: This is not the context of the replica that runs.
        """

        def gather(tensor: Any) -> Any:
            return self.gather_tensor(tensor, checked_axis(axis, len(tensor.shape)))

        return self._map("all_gather", gather, value)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function once for all replicas of this worker, in cross-replica context.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext

        Args:
            merge_fn: Called with the strategy, then `args` and `kwargs`, in which the values of all local
                replicas are joined to `kdist.DistributedValues`.
            args: This replica's positional arguments.
            kwargs: This replica's keyword arguments.

        Returns:
            What the function returns; of distributed values, this replica's component.

        Raises:
            StrategyScopeError: This is not the context of the replica that runs.
        """
        self.require_running("merge_call")
        with cross_replica(self._strategy):
            return merge_fn(self._strategy, *args, **(kwargs or {}))

    def reduce_tensor(self, op: ReduceOp, tensor: Any) -> Any:
        """Reduces one tensor over all replicas, of which the default strategy has one."""
        return tensor

    def gather_tensor(self, tensor: Any, axis: int) -> Any:
        """Concatenates one tensor of each replica."""
        return tensor

    def require_running(self, method: str) -> None:
        """Raises unless this is the context of the replica that this thread runs.

        A collective of another one, or of one that has ended, would wait for replicas that never come.
        """
        is_default = type(self) is ReplicaContext and not has_strategy()
        if _state.replica is not self and not is_default:
            raise StrategyScopeError(
                f"Cannot call `{method}` on this replica context: its replica is not running in this thread.",
                hint="Call kdist.get_replica_context() inside the function that you pass to `strategy.run`.",
            )

    def _map(self, method: str, function: Callable[[Any], Any], value: Any) -> Any:
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
    """The context manager that `Strategy.scope` returns: makes a strategy the current one of this thread."""

    def __init__(self, strategy: S, resources: Any) -> None:
        self._strategy = strategy
        self._resources = resources
        self._entered: list[Any] = []

    @property
    def strategy(self) -> S:
        """The strategy whose scope this is."""
        return self._strategy

    def __enter__(self) -> S:
        if _state.replica is not None:
            raise StrategyScopeError(
                "Cannot enter a strategy's scope inside a replica.",
                received={"replica_id_in_sync_group": _state.replica.replica_id_in_sync_group},
                hint="Enter `strategy.scope()` before `strategy.run` or `model.fit`.",
            )
        if _state.scopes and _state.scopes[-1].strategy is not self._strategy:
            raise StrategyScopeError(
                "Cannot enter the scope of this strategy inside the scope of another strategy.",
                received={"current": _state.scopes[-1].strategy, "entered": self._strategy},
                hint="Leave the current scope first, or create one strategy and use it everywhere.",
            )
        resource = self._resources()
        resource.__enter__()
        self._entered.append(resource)
        _state.scopes.append(self)
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not _state.scopes or _state.scopes[-1] is not self:
            raise StrategyScopeError(
                "Cannot leave this scope: it is not the innermost scope of this thread.",
                received={"left": self._strategy},
                hint="Use `with strategy.scope():` instead of calling __enter__ and __exit__.",
            )
        _state.scopes.pop()
        self._entered.pop().__exit__(kind, value, trace)


def checked_axis(axis: int, rank: int) -> int:
    """Returns an axis of a tensor as a number from 0; raises unless the tensor has it."""
    if isinstance(axis, int) and -rank <= axis < rank:
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
    """Within this, a thread that runs a replica speaks for all of them."""
    replica, scopes = _state.replica, _state.scopes
    _state.replica, _state.scopes = None, [Scope(strategy, contextlib.nullcontext)]
    try:
        yield
    finally:
        _state.replica, _state.scopes = replica, scopes


def current_strategy() -> StrategyLike | None:
    """Returns the strategy whose scope is the innermost one of this thread, or whose replica it runs, or `None`."""
    if _state.replica is not None:
        return _state.replica.strategy
    return _state.scopes[-1].strategy if _state.scopes else None


def has_strategy() -> bool:
    """Says whether this thread is in the scope of a strategy other than the default one.

    Returns:
        `True` inside `strategy.scope()` and inside a replica of a strategy.

    Example:

    >>> import kdist
    >>> kdist.has_strategy()
    False
    """
    return _state.replica is not None or bool(_state.scopes)


def in_cross_replica_context() -> bool:
    """Says whether this thread speaks for all replicas at once.

    Returns:
        `True` inside `strategy.scope()` and outside `strategy.run`; `False` in a replica, and where no
        strategy is in scope, since the default strategy has only a replica context.

    Example:

    >>> import kdist
    >>> kdist.in_cross_replica_context()
    False
    """
    return _state.replica is None and bool(_state.scopes)


def current_replica() -> ReplicaContext | None:
    """Returns the context of the replica that a strategy runs in this thread, or `None` outside of one."""
    return _state.replica


def experimental_set_strategy(strategy: StrategyLike | None) -> None:
    """Makes a strategy the current one of this thread without a `with` block.

    Meant for notebooks, where a scope cannot span cells.

    Args:
        strategy: The strategy to set, or `None` to go back to the default strategy.

    Raises:
        StrategyScopeError: Inside `with strategy.scope():` (a `RuntimeError`).

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
