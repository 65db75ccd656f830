"""A source for `torch.utils.data.DataLoader`, on every backend.

A map-style loader is sharded by index: each worker loads only the samples that its replicas need. All workers
must therefore draw the same order. A loader with a seeded generator keeps its order. For all other loaders,
the order follows from a seed that kdist draws.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kdist.arrays import rows
from kdist.data.sources.source import Choice, Source, with_share_of_files
from kdist.errors import DatasetError

if TYPE_CHECKING:
    from kdist.arrays.types import Structure

# The most indices of a sampler without a length that are read in advance: about a second, and 0.4 GB.
_MOST_INDICES = 10_000_000


def random_states(loader: Any) -> list[str]:
    """Returns the states of PyTorch's global generator and of the loader's own generators, as text."""
    states = [generator.get_state().numpy().tobytes() for generator in _generators(loader)]
    return [base64.b64encode(state).decode() for state in states]


def set_random_states(loader: Any, states: Iterable[str]) -> None:
    """Restores states from `random_states`, of this or another process."""
    import torch

    for generator, state in zip(_generators(loader), states, strict=False):
        generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))


def _generators(loader: Any) -> Iterable[Any]:
    import torch

    inner = getattr(loader.batch_sampler, "sampler", None)
    own = [getattr(owner, "generator", None) for owner in (loader, loader.sampler, inner)]
    found = (torch.default_generator, *(one for one in own if isinstance(one, torch.Generator)))
    return {id(generator): generator for generator in found}.values()


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the generators from which samplers draw, and restores their states at the end."""
    import torch

    # Seeds only the CPU's generator, because `torch.manual_seed` also seeds GPUs.
    generator = torch.default_generator
    states = generator.get_state(), random.getstate(), np.random.get_state()
    generator.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


