"""Tests at the first batch whether custom losses, layers and metrics compute sums over the rows.

On TensorFlow and PyTorch, a replica only sees its own rows. kdist assumes that a custom loss, or a loss that
a layer adds, is a mean over them. To check this, the probe compares the value for some rows with the values
for two parts of these rows. If the two values add up, the loss is a sum, and kdist adds it up from then on.
If it is not a mean either, it couples the rows, so kdist cannot combine the values of the replicas and warns.

The probe runs outside the replicas on the rows of one replica, and changes no state. Keras's own losses,
layers and metrics need no probe. `KDIST_PROBE=0` disables it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kdist import keras_hooks
from kdist.backends.contract import ReplicaBatches, StepFunction
from kdist.backends.messages import gather
from kdist.cluster import environment
from kdist.data import prefetch
from kdist.training import generator_states
from kdist.training.own_numbers import are_sums, note_calls, owns_of
from kdist.training.verdicts import COUPLES, UNCHECKED, Sample, Verdict, agreed

if TYPE_CHECKING:
    import keras

    from kdist.context import StrategyLike

# Modules between this one and the user's call of `fit`.
_BETWEEN = ("kdist", "keras", "weakref", "contextlib", "functools")
# The labels for which kdist has already warned, by model.
_said: weakref.WeakKeyDictionary[keras.Model, set[str]] = weakref.WeakKeyDictionary()


def at_first_batch(
    function: StepFunction, strategy: StrategyLike, model: keras.Model, kind: str
) -> StepFunction:
    """Returns a step function that first probes the model, if its replicas see only their own rows."""
    runtime = strategy.runtime
    if kind == "predict" or runtime.sees_all_rows or runtime.num_replicas == 1:
        return function
    return _Probing(function, strategy, model, kind == "train")


class _Probing(StepFunction):
    def __init__(
        self, function: StepFunction, strategy: StrategyLike, model: keras.Model, training: bool
    ) -> None:
        self._function = function
        self._strategy = strategy
        self._model = weakref.ref(model)  # weak, because the model owns this function
        self._training = training
        self._is_due = True
        # Per step function, because a layer may add different losses in training and in validation.
        self._sums: weakref.WeakKeyDictionary[object, tuple[bool, ...]] = weakref.WeakKeyDictionary()

    def __enter__(self) -> StepFunction:
        self._function.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc: object) -> None:
        self._function.__exit__(kind, *exc)

    def __call__(self, batches: Sequence[ReplicaBatches]) -> object:
        """Runs the steps."""
        if self._is_due:
            self._is_due = False
            self._sums.update(_probe(self._strategy, self._model(), batches[0], self._training))
        for owner, sums in self._sums.items():
            keras_hooks.add_up(owner, sums)
        return self._function(batches)

    def sync(self) -> None:
        self._function.sync()

    def keep_gradients(self, keeps: bool) -> None:
        self._function.keep_gradients(keeps)


def _probe(
    strategy: StrategyLike, model: keras.Model, batch: ReplicaBatches, training: bool
) -> Iterator[tuple[object, tuple[bool, ...]]]:
    """Yields owners of numbers, and which of their numbers are sums. Warns about numbers that couple rows."""
    runtime = strategy.runtime
    # All workers have the same list, in the same order.
    owns = owns_of(model) if keras_hooks.is_built(model) else []
    if not owns:
        return
    verdicts: list[list[Verdict]] = [[] for _ in owns]
    if environment.get("KDIST_PROBE") != "0":
        # Not while a thread reads, because the data would then draw the same numbers again.
        drawn = None if prefetch.is_reading() else generator_states.capture()
        # Ignored, because the step raises the same error, unless the probe does not apply to this data.
        with contextlib.suppress(Exception), runtime.scope():
            sample = Sample(strategy, model, batch)
            with keras_hooks.kept_buffers(model):
                note_calls(model, owns, sample.batch, training)
                verdicts = [own.judge(sample) for own in owns]
        if drawn is not None:
            generator_states.restore(drawn)
    for own, said in zip(owns, zip(*gather(runtime, verdicts), strict=True), strict=True):
        numbers = [agreed(one) for one in itertools.zip_longest(*said)]
        if own.is_added_up and any(numbers):
            yield own.owner, are_sums(numbers)
        couples = COUPLES in numbers
        if (
            (couples or UNCHECKED in numbers)
            and runtime.worker_index == 0
            and own.label not in _said.setdefault(model, set())
        ):
            _said[model].add(own.label)
            warnings.warn(
                f"{own.label} {'gives' if couples else 'may give'} different results with "
                f"{runtime.num_replicas} replicas than on one device. "
                f"{own.reason if couples else own.doubt} {own.hint} "
                "With one replica, or with KERAS_BACKEND=jax, it computes over all rows. "
                "Set KDIST_PROBE=0 to skip this check.",
                stacklevel=_level_of_the_user(),
            )


def _level_of_the_user() -> int:
    """Returns the `stacklevel` of a warning of the caller, so that it names the line of the user."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    return level
