"""Gradients that the replicas keep on TensorFlow until the optimizer needs their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from kdist import keras_hooks
from kdist.backends.kept_gradients import KeptInReplicas

if TYPE_CHECKING:
    from kdist.backends.tensorflow.core import TensorFlowCore


class TensorFlowKeptGradients(KeptInReplicas):
    """Gradients that the replicas on TensorFlow keep."""

    def __init__(self, runtime: TensorFlowCore, model: keras.Model) -> None:
        super().__init__(runtime, model)
        self._sums: list[list[tf.Variable]] = []
        with keras_hooks.without_scope(), tf.init_scope(), runtime.suspended():
            for name in runtime.devices:
                with tf.device(name):
                    zeros = [tf.zeros(v.shape, v.dtype) for v in model.trainable_variables]
                    self._sums.append([tf.Variable(zero, trainable=False) for zero in zeros])

    def add(
        self, local_index: int, positions: Sequence[int], gradients: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Adds to variables, which each trace of the step captures."""
        sums = [self._sums[local_index][position] for position in positions]
        for variable, gradient in zip(sums, gradients, strict=True):
            variable.assign_add(gradient)
        return [variable.read_value() for variable in sums]

    def clear(self, local_index: int, positions: Sequence[int]) -> None:
        for position in positions:
            variable = self._sums[local_index][position]
            variable.assign(tf.zeros_like(variable))

    def take(self) -> list[tf.Tensor]:
        totals = [tf.add_n([part.read_value() for part in parts]) for parts in zip(*self._sums, strict=True)]
        for index, sums in enumerate(self._sums):
            self.clear(index, range(len(sums)))
        return totals
