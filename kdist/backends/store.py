"""`Store`: the key-value store that the workers of a cluster share. The chief holds it."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Store(ABC):
    """Stores byte strings of any length under keys, until the chief or the job ends."""

    @abstractmethod
    def set(self, key: str, data: bytes) -> None:
        """Stores data under a key that is new or was deleted."""

    @abstractmethod
    def get(self, key: str, seconds: float = 0.0) -> bytes | None:
        """Returns the data under a key, or `None` if there is no data within `seconds`."""

    def get_all(self, folder: str) -> dict[str, bytes]:
        """Returns all data under keys that begin with `folder` and a slash, or nothing if the store cannot list."""
        return {}

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes a key."""
