"""Runs users' functions in replicas on TensorFlow, with `tf.function` and `tf.GradientTape`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist import keras_hooks
from kdist.arrays.types import Args, Function, Kwargs, R
from kdist.backends import debugging
from kdist.backends.gradients import check_loss, split_aux
from kdist.backends.replica import RowShare, equal_shares
from kdist.backends.tensorflow import iteration
from kdist.backends.tensorflow.core import TensorFlowCore, aligned
from kdist.backends.tensorflow.replicas import TensorFlowReplica, TensorFlowScope
from kdist.context import StrategyLike, current_replica, joined_strategy
from kdist.values import Tensor


def in_replicas(
    runtime: TensorFlowCore,
    strategy: StrategyLike,
    body: Callable[[TensorFlowReplica, int], R],
    thread_state: keras_hooks.ThreadState,
    shares: Sequence[tf.Tensor] | None = None,
    variables: Sequence[keras.Variable] = (),
) -> list[R]:
    """Calls `body(replica, local_index)` in each local replica, in its context and scope.

    In a model's step, `shares` has the weights of each local replica's rows, and the step may write
    `variables`. For a user's function, `shares` is `None`.
    """
    # Results go into a list, because TensorFlow would regroup returned values.
    results: list[Any] = [None] * len(runtime.devices)
    scopes: dict[int, TensorFlowScope] = {}

    @tf.autograph.experimental.do_not_convert
    def one_replica() -> None:
        index = local_index(runtime)
        number = runtime.num_replicas
        share = equal_shares(number)[0] if shares is None else RowShare(*tf.unstack(shares[index]))
        replica_id = runtime.replica_ids[index]
        replica = TensorFlowReplica(
            strategy, replica_id, number, share, index, is_model_step=shares is not None
        )
        with thread_state, replica, TensorFlowScope(replica, variables) as scopes[index]:
            results[index] = body(replica, index)

    try:
        runtime.native.run(one_replica)
    except BaseException:
        if tf.executing_eagerly() and 0 in scopes:
            scopes[0].equalize(scopes.values())
        raise
    scopes[0].commit()
    return results


def run(
    runtime: TensorFlowCore, strategy: StrategyLike, fn: Function, args: Args, kwargs: Kwargs
) -> Sequence[object]:
    """Calls the user's function in every local replica, eagerly or while a `tf.function` is traced."""
    if isinstance(fn, tf.types.experimental.PolymorphicFunction) or hasattr(fn, _LIFTED):
        if tf.executing_eagerly():
            return lifted(strategy, fn)(args, kwargs)
        fn = fn.python_function  # type: ignore[attr-defined]
    called = converted(fn)
    with tf.init_scope():  # outside the graph, because it may create a variable
        thread_state = keras_hooks.ThreadState()
    logs: list[Any] = [()] * len(runtime.devices)

    def body(replica: TensorFlowReplica, index: int) -> object:
        logs[index] = replica.log
        try:
            return replica.call(called, args, kwargs)
        except Exception as error:
            error.add_note(f"Raised in replica {runtime.replica_ids[index]} ({runtime.devices[index]}).")
            raise

    results = in_replicas(runtime, strategy, body, thread_state)
    if debugging.is_on():
        with tf.init_scope():
            if runtime.can_exchange:
                debugging.check_all(runtime, logs[0])
    return results


_LIFTED = "_kdist_lifted"


def lifted(
    strategy: StrategyLike, fn: tf.types.experimental.PolymorphicFunction
) -> Callable[..., Sequence[object]]:
    """Compiles the call of all replicas instead of the function that each replica calls.

    `tf.distribute` does the same. TensorFlow cannot reduce in a `tf.function` that a replica calls.
    """
    if not hasattr(fn, _LIFTED):
        setattr(fn, _LIFTED, weakref.WeakKeyDictionary())
    known = getattr(fn, _LIFTED)
    if strategy not in known:
        # The cached value must not refer to its weak key or to the function that owns the cache.
        owner, plain = weakref.ref(strategy), fn.python_function

        def call(args: tuple[object, ...], kwargs: dict[str, object]) -> Sequence[object]:
            alive = owner()
            assert alive is not None
            return run(alive.runtime, alive, plain, args, kwargs)

        autograph = getattr(fn, "_autograph", False)
        known[strategy] = tf.function(call, reduce_retracing=True, autograph=autograph)
    return known[strategy]


