"""Functions of the user's in replicas on TensorFlow: `tf.distribute.Strategy.run`, `tf.function` and tapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from kdist import keras_hooks
from kdist.backends import debugging
from kdist.backends.gradients import check_loss, split_aux
from kdist.backends.replica import equal_shares
from kdist.backends.tensorflow.replicas import TensorFlowReplica, TensorFlowScope
from kdist.values import component

if TYPE_CHECKING:
    from kdist.backends.tensorflow.runtime import TensorFlowRuntime


def run(
    runtime: TensorFlowRuntime, strategy: Any, fn: Callable[..., Any], args: Any, kwargs: Any
) -> Sequence[Any]:
    """Calls the user's function in every local replica, eagerly or in the `tf.function` that is being traced."""
    called = converted(fn)
    with tf.init_scope():  # it may create a variable
        thread_state = keras_hooks.ThreadState()
    # By a list, not by what is returned: TensorFlow would regroup it.
    results: list[Any] = [None] * len(runtime.devices)
    logs: list[Any] = [()] * len(runtime.devices)

    @tf.autograph.experimental.do_not_convert
    def one_replica() -> None:
        index = local_index(runtime)
        replica_id = runtime.replica_ids[index]
        number = runtime.num_replicas
        replica = TensorFlowReplica(
            strategy, replica_id, number, equal_shares(number)[0], index, is_model_step=False
        )
        try:
            with thread_state, replica, TensorFlowScope(replica, ()) as scope:
                own_args, own_kwargs = component((args, kwargs), index, keras.tree.map_structure)
                results[index] = called(*own_args, **own_kwargs)
                scope.aggregate()
            logs[index] = replica.log
        except Exception as error:
            error.add_note(f"Raised in replica {replica_id} ({runtime.devices[index]}).")
            raise

    runtime.native.run(one_replica)
    _debug(runtime, logs[0])
    return results


def _debug(runtime: TensorFlowRuntime, collectives: Sequence[Any]) -> None:
    """Under `KDIST_DEBUG=1`, compares the collectives of a function that was traced with the other workers'."""
    if runtime.num_workers == 1 or not debugging.is_on():
        return
    with tf.init_scope(), runtime.suspended(), runtime.scope():
        if not runtime.can_exchange:
            return
        for collective, shapes, site in collectives:
            debugging.check(runtime, collective, shapes, site)
        debugging.check(runtime, "end of the function", site=debugging.call_site())


def converted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lets AutoGraph see the user's function, where it converts what calls `strategy.run`."""
    context = tf.__internal__.autograph.control_status_ctx()
    return tf.__internal__.autograph.tf_convert(fn, context, convert_by_default=False)


def local_index(runtime: TensorFlowRuntime) -> int:
    """The index, among this worker's replicas, of the one that runs in this thread, as a Python number."""
    if len(runtime.devices) == 1:
        return 0
    replica_id = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
    return int(replica_id) - runtime.replica_ids[0]


def function(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a `tf.function` that is traced for few shapes.

    Without AutoGraph, unless it is asked for: a portable function's `if` and `for` are Python's.
    """
    return tf.function(fn, **{"reduce_retracing": True, "autograph": False, **options})


def value_and_grad(fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool) -> Callable[..., Any]:
    """Returns a function that gives a loss and its gradients, by `tf.GradientTape`."""

    @tf.autograph.experimental.do_not_convert
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with tf.GradientTape() as tape:
            loss, aux = split_aux(converted(fn)(*args, **kwargs), has_aux)
            check_loss(loss)
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        return ((loss, aux) if has_aux else loss), dense

    return wrapper
