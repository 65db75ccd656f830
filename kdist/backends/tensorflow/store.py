"""The key-value store of TensorFlow's coordination service."""

from __future__ import annotations

import base64

import tensorflow as tf
from tensorflow.python.eager import context as eager_context

from kdist.backends.store import Store

# How long to wait for what may not be there; TensorFlow cannot be asked without waiting.
_LEAST_MS = 300


class ServiceStore(Store):
    """The store that the coordination service keeps: of text that ends at a zero, so bytes are written as text."""

    def set(self, key: str, data: bytes) -> None:
        """Leaves data under a key."""
        eager_context.context().set_config_key_value(key, base64.b64encode(data).decode())

    def get(self, key: str, seconds: float = 0.0) -> bytes | None:
        """Waits for data, a moment at least."""
        try:
            text = eager_context.context().get_config_key_value(key, max(_LEAST_MS, int(seconds * 1000)))
        except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
            return None
        return base64.b64decode(text)

    def delete(self, key: str) -> None:
        """Removes a key."""
        eager_context.context().delete_config_key_value(key)