def converted(fn: Callable[..., R]) -> Callable[..., R]:
    """Converts the user's function with AutoGraph if AutoGraph converts the caller of `strategy.run`."""
    context = tf.__internal__.autograph.control_status_ctx()
    return tf.__internal__.autograph.tf_convert(fn, context, convert_by_default=False)


def local_index(runtime: TensorFlowCore) -> int:
    """Returns the index of this thread's replica among this worker's replicas, as a Python number."""
    if len(runtime.devices) == 1:
        return 0
    replica_id = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
    return int(replica_id) - runtime.replica_ids[0]


def function(fn: Callable[..., R], **options: object) -> Callable[..., R]:
    """Returns a `tf.function` that is traced for few shapes.

    It uses AutoGraph only if the user asks for it, or if tracing fails without it: if the function loops over a
    distributed dataset or a tensor, or branches on a tensor. Inside a replica, it calls `fn` directly.
    """
    needs_autograph = (iteration.LoopInGraphError, tf.errors.OperatorNotAllowedInGraphError)

    def compile(autograph: bool) -> tf.types.experimental.PolymorphicFunction:
        return tf.function(fn, **{"reduce_retracing": True, "autograph": autograph, **options})

    compiled, loops = compile(autograph=False), False

    @functools.wraps(fn)
    @tf.autograph.experimental.do_not_convert
    def wrapper(*args: object, **kwargs: object) -> R:
        if current_replica() is not None:
            return fn(*args, **kwargs)
        nonlocal compiled, loops
        if not options and not loops and _is_in_branch():
            # Part of the function that is being traced: a separate graph could not write variables in a loop.
            try:
                return converted(fn)(*args, **kwargs)
            except needs_autograph:
                compiled, loops = compile(autograph=True), True
        # Collectives run in this call, and not in the Python code that requested them during tracing.
        joined = joined_strategy()
        with (
            aligned() if joined is None else joined.runtime.engine_errors(),
            iteration.python_errors(),
        ):
            try:
                return compiled(*args, **kwargs)
            except needs_autograph:
                compiled, loops = compile(autograph=True), True
            return compiled(*args, **kwargs)

    wrapper.python_function = fn  # type: ignore[attr-defined]
    setattr(wrapper, _LIFTED, weakref.WeakKeyDictionary())
    return wrapper


def _is_in_branch() -> bool:
    """Returns whether the body of a loop, or a branch, is being traced."""
    # TensorFlow has no public names for these graphs.
    from tensorflow.python.ops.control_flow_v2_func_graphs import CondBranchFuncGraph, WhileBodyFuncGraph

    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, tf.__internal__.FuncGraph):
        if isinstance(graph, (CondBranchFuncGraph, WhileBodyFuncGraph)):
            return True
        graph = graph.outer_graph
    return False


def value_and_grad(
    fn: Function, variables: Sequence[keras.Variable], has_aux: bool
) -> Callable[..., tuple[object, list[Tensor | None]]]:
    """Returns a function that computes a loss and its gradients with `tf.GradientTape`."""

    @tf.autograph.experimental.do_not_convert
    def wrapper(*args: object, **kwargs: object) -> tuple[object, list[tf.Tensor | None]]:
        values = [variable.value for variable in variables]
        with tf.GradientTape() as tape:
            tape.watch(values)  # also watches variables that are not trainable
            loss, aux = split_aux(converted(fn)(*args, **kwargs), has_aux)
            check_loss(loss)
        gradients = tape.gradient(loss, values)
        dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        return ((loss, aux) if has_aux else loss), dense

    return wrapper
