"""Where workers on PyTorch say that they wait for each other: the store in which they have met."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from kdist.backends.stalls import Board


class StoreBoard(Board):
    """Who waits for whom, in the store of the cluster.

    Args:
        store: The store.
        num_workers: How many workers there are.
        worker_index: Which of them this one is.
        is_pending: Says whether a collective is under way.
        farewell: Tells the others that this worker has hung.
        lost: Names a worker that has died.
    """

    def __init__(
        self,
        store: dist.Store,
        num_workers: int,
        worker_index: int,
        is_pending: Callable[[], bool],
        farewell: Callable[[], None],
        lost: Callable[[], str | None],
    ) -> None:
        self._store = store
        self._mine = f"waits/{worker_index}"
        self._others = [i for i in range(num_workers) if i != worker_index]
        self._is_pending = is_pending
        self._farewell = farewell
        self._lost = lost

    def say(self, text: str | None) -> None:
        """Says where this worker waits for the others."""
        if text is None:
            self._store.delete_key(self._mine)
        else:
            self._store.set(self._mine, text)

    def read(self) -> dict[int, str]:
        """Returns the other workers that wait, and where."""
        keys = {index: f"waits/{index}" for index in self._others}
        return {i: self._store.get(key).decode() for i, key in keys.items() if self._store.check([key])}

    def waits_in(self, filename: str) -> bool:
        """Says whether a collective is under way."""
        return self._is_pending()

    def farewell(self, text: str) -> None:
        """Tells the others that this worker has hung."""
        self._farewell()

    def lost(self) -> str | None:
        """Names a worker that has died: outside of collectives, nobody else ends this one."""
        return self._lost()
