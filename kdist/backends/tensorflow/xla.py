"""XLA in the replicas: compiles a model's forward pass, and TensorFlow then also compiles the backward pass.

Reductions over replicas stay outside, because XLA cannot compile the collectives of `tf.distribute`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from kdist import keras_hooks
from kdist.arrays.types import Args, Function, Kwargs
from kdist.backends.contract import Runtime
from kdist.backends.tensorflow.replicas import CollectiveInXla, TensorFlowScope
from kdist.backends.tensorflow.served import shards_of
from kdist.communication.options import hint_ignored


def compiled_call(model: keras.Model, runtime: Runtime) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that compiles `model.call` with XLA if the user or, on GPUs, Keras requests it.

    It temporarily replaces an attribute of the instance while replicas trace a step.
    """
    original = model.call

    def call(*args: object, **kwargs: object) -> object:
        scope = keras_hooks.stateless_scope()
        if (
            not isinstance(scope, TensorFlowScope) or scope.in_xla
        ):  # Keras only computes shapes, or this is a nested call
            return original(*args, **kwargs)
        why = "XLA compiles only the outermost call of a model, with dense numeric tensors."
        parts = [part for variable in model.variables for part in shards_of(scope.local(variable))]
        if any("/job:ps/" in part.device for part in parts):
            why = "its variables are on parameter servers."
        elif scope.is_outermost and all(map(_can_compile, keras.tree.flatten((args, kwargs)))):
            try:
                return _compiled(scope, original, args, kwargs)
            except CollectiveInXla:
                why = "its layers use collectives in the forward pass, and XLA cannot compile them."
        hint_ignored(f"jit_compile=True of {model.name}", why, runtime.worker_index)
        return original(*args, **kwargs)

    # On CPUs, jit_compile="auto" would cost more than it gains.
    on_gpus = runtime.devices[0].startswith("gpu:")
    compiles = model.jit_compile and (on_gpus or keras_hooks.asks_for_jit(model))
    return keras_hooks.temporarily(model, call=call) if compiles else contextlib.nullcontext()


def _can_compile(leaf: object) -> bool:
    if not tf.is_tensor(leaf):
        return True  # a constant of the program
    return isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string and not hasattr(leaf, "_keras_mask")


def _compiled(scope: TensorFlowScope, original: Function, args: Args, kwargs: Kwargs) -> object:
    leaves = keras.tree.flatten((args, kwargs))
    losses, ids = list(scope.losses), {key: set(known) for key, (_, known) in scope.loss_ids.items()}
    made: list[Any] = []

    def forward(*tensors: tf.Tensor) -> tuple[list[object], list[object], list[object]]:
        left = iter(tensors)
        given = [next(left) if tf.is_tensor(leaf) else leaf for leaf in leaves]
        own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), given)
        result = original(*own_args, **own_kwargs)
        outputs = keras.tree.flatten(result)
        made[:] = [result, scope.losses[len(losses) :]]
        return outputs, [getattr(leaf, "_keras_mask", None) for leaf in outputs], made[1]

    scope.in_xla = True
    try:
        compiled = tf.function(forward, jit_compile=True, autograph=False)
        outputs, masks, added = compiled(*filter(tf.is_tensor, leaves))
    except CollectiveInXla:
        scope.losses[:] = losses
        for key, (_, known) in scope.loss_ids.items():
            known.intersection_update(ids.get(key, ()))
        raise
    finally:
        scope.in_xla = False
    # Keras finds layers' losses by `id` and masks by an attribute, so pass the outer tensors' on.
    scope.losses[:] = [*losses, *added]
    for inner, outer in zip(made[1], added, strict=True):
        for _, known in scope.loss_ids.values():
            if id(inner) in known:
                known.remove(id(inner))  # another loss may get this id
                known.add(id(outer))
    for leaf, mask in zip(outputs, masks, strict=True):
        if mask is not None:
            leaf._keras_mask = mask
    return keras.tree.pack_sequence_as(made[0], outputs)
