"""The key-value store of `torch.distributed`, which the workers used for the rendezvous."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from kdist.backends.store import Store


class GroupStore(Store):
    """A `Store` on top of the store of `torch.distributed`."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, data: bytes) -> None:
        """Stores data under a key."""
        self._store.set(key, data)

    def get(self, key: str, seconds: float = 0.0) -> bytes | None:
        """Returns the data under a key, or `None` if there is no data within `seconds`."""
        if not self._store.check([key]):
            if not seconds:
                return None
            try:
                self._store.wait([key], timedelta(seconds=seconds))
            except dist.DistStoreError:
                return None
        return bytes(self._store.get(key))

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._store.delete_key(key)
