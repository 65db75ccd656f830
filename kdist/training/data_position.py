"""`DataPosition`, which tracks the position in the data, so that a new process can resume there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kdist import keras_hooks
from kdist.data.sources import is_tf_data
from kdist.training import generator_states

TAKEN: object = object()
"""A placeholder for a batch that was consumed before the interruption."""


class DataPosition:
    """Tracks the position in Keras's iterables of global batches, and restores it in a new process.

    A pass over the data ends with the epoch, unless `steps_per_epoch` defines the length of the epochs.

    Args:
        iterator: Keras's `EpochIterator`.
        continues: Whether a pass may continue in the next epoch.
    """

    def __init__(self, iterator: Any, continues: bool) -> None:
        self._iterator = iterator
        self._continues = continues
        self._records = False
        self._number = 0
        # The random states before the epoch define the order of a PyDataset; before the pass, of other data.
        self._before: dict[str, object] | None = None
        self._started: dict[str, object] | None = None
        self._begun: dict[str, object] | None = None
        self._resume: Mapping[str, Any] | None = None
        self._in_middle = False
        self._step = 0
        self._steps_seen = 0
        self.taken = 0
        """The number of consumed batches in the current pass."""

    def record(self) -> None:
        """Starts to track random states. Call it before the first epoch."""
        self._records = True

    def position(self) -> dict[str, Any]:
        """Returns the position in the data, as JSON."""
        return {
            "passes": self._number,
            "taken": self.taken,
            # At the end of a pass over arrays, Keras opens the next one. Its first batch draws the order,
            # after the validation and the callbacks of this epoch.
            "is_open": self._number > 0 and self.taken == 0,
            "begun": self._begun,
            "before": self._before,
            "started": self._started,
            "now": self._capture(),
        }

    def go_to(self, position: Mapping[str, Any], step: int) -> None:
        """Makes the next epoch resume at `position`, after `step` completed steps of the epoch."""
        taken = position["taken"]
        size = self._iterator.data_adapter.num_batches
        # At the end of an epoch, Keras starts a new pass if the old one has no batches left.
        is_over = step == 0 and size is not None and taken >= size
        is_open = position.get("is_open", False) or (taken > 0 and not is_over)
        self._resume = position
        self._in_middle = is_open and (step > 0 or self._continues)
        self._number = position["passes"] - self._in_middle
        self._step = step
        self._steps_seen = max(taken - step, 0) if self._in_middle else 0

    def before_epoch(self) -> None:
        """Restores random states after an interruption, before Keras prepares the data for an epoch."""
        if self._resume is not None:
            self._restore(self._resume["before" if self._in_middle else "now"])
            keras_hooks.forget_batches(self._iterator)  # they were created with other random states
        self._before = self._capture()

    def start(self, batches: Iterable[object]) -> Iterator[object]:
        """Starts a pass. After an interruption in the middle of a pass, skips the consumed batches."""
        resume, self._resume = self._resume, None
        if resume is not None:
            self._repeat(batches)
        if resume is not None and self._in_middle:
            self._restore(resume["started"])
        self._started = self._capture()
        self._number += 1
        self.taken = 0
        started = itertools.chain(self._note_begin(), iter(batches))
        if resume is None or not self._in_middle:
            return started
        self.taken = resume["taken"]
        if self.taken and resume.get("begun"):  # missing in backups of earlier versions
            self._restore(resume["begun"])
        rest = itertools.islice(started, self.taken, None)
        first = list(itertools.islice(rest, 1)) if self.taken else []  # this draws the order of the pass
        # A sampler draws from the loader's own generator again when it ends. "now" may contain this draw, because a
        # thread reads ahead, but the rest of the pass will repeat it.
        self._restore(resume["now"], with_own=False)
        return itertools.chain(first, rest)

    def _note_begin(self) -> Iterator[object]:
        self._begun = self._capture()
        yield from ()

    def _repeat(self, batches: Any) -> None:
        """Repeats the shuffles of earlier passes, because `tf.data` draws a new order in each iteration."""
        dataset = batches if is_tf_data(batches) else keras_hooks.dataset_of(self._iterator)
        if is_tf_data(dataset):
            for _ in range(self._number):
                next(iter(dataset), None)

    def counted(self, batches: Iterator[object]) -> Iterator[object]:
        """Yields `TAKEN` for each completed step of the epoch, and then the remaining batches."""
        step, self._step = self._step, 0
        keras_hooks.skip_steps(self._iterator, self._steps_seen)
        self._steps_seen = 0
        if step and self._in_middle:
            # Starts the pass now, even if it has no batches left. Otherwise, the next pass would resume here.
            batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
        for _ in range(step):
            yield TAKEN
        for batch in batches:
            self.taken += 1
            yield batch

    def _capture(self) -> dict[str, object] | None:
        loader = keras_hooks.torch_loader_of(self._iterator)
        return generator_states.capture(loader) if self._records else None

    def _restore(self, states: Mapping[str, Any], with_own: bool = True) -> None:
        generator_states.restore(states, keras_hooks.torch_loader_of(self._iterator), with_own)
