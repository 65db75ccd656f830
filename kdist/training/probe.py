"""Finds out, at the first batch of a compiled model, which numbers of the user's are sums over the rows.

On TensorFlow and PyTorch a replica sees its own rows. What a loss of the user's returns, or a layer adds as a loss, is
taken for a mean over them: nothing says what it is. But its value on some rows and its values on two parts of them do.
If they add up to it, it is a sum, which is added up from then on. If their mean is not it either, it couples the rows,
and nobody can put it together from what the replicas have: a warning says so.

The probe computes outside of the replicas, on the rows of one of them, and writes to nothing. What is Keras's own needs
none. `KDIST_PROBE=0` leaves it out.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from kdist import keras_hooks
from kdist.backends.contract import ReplicaBatches, StepFunction
from kdist.backends.messages import gather
from kdist.cluster import environment
from kdist.training import generator_states
from kdist.training.own_numbers import are_sums, note_calls, owns_of
from kdist.training.verdicts import COUPLES, Sample, Verdict, agreed

# Of what each model was warned.
_said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def at_first_batch(function: StepFunction, strategy: Any, model: Any, kind: str) -> StepFunction:
    """Returns a step function of a kind ("train", …) that probes the model at its first batch, where that is of use."""
    runtime = strategy.runtime
    if kind == "predict" or runtime.sees_all_rows or runtime.num_replicas == 1:
        return function
    return _Probing(function, strategy, model, kind == "train")


class _Probing(StepFunction):
    def __init__(self, function: StepFunction, strategy: Any, model: Any, training: bool) -> None:
        self._function = function
        self._strategy = strategy
        self._model = weakref.ref(model)  # which owns this function
        self._training = training
        self._is_due = True
        # In training a layer may add other losses than in validation, for which there is another step function.
        self._sums: weakref.WeakKeyDictionary[Any, tuple[bool, ...]] = weakref.WeakKeyDictionary()

    def __enter__(self) -> StepFunction:
        self._function.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc: object) -> None:
        self._function.__exit__(kind, *exc)

    def __call__(self, batches: Sequence[ReplicaBatches]) -> Any:
        """Runs the steps."""
        if self._is_due:
            self._is_due = False
            self._sums.update(_probe(self._strategy, self._model(), batches[0], self._training))
        for owner, sums in self._sums.items():
            keras_hooks.add_up(owner, sums)
        return self._function(batches)

    def sync(self) -> None:
        """Makes the state visible."""
        self._function.sync()


def _probe(
    strategy: Any, model: Any, batch: ReplicaBatches, training: bool
) -> Iterator[tuple[Any, tuple[bool, ...]]]:
    """Warns of what couples the rows; yields what makes numbers, and which of them are sums."""
    runtime = strategy.runtime
    # The same ones in the same order on all workers.
    owns = owns_of(model) if keras_hooks.is_built(model) else []
    if not owns:
        return
    verdicts: list[list[Verdict]] = [[] for _ in owns]
    if environment.get("KDIST_PROBE") != "0":
        drawn = generator_states.capture()
        # What fails here fails in the step, too, where its error has its place; or it is not for this data.
        with contextlib.suppress(Exception), runtime.scope():
            sample = Sample(strategy, model, batch)
            with keras_hooks.kept_buffers(model):
                note_calls(model, owns, sample.batch, training)
                verdicts = [own.judge(sample) for own in owns]
        generator_states.restore(drawn)
    for own, said in zip(owns, zip(*gather(runtime, verdicts), strict=True), strict=True):
        numbers = [agreed(one) for one in itertools.zip_longest(*said)]
        if own.is_added_up and any(numbers):
            yield own.owner, are_sums(numbers)
        if (
            COUPLES in numbers
            and runtime.worker_index == 0
            and own.label not in _said.setdefault(model, set())
        ):
            _said[model].add(own.label)
            warnings.warn(
                f"{own.label} gives different results with {runtime.num_replicas} replicas than on one device. "
                f"{own.reason} {own.hint} With one replica, or with KERAS_BACKEND=jax, it computes over all rows. "
                "Set KDIST_PROBE=0 to skip this check.",
                stacklevel=2,
            )
