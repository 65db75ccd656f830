"""Tests whether a number is a mean or a sum over the rows of a batch, from its values for parts of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np

from kdist.arrays.row_exchange import gather_rows
from kdist.arrays.rows import num_rows
from kdist.backends.aggregation import NotesAdditions
from kdist.backends.contract import ReplicaBatches
from kdist.backends.replica import Replica, RowShare

if TYPE_CHECKING:
    from kdist.context import StrategyLike


# Relative tolerances. GPUs may multiply with 10 bits. Numbers that are not means or sums differ by far more.
_TOLERANCE = 2e-3
_TOLERANCE_OF_HALVES = 3e-2

MEAN, SUM, COUPLES = "mean", "sum", "couples"
# The test failed, for example because an argument has no axis for the rows of the batch.
UNCHECKED = "unchecked"
# `None`: the number is 0 or random, or the function requests the rows of other replicas. It counts as a mean.
Verdict = str | None
# The positional and the keyword arguments.
Call = tuple[tuple[object, ...], dict[str, object]]


def agreed(verdicts: Iterable[Verdict]) -> Verdict:
    """Combines the verdicts of several calls or workers on the same number. Ignores `None`."""
    said = set(verdicts) - {None}
    tested = said - {UNCHECKED}
    return COUPLES if len(tested) > 1 else next(iter(tested or said), None)


class Sample:
    """The rows to test with, as a whole and in two parts: of one replica, or of all if these are too few."""

    def __init__(self, strategy: StrategyLike, model: keras.Model, batch: ReplicaBatches) -> None:
        runtime = strategy.runtime
        part = batch.parts[0]
        # One row has no parts. If the batch has only one, all replicas have a copy, which gives enough rows.
        if any(stop - first < 2 for first, stop in batch.split):
            part = gather_rows(runtime.group, batch.parts)
        # A copy in separate memory.
        self.batch = runtime.place([part] + [None] * (len(runtime.devices) - 1))[0]
        self.num_rows = num_rows(self.batch)
        self._strategy = strategy
        # The parts differ in size, so that an unweighted mean of means does not look like a mean.
        middle = max(1, self.num_rows // 3)
        self._parts = (slice(0, middle), slice(middle, self.num_rows))
        self._shares = (middle / self.num_rows, 1 - middle / self.num_rows)
        is_half = model.compute_dtype in ("float16", "bfloat16")
        self._tolerance = _TOLERANCE_OF_HALVES if is_half else _TOLERANCE

    def judge(self, numbers: Callable[..., Sequence[object]], call: Call) -> list[Verdict]:
        """Returns a verdict on each number that a function computes from the arguments of a call."""

        tensors = [leaf for leaf in keras.tree.flatten(call) if _has_rows(leaf)]
        if len({leaf.shape[0] for leaf in tensors}) > 1:
            raise ValueError("The arguments have different numbers of rows.")

        def of(rows: slice) -> list[np.ndarray]:
            args, kwargs = keras.tree.map_structure(lambda leaf: self._take(leaf, rows), call)
            values = [keras.ops.cast(value, "float32") for value in numbers(*args, **kwargs)]
            return [np.asarray(keras.ops.convert_to_numpy(value)) for value in values]

        with Unwritten() as scope:
            whole, parts = of(slice(None)), []
            for rows, share in zip(self._parts, self._shares, strict=True):
                with _Part(self._strategy, share, scope):
                    parts.append(of(rows))
            again = of(slice(None))
        return [self._verdict(*values) for values in zip(whole, *parts, again, strict=True)]

    def _take(self, leaf: Any, rows: slice) -> Any:
        if not _has_rows(leaf):
            return leaf
        factor, rest = divmod(leaf.shape[0], self.num_rows)
        if rest or not factor:
            raise ValueError("An argument has a different number of rows than the batch.")
        if rows.stop is not None:  # a layer may see several rows per row of the batch, such as its time steps
            rows = slice(rows.start * factor, rows.stop * factor)
        return keras.ops.copy(leaf[rows])  # Keras multiplies weights in place on PyTorch

    def _verdict(
        self, whole: np.ndarray, first: np.ndarray, second: np.ndarray, again: np.ndarray
    ) -> Verdict:
        margin = self._tolerance * (abs(whole) + abs(first) + abs(second))
        if not np.isfinite(margin).all() or (abs(whole - again) > margin).any():
            return None  # the number is random or not finite
        is_mean = (abs(self._shares[0] * first + self._shares[1] * second - whole) <= margin).all()
        is_sum = (abs(first + second - whole) <= margin).all()
        if is_mean:
            return None if is_sum else MEAN
        return SUM if is_sum else COUPLES


def _has_rows(leaf: Any) -> bool:
    return keras.ops.is_tensor(leaf) and bool(leaf.shape) and leaf.shape[0] != 1


class Unwritten(NotesAdditions, keras.StatelessScope):
    """A scope in which assignments to variables are discarded."""

    untracked = contextlib.nullcontext

    def __init__(self) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)


class _Part(Replica):
    """A simulated replica with a part of the rows."""

    def __init__(self, strategy: StrategyLike, share: float, scope: Unwritten) -> None:
        super().__init__(strategy, 0, 2, RowShare(share, 1.0, share))
        self.scope = scope

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError("The function, or Keras, requests the rows of other replicas itself.")

    all_reduce_sum = all_reduce_with_gradient = gather_tensor = merge_call = _refuse
