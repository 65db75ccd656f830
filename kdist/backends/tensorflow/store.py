"""The key-value store of TensorFlow's coordination service."""

from __future__ import annotations

import base64

import tensorflow as tf
from tensorflow.python.eager import context as eager_context

from kdist.backends.store import Store

# The minimum wait for a key that may not exist. TensorFlow has no call that does not wait.
_LEAST_MS = 300


class ServiceStore(Store):
    """The store of the coordination service. Uses base64, because it stores text that ends at a zero byte."""

    def set(self, key: str, data: bytes) -> None:
        """Stores data under a key."""
        eager_context.context().set_config_key_value(key, base64.b64encode(data).decode())

    def get(self, key: str, seconds: float = 0.0) -> bytes | None:
        """Waits for data for at least 0.3 s; returns `None` if there is none."""
        try:
            text = eager_context.context().get_config_key_value(key, max(_LEAST_MS, int(seconds * 1000)))
        except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
            return None
        return base64.b64decode(text)

    def delete(self, key: str) -> None:
        """Removes a key."""
        eager_context.context().delete_config_key_value(key)
