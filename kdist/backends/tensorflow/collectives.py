"""Sums of the workers of one machine in shared memory, which graphs call as a Python function."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from kdist.arrays.memory import aligned_empty
from kdist.communication.shared_memory import SharedMemory


class SumsOfGraphs:
    """Sums tensors of the workers in shared memory, in graphs and outside of them.

    All workers must sum in the same order. TensorFlow does not order branches, loops and functions unless they write
    to one variable. The native collectives use the variable `_ordering_token` for this, and so do these sums.

    Source: https://www.tensorflow.org/api_docs/python/tf/numpy_function

    Raises:
        AttributeError: If this version of TensorFlow has no such variables.
    """

    def __init__(self, memory: SharedMemory, native: tf.distribute.Strategy) -> None:
        self._memory = memory
        extended = native.extended
        both = extended._cross_device_ops, extended._host_cross_device_ops
        self._tokens = [launcher._ordering_token.handle for ops in both for launcher in ops._launchers]
        self._failure: Exception | None = None

    def failure_of(self, text: str) -> Exception | None:
        """Returns the error of a sum, given TensorFlow's error, which contains only its text."""
        failed = self._failure is not None and str(self._failure).split("\n", 1)[0] in text
        return self._failure if failed else None

    def can_sum(self, dtype: tf.DType) -> bool:
        """Returns whether tensors of this dtype can be summed."""
        return self._memory.can_sum(dtype.as_numpy_dtype)

    def __call__(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor]:
        """Sums tensors of any shapes and dtypes."""
        if not tensors:
            return []
        # The methods of a variable would also record it for gradients.
        reads = [tf.raw_ops.ReadVariableOp(resource=token, dtype=tf.float32) for token in self._tokens]
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]  # of `IndexedSlices`
        with tf.control_dependencies(reads):
            sums = tf.nest.flatten(tf.numpy_function(self._sum, tensors, [t.dtype for t in tensors]))
        with tf.control_dependencies(sums):
            for token in self._tokens:
                tf.raw_ops.AssignVariableOp(resource=token, value=tf.constant(0.0))
        return [tf.ensure_shape(total, tensor.shape) for total, tensor in zip(sums, tensors, strict=True)]

    def _sum(self, *arrays: np.ndarray) -> list[np.ndarray]:
        # TensorFlow does not copy aligned arrays.
        results = [aligned_empty(array.shape, array.dtype) for array in arrays]
        try:
            for dtype in dict.fromkeys(array.dtype for array in arrays):
                members = [i for i, array in enumerate(arrays) if array.dtype == dtype]
                flat, flat_results = ([those[i].reshape(-1) for i in members] for those in (arrays, results))
                self._memory.sum_all(flat, flat_results, " ".join(str(arrays[i].shape) for i in members))
        except Exception as error:
            self._failure = error
            raise
        return results
