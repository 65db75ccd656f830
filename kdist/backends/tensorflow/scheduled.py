"""Scheduled functions on TensorFlow, compiled to programs that take and return tensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.arrays.types import Args, Function, Kwargs
from kdist.backends.coordination import RemoteValue, on_worker
from kdist.backends.tensorflow.effects import Plan
from kdist.backends.tensorflow.iteration import spec_of_any_rows
from kdist.backends.tensorflow.per_worker import Values
from kdist.backends.tensorflow.steps import as_tensor


class Call:
    """A call of a function. Its tensors are inputs of the program, and other arguments are constants."""

    def __init__(self, fn: Function, args: Args, kwargs: Kwargs) -> None:
        self.tensors: list[tf.Tensor | Values] = []
        leaves = [self._leaf(leaf) for leaf in keras.tree.flatten((args, kwargs))]
        structure = keras.tree.map_structure(lambda leaf: 0, (args, kwargs))
        any_rows = getattr(fn, "any_rows", False)
        specs = [_spec(tensor, any_rows) for tensor in self.tensors]
        self.signature = Signature(structure, leaves, specs)

    def _leaf(self, leaf: object) -> object:
        leaf = leaf.fetch() if isinstance(leaf, RemoteValue) else leaf
        if isinstance(leaf, (np.ndarray, np.generic)):
            leaf = as_tensor(np.asarray(leaf))
        if isinstance(leaf, keras.Variable) or not (isinstance(leaf, Values) or tf.is_tensor(leaf)):
            return leaf
        self.tensors.append(leaf)
        return _TENSOR


@dataclass(frozen=True)
class Signature:
    """The properties that all calls of one program share.

    Args:
        structure: The structure of the arguments.
        leaves: The constant arguments, with a marker in place of each tensor.
        specs: The specs of the tensors.
    """

    structure: object
    leaves: Sequence[object]
    specs: Sequence[tf.TypeSpec]

    @property
    def key(self) -> tuple[object, ...]:
        """The key of the program among the programs of one function. Only plain values can be equal to others."""
        leaves = tuple(
            (type(leaf), repr(leaf)) if isinstance(leaf, _PLAIN) else id(leaf) for leaf in self.leaves
        )
        return repr(self.structure), leaves, repr(self.specs)

    def arguments(self, tensors: Sequence[tf.Tensor]) -> tuple[tuple[object, ...], dict[str, object]]:
        present = iter(tensors)
        leaves = [next(present) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return keras.tree.pack_sequence_as(self.structure, leaves)


def _spec(tensor: tf.Tensor | Values, any_rows: bool) -> tf.TypeSpec:
    if isinstance(tensor, Values):
        return tensor.spec
    return spec_of_any_rows(tensor) if any_rows else tf.type_spec_from_value(tensor)


_TENSOR = object()
_PLAIN = (bool, bytes, complex, float, int, str, type(None))


_PROGRAMS = "_kdist_programs"


def compiled(coordination: Any, fn: Function, signature: Signature) -> Compiled:
    """Returns a function's program for a signature. The program is cached on the function."""
    # All objects share the function of a method. `functools.wraps` and `copy.copy` copy the cache of a function.
    function, owner = getattr(fn, "__func__", fn), getattr(fn, "__self__", None)
    known = (
        vars(function).setdefault(_PROGRAMS, weakref.WeakKeyDictionary()) if hasattr(fn, "__dict__") else {}
    )
    programs, key = known.setdefault(coordination, {}), (id(function), id(owner), *signature.key)
    if key not in programs:
        programs[key] = Compiled(coordination, fn, signature)
    return programs[key]


class Compiled:
    """A program for workers, which calls with this signature share, and its changes of variables."""

    plan: Plan

    def __init__(self, coordination: Any, fn: Function, signature: Signature) -> None:
        self._shapes: list[Any] = []
        self._structure: object = None
        self._kept = fn, signature  # the key of this program contains ids of their objects
        python_function, trace = _python_function(fn), coordination.trace

        @tf.autograph.experimental.do_not_convert
        def flat(worker: tf.Tensor, *tensors: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            args, kwargs = signature.arguments(tensors)
            with trace() as scope, on_worker(worker):
                outputs = self._outputs(python_function(*args, **kwargs))
            self.plan, messages = scope.effects()
            return outputs, messages

        specs = tf.TensorSpec([], tf.int32), *signature.specs
        try:
            self.program = tf.function(flat, autograph=False).get_concrete_function(*specs)
        except tf.errors.OperatorNotAllowedInGraphError:  # as in `kdist.function`
            python_function = tf.autograph.to_graph(python_function)
            self.program = tf.function(flat, autograph=False).get_concrete_function(*specs)
        """Takes the index of a worker and tensors. Returns the outputs, and the messages to servers."""

    def _outputs(self, result: object) -> list[tf.Tensor]:
        """Packs all scalars into one tensor per dtype, because every tensor is sent separately."""
        self._structure = keras.tree.map_structure(lambda leaf: 0, result)
        self._shapes = []  # TensorFlow traces a second time if the first trace created variables
        tensors: list[tf.Tensor] = []
        flat: dict[tf.DType, tuple[int, list[tf.Tensor]]] = {}
        for leaf in keras.tree.flatten(result):
            if isinstance(leaf, keras.Variable):
                leaf = tf.convert_to_tensor(leaf)
            if not tf.is_tensor(leaf):
                self._shapes.append((None, leaf))
            elif leaf.shape == ():
                if leaf.dtype not in flat:
                    flat[leaf.dtype] = len(tensors), []
                    tensors.append(None)
                position, members = flat[leaf.dtype]
                self._shapes.append((position, len(members)))
                members.append(leaf)
            else:
                self._shapes.append((len(tensors), None))
                tensors.append(leaf)
        for position, members in flat.values():
            tensors[position] = tf.stack(members)
        return tensors

    def packed(self, arrays: Sequence[np.ndarray]) -> object:
        """Converts the outputs of the program to the function's result."""
        leaves = []
        for position, place in self._shapes:
            if position is None:
                leaves.append(place)
            else:
                leaves.append(arrays[position] if place is None else arrays[position][place])
        return keras.tree.pack_sequence_as(self._structure, leaves)


def _python_function(fn: Function) -> Function:
    """Returns the function to trace. Applies AutoGraph to a `tf.function` without `autograph=False`."""
    if isinstance(fn, tf.types.experimental.PolymorphicFunction):
        return (
            tf.autograph.to_graph(fn.python_function)
            if getattr(fn, "_autograph", True)
            else fn.python_function
        )
    return getattr(fn, "python_function", fn)
