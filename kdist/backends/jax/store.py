"""The key-value store of JAX's coordination service."""

from __future__ import annotations

from typing import Any

import jax

from kdist.backends.store import Store


class ServiceStore(Store):
    """The store of the coordination service."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, data: bytes) -> None:
        """Stores data under a key."""
        self._client.key_value_set_bytes(key, data)

    def get(self, key: str, seconds: float = 0.0) -> bytes | None:
        """Returns the data under a key after waiting up to `seconds`, or `None`."""
        try:
            if seconds:
                return bytes(self._client.blocking_key_value_get_bytes(key, int(seconds * 1000)))
            return bytes(self._client.key_value_try_get_bytes(key))
        except jax.errors.JaxRuntimeError as error:
            if ("DEADLINE_EXCEEDED" if seconds else "NOT_FOUND") in str(error):
                return None
            raise

    def get_all(self, folder: str) -> dict[str, bytes]:
        """Returns all data under keys that begin with `folder` and a slash."""
        return {key: bytes(data) for key, data in self._client.key_value_dir_get_bytes(f"{folder}/")}

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._client.key_value_delete(key)
