"""`Passes`: how often data were started and how far they were read, so that a new process can go there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from kdist import keras_hooks
from kdist.data.sources import is_tf_data
from kdist.training import generator_states

TAKEN: Any = object()
"""Stands for a batch that was consumed before the job was interrupted."""


class Passes:
    """Notes what is read of Keras's iterables of global batches, and repeats it in a new process.

    A pass ends with the epoch, or goes on through several where `steps_per_epoch` says how long an epoch is.

    Args:
        iterator: Keras's iterator over epochs.
        continues: Whether a pass may go on in the next epoch.
    """

    def __init__(self, iterator: Any, continues: bool) -> None:
        self._iterator = iterator
        self._continues = continues
        self._records = False
        self._number = 0
        # Random states as the epoch begins, which order a PyDataset, and as the pass begins, which order all else.
        self._before: dict[str, Any] | None = None
        self._started: dict[str, Any] | None = None
        self._resume: Mapping[str, Any] | None = None
        self._in_middle = False
        self._step = 0
        self._steps_seen = 0
        self.taken = 0
        """Batches of the present pass that have been consumed."""

    def record(self) -> None:
        """From now on, notes random states too; to be called before the first epoch."""
        self._records = True

    def position(self) -> dict[str, Any]:
        """Returns, as JSON, where the reading is."""
        return {
            "passes": self._number,
            "taken": self.taken,
            "before": self._before,
            "started": self._started,
            "now": self._capture(),
        }

    def go_to(self, position: Mapping[str, Any], step: int) -> None:
        """Lets the next epoch, of which so many steps have been taken, go on where `position` was called."""
        taken = position["taken"]
        self._resume = position
        self._in_middle = taken > 0 and (step > 0 or self._continues)
        self._number = position["passes"] - self._in_middle
        self._step = step
        self._steps_seen = max(taken - step, 0) if self._in_middle else 0

    def before_epoch(self) -> None:
        """Called before Keras prepares the data for an epoch."""
        if self._resume is not None:
            generator_states.restore(self._resume["before" if self._in_middle else "now"])
            keras_hooks.forget_batches(self._iterator)  # made with other seeds
        self._before = self._capture()

    def start(self, batches: Any) -> Iterator[Any]:
        """Starts a pass; after an interruption in the middle of one, at the batch that comes next."""
        resume, self._resume = self._resume, None
        if resume is not None:
            self._repeat(batches)
        if resume is not None and self._in_middle:
            generator_states.restore(resume["started"])
        self._started = self._capture()
        self._number += 1
        self.taken = 0
        started = iter(batches)
        if resume is None or not self._in_middle:
            return started
        self.taken = resume["taken"]
        rest = itertools.islice(started, self.taken, None)
        first = list(itertools.islice(rest, 1))  # by now the order of the pass has been drawn
        generator_states.restore(resume["now"])
        return itertools.chain(first, rest)

    def _repeat(self, batches: Any) -> None:
        """A `tf.data.Dataset` that shuffles gives an order of its own at each iteration."""
        dataset = batches if is_tf_data(batches) else keras_hooks.dataset_of(self._iterator)
        if is_tf_data(dataset):
            for _ in range(self._number):
                next(iter(dataset), None)

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields `TAKEN` for each step of the epoch that was taken before, and the batches that are left."""
        step, self._step = self._step, 0
        keras_hooks.skip_steps(self._iterator, self._steps_seen)
        self._steps_seen = 0
        if step and self._in_middle:
            # Begins the pass, of which perhaps no batch is left that would: the next one is not to go on there.
            batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
        for _ in range(step):
            yield TAKEN
        for batch in batches:
            self.taken += 1
            yield batch

    def _capture(self) -> dict[str, Any] | None:
        return (
            generator_states.capture(keras_hooks.is_torch_loader(self._iterator)) if self._records else None
        )
