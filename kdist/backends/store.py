"""`Store`: the key-value store that the workers of a cluster share; each engine has one, and the chief holds it."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Store(ABC):
    """Values under keys. They outlive neither the chief nor the job, and may be of any length."""

    @abstractmethod
    def set(self, key: str, data: bytes) -> None:
        """Leaves data under a key that nobody has used, or that was deleted."""

    @abstractmethod
    def get(self, key: str, seconds: float = 0.0) -> bytes | None:
        """Returns the data under a key; `None` if nobody has left any within so many seconds."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes a key."""
