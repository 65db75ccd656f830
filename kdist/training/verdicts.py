"""What a number is of the rows of a batch, by its values on some of them: a mean, a sum, or neither."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from kdist.arrays.rows import num_rows
from kdist.backends.aggregation import NotesAdditions
from kdist.backends.contract import ReplicaBatches
from kdist.backends.replica import Replica, RowShare

# Of the size of the numbers. What is neither mean nor sum is off by far more; GPUs multiply with 10 bits.
_TOLERANCE = 2e-3
_TOLERANCE_OF_HALVES = 3e-2

MEAN, SUM, COUPLES = "mean", "sum", "couples"
# `None`: it is 0, or random, or asks for the other replicas' rows itself. Then it counts as a mean.
Verdict = str | None
# The arguments by position and by name.
Call = tuple[Any, Any]


def agreed(verdicts: Iterable[Verdict]) -> Verdict:
    """Returns what all say who have seen it."""
    said = set(verdicts) - {None}
    return COUPLES if len(said) > 1 else next(iter(said), None)


class Sample:
    """The rows that one replica has, as a whole and in two parts.

    Args:
        strategy: The strategy of the model.
        model: A model.
        batch: What its step takes.
    """

    def __init__(self, strategy: Any, model: Any, batch: ReplicaBatches) -> None:
        self.strategy = strategy
        self.batch = _of_one_replica(strategy.runtime, batch)
        self.num_rows = num_rows(self.batch)
        # They differ in size, so that a mean of means is no mean.
        middle = max(1, self.num_rows // 3)
        self.parts = (slice(0, middle), slice(middle, self.num_rows))
        self.shares = (middle / self.num_rows, 1 - middle / self.num_rows)
        is_half = model.compute_dtype in ("float16", "bfloat16")
        self.tolerance = _TOLERANCE_OF_HALVES if is_half else _TOLERANCE
        # What stands in for losses that are sums, by their ids.
        self.sums: dict[int, Any] = {}

    def take(self, call: Call, rows: slice) -> Call:
        """Returns the arguments of a call for some of the rows."""

        def take_leaf(leaf: Any) -> Any:
            if not keras.ops.is_tensor(leaf) or not leaf.shape or leaf.shape[0] == 1:
                return leaf
            if leaf.shape[0] != self.num_rows:
                raise _HasOtherRowsError
            return keras.ops.copy(leaf[rows])  # Keras multiplies weights in place on PyTorch

        args, kwargs = call
        return keras.tree.map_structure(take_leaf, (args, kwargs))

    def judge(self, values: Callable[[slice], Sequence[Any]]) -> list[Verdict]:
        """Says of numbers what they are, by what a function gives for the rows.

        Args:
            values: Returns numbers for some of the rows.
        """
        with Unwritten() as scope:
            whole = _floats(values(slice(None)))
            parts = []
            for rows, share in zip(self.parts, self.shares, strict=True):
                with Part(self.strategy, share, scope):
                    parts.append(_floats(values(rows)))
            again = _floats(values(slice(None)))
        return [self._verdict(*numbers) for numbers in zip(whole, *parts, again, strict=True)]

    def _verdict(self, whole: float, first: float, second: float, again: float) -> Verdict:
        margin = self.tolerance * (abs(whole) + abs(first) + abs(second))
        is_mean = self.shares[0] * first + self.shares[1] * second - whole
        is_sum = first + second - whole
        if not np.isfinite(margin) or abs(whole - again) > margin:
            return None  # what is random
        if abs(is_mean) <= margin:
            return None if abs(is_sum) <= margin else MEAN
        return SUM if abs(is_sum) <= margin else COUPLES


def _of_one_replica(runtime: Any, batch: ReplicaBatches) -> Any:
    """Returns the rows that one replica has, in memory of their own."""
    return runtime.place([batch.parts[0]] + [None] * (len(runtime.devices) - 1))[0]


def _floats(values: Sequence[Any]) -> list[float]:
    return [float(keras.ops.convert_to_numpy(keras.ops.cast(value, "float32"))) for value in values]


class Unwritten(NotesAdditions, keras.StatelessScope):
    """Within this, what is written to variables is written nowhere."""

    untracked = contextlib.nullcontext

    def __init__(self, state: Any = None) -> None:
        super().__init__(state, collect_losses=True, initialize_variables=False)


class _HasOtherRowsError(Exception):
    """An argument has not the rows of the batch, and cannot be divided with them."""


class _AsksOthersError(Exception):
    """What is computed asks for the rows of the other replicas itself, or Keras does, and kdist answers."""


class Part(Replica):
    """Stands for a replica that has a part of the rows."""

    def __init__(self, strategy: Any, share: float, scope: Any) -> None:
        super().__init__(strategy, 0, 2, RowShare(share, 1.0, share))
        self.scope = scope

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise _AsksOthersError

    all_reduce_sum = all_reduce_with_gradient = gather_tensor = merge_call = _refuse
