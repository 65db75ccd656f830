"""The TensorFlow backend: `tf.distribute` underneath, with the global-batch contract on top."""

from __future__ import annotations

from kdist.backends.tensorflow.backend import TensorFlowBackend


def create_backend() -> TensorFlowBackend:
    """Returns the backend; called once, by `kdist.backends`."""
    return TensorFlowBackend()
