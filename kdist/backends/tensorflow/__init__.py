"""The TensorFlow backend, which uses `tf.distribute` and adds exact global batches."""

from __future__ import annotations

from kdist.backends.tensorflow.backend import TensorFlowBackend


def create_backend() -> TensorFlowBackend:
    """Creates the backend. `kdist.backends` calls it once."""
    return TensorFlowBackend()
