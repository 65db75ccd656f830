"""`TensorFlowRuntime`: the replicas and workers of a strategy, and the code that runs in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import values as native_values

from kdist.arrays.types import Shape
from kdist.backends.contract import StepFunction
from kdist.backends.tensorflow import functions, iteration, steps
from kdist.backends.tensorflow.core import TensorFlowCore
from kdist.values import PerReplica


class PerReplicaSpec(native_values.PerReplicaSpec):
    """The `tf.TypeSpec` of a `kdist.PerReplica`, as `tf.distribute` has for its own `PerReplica`."""

    value_type = property(lambda self: PerReplica)

    def _to_components(self, value: PerReplica) -> tuple[object, ...]:
        return value.values

    def _from_components(self, components: Sequence[object]) -> PerReplica:
        return PerReplica(components)


class TensorFlowRuntime(TensorFlowCore):
    """Runs functions and steps in the replicas of the native strategy."""

    run = functions.run

    def traced(self, iterator: Any) -> iteration.GraphIterator | None:
        """Returns an iterator that reads when the graph runs; `None` in eager mode."""
        return None if tf.executing_eagerly() else iteration.traced(iterator)

    def element_of(self, iterator: Any) -> iteration.Element:
        """Returns the description that all iterators of one trace of a `tf.function` share."""
        return iteration.Element.of(iterator)

    def element_spec(self, part: object, inner_shapes: list[Shape] | None) -> Any:
        """Returns `tf.TypeSpec`s, which can be the signature of a `tf.function`."""
        number = len(self.devices)
        element = iteration.Element(self, self.place([part] * number)[0], inner_shapes)
        return element.packed(
            element.specs if number == 1 else [PerReplicaSpec(*[spec] * number) for spec in element.specs]
        )

    def begin_loop(self) -> None:
        """Raises an error in a graph, because AutoGraph has not replaced this loop."""
        if not tf.executing_eagerly():
            raise iteration.LoopInGraphError

    def place(self, parts: Sequence[object]) -> list[object]:
        """Copies one batch per local replica to the replica's device."""
        placed = []
        for part, name in zip(parts, self.devices, strict=True):
            with tf.device(name):
                placed.append(None if part is None else keras.tree.map_structure(steps.on_device, part))
        return placed

    def step_function(self, model: keras.Model, kind: str) -> StepFunction:
        """Returns a function that runs the steps of the model in every replica."""
        return steps.TensorFlowSteps(self, model, kind)