class TorchLoaderSource(Source):
    """Reads a PyTorch `DataLoader`."""

    kind = "a DataLoader"

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        import torch
        from torch.utils.data import DataLoader, IterableDataset

        self._by_index = (
            dataset.batch_sampler is not None
            and not isinstance(dataset.dataset, IterableDataset)
            and type(dataset).__iter__ is DataLoader.__iter__  # a subclass may create other batches
        )
        # Drawn like the seed of a loader's iterator, so `torch.manual_seed` makes the order reproducible.
        self.seed = int(torch.empty((), dtype=torch.int64).random_().item()) % 2**62
        """The seed of the order in all epochs. All workers use the chief's seed."""
        sampler = getattr(dataset.batch_sampler, "sampler", dataset.sampler)
        self._generator: Any = getattr(sampler, "generator", None)
        # The generator's state before each epoch, as far as it is known.
        self._states = {0: self._generator.get_state()} if self._generator is not None else {}
        self._kept: Any = None  # the loader that keeps its worker processes over all epochs
        self._kept_batches: list[list[int]] = []
        self._kept_is_free = threading.Lock()

    @property
    def num_batches(self) -> int | None:
        """The loader's length, or `None` if it is unknown or only a guess."""
        if not self._by_index:
            return None  # the length of an iterable dataset is its author's guess
        try:
            return len(self.dataset)
        except TypeError:  # a sampler without a length
            return None

    def batches(self, epoch: int, start: int = 0) -> Iterator[Structure]:
        if self._by_index:
            yield from self._loaded(self._indices(epoch)[start:])
            return
        self._set_epoch(epoch)
        with _seeded(self.seed + epoch):
            batches = iter(self.dataset)
            first = list(itertools.islice(batches, 1))
        yield from itertools.islice(itertools.chain(first, batches), start, None)

    def chosen(self, epoch: int, start: int, choose: Choice) -> Iterator[tuple[int, Structure, Structure]]:
        """Loads only the chosen samples."""
        if not self._by_index:
            yield from super().chosen(epoch, start, choose)
            return
        batches = self._indices(epoch)[start:]
        parts = [choose(len(indices)) for indices in batches]
        wanted = [
            indices if part is None else indices[slice(*part)]
            for indices, part in zip(batches, parts, strict=True)
        ]
        for indices, part, batch in zip(batches, parts, self._loaded(wanted), strict=True):
            host = rows.to_host(batch)
            yield (len(indices), None, host) if part is None else (len(indices), host, None)

    def _indices(self, epoch: int) -> list[list[int]]:
        """Returns the sample indices of each batch of an epoch, which are equal on all workers."""
        self._set_epoch(epoch)
        if self._generator is not None:
            return self._indices_by_generator(epoch)
        with _seeded(self.seed + epoch):
            return self._next_pass()

    def _indices_by_generator(self, epoch: int) -> list[list[int]]:
        import torch

        known = max(e for e in self._states if e <= epoch)
        indices: list[list[int]] = []
        for e in range(known, epoch + 1):
            self._generator.set_state(self._states[e])
            if self.dataset.generator is self._generator:
                # Each iteration of a loader draws the seed of its worker processes first.
                torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            indices = self._next_pass()
            self._states[e + 1] = self._generator.get_state()
        return indices

    def _next_pass(self) -> list[list[int]]:
        left = _MOST_INDICES if self.num_batches is None else sys.maxsize
        batches: list[list[int]] = []
        for indices in self.dataset.batch_sampler:
            batches.append(list(indices))
            left -= len(batches[-1])
            if left < 0:
                raise DatasetError(
                    "The sampler of the DataLoader has no length and may be infinite: kdist has read "
                    f"{_MOST_INDICES:,} indices of one epoch.",
                    received={"sampler": type(getattr(self.dataset.batch_sampler, "sampler", None)).__name__},
                    hint="If the sampler is finite, add a method `__len__`. Otherwise, end each epoch after a number "
                    "of samples, or yield the samples from an IterableDataset.",
                )
        return batches

    def _set_epoch(self, epoch: int) -> None:
        batch_sampler = self.dataset.batch_sampler
        samplers: list[Any] = [self.dataset.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def share_of_files(self, num_workers: int, worker_index: int) -> Source:
        """Returns a source that reads only this worker's part of the `files` of the loader's dataset."""
        given = self.dataset
        if given.batch_size is None or self._by_index:
            raise DatasetError(
                "AutoShardPolicy.FILE cannot shard the DataLoader: it needs an IterableDataset and a batch_size.",
                received={"dataset": type(given.dataset).__name__, "batch_size": given.batch_size},
                hint="Use AutoShardPolicy.DATA, or `distribute_datasets_from_function`.",
            )
        share = with_share_of_files(given.dataset, self.kind, num_workers, worker_index)
        return TorchLoaderSource(
            self._new_loader(
                share,
                batch_size=given.batch_size,
                drop_last=given.drop_last,
                persistent_workers=given.persistent_workers,
            )
        )

    def _loaded(self, indices: list[list[int]]) -> Iterator[Structure]:
        """Yields the samples of each list of indices, as one batch each."""
        given = self.dataset
        persistent = given.persistent_workers and given.num_workers > 0
        # Worker processes serve only one iterator. A second iterator at the same time gets new processes.
        if not persistent or not self._kept_is_free.acquire(blocking=False):
            yield from self._new_loader(given.dataset, batch_sampler=indices)
            return
        try:
            self._kept_batches[:] = indices
            if self._kept is None:
                self._kept = self._new_loader(
                    given.dataset, batch_sampler=self._kept_batches, persistent_workers=True
                )
            yield from self._kept
        finally:
            self._kept_is_free.release()

    def _new_loader(self, dataset: Any, **own: Any) -> Any:
        """Returns a loader with the user's options, apart from the given ones."""
        from torch.utils.data import DataLoader

        given = self.dataset
        options = {
            name: getattr(given, name)
            for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
        }
        if given.num_workers:
            options["multiprocessing_context"] = given.multiprocessing_context
            options["prefetch_factor"] = given.prefetch_factor
        return DataLoader(dataset, **own, **options)
