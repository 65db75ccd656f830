"""Losses, layers and metrics of the user's: what their numbers are of the rows, and how they are added up."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from kdist import keras_hooks
from kdist.backends.aggregation import aggregation_of
from kdist.training.verdicts import COUPLES, MEAN, SUM, Call, Part, Sample, Unwritten, Verdict, agreed


def owns_of(model: Any) -> list[Own]:
    """Returns what a compiled model has of the user's that makes numbers of the rows."""
    found: list[Own] = [
        *map(OwnLoss, keras_hooks.own_losses(model)),
        *map(OwnLayer, keras_hooks.own_layers(model)),
        *map(OwnMetric, keras_hooks.own_metrics(model)),
    ]
    return [*found, OwnTotal(model)] if keras_hooks.is_own(type(model).compute_loss) else found


def note_calls(model: Any, owns: Sequence[Own], batch: Any, training: bool) -> None:
    """Computes a step without gradients, and notes with what the user's things are called.

    Args:
        model: A compiled model.
        owns: What `owns_of` returned.
        batch: Some rows, in Keras's data form.
        training: Whether it is a step of training.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    with Unwritten(), contextlib.ExitStack() as stack:
        for own in owns:
            stack.enter_context(own.noting(model))
        # In training, modules of PyTorch's own would write to their statistics.
        training = training and not keras_hooks.has_torch_modules(model)
        keras_hooks.compute_step(model, x, y, sample_weight, training)


@contextlib.contextmanager
def _method(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Puts a method in place of one of an object's; past `__setattr__`, which tracks."""
    vars(owner)[name] = method
    try:
        yield
    finally:
        del vars(owner)[name]


class Own(ABC):
    """Something of the user's that makes numbers of the rows."""

    rule = "it is neither a mean nor a sum over the rows of a batch, and a replica sees only its own."
    hint = ""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.calls: list[Call] = []

    @property
    @abstractmethod
    def label(self) -> str:
        """What it is called."""

    @abstractmethod
    def noting(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Within this, its calls are noted."""

    @abstractmethod
    def verdicts_of(self, sample: Sample, call: Call) -> list[Verdict]:
        """Says what it makes of the rows of a call."""

    @abstractmethod
    def add_up(self, model: Any, are_sums: tuple[bool, ...]) -> None:
        """From now on, adds its numbers up over the replicas."""

    def verdicts(self, sample: Sample) -> list[Verdict]:
        """Says of each of its numbers what it is; nothing where that cannot be found out."""
        try:
            return [verdict for call in self.calls for verdict in self.verdicts_of(sample, call)]
        except Exception:  # it is not for parts of a batch
            return []

    def noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that notes its calls."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(
                keras.tree.map_structure(
                    lambda leaf: keras.ops.copy(leaf) if keras.ops.is_tensor(leaf) else leaf, (args, kwargs)
                )
            )
            return function(*args, **kwargs)

        return wrapper


class OwnLoss(Own):
    """A loss, whichever outputs it is for."""

    hint = "Let it return one value a row, or their mean or sum."

    @property
    def label(self) -> str:
        return f"The loss `{self.owner.name}`"

    @contextlib.contextmanager
    def noting(self, model: Any) -> Iterator[None]:
        noted = self.noted(self.owner)
        keras_hooks.replace_losses(model, {id(self.owner): noted})
        try:
            yield
        finally:
            keras_hooks.replace_losses(model, {id(noted): self.owner})

    def verdicts_of(self, sample: Sample, call: Call) -> list[Verdict]:
        def value(rows: slice) -> list[Any]:
            (y, y_pred, *weights), _ = sample.take(call, rows)
            # Keras sees to the weights, but for a loss that does all itself.
            weights = weights if keras_hooks.is_own(type(self.owner).__call__) else []
            return [keras.ops.mean(self.owner(y, y_pred, *weights))]

        return sample.judge(value)

    def verdicts(self, sample: Sample) -> list[Verdict]:
        verdict = agreed(super().verdicts(sample))
        if verdict == SUM:
            sample.sums[id(self.owner)] = keras_hooks.SummedLoss(self.owner)
        return [verdict]

    def add_up(self, model: Any, are_sums: tuple[bool, ...]) -> None:
        keras_hooks.replace_losses(model, {id(self.owner): keras_hooks.SummedLoss(self.owner)})


class OwnTotal(Own):
    """`compute_loss`, where the user has overridden it. What it puts together cannot be added up one by one."""

    rule = "it is no mean over the rows of a batch, and a replica sees only its own."
    hint = "Let it return a mean over the rows."

    @property
    def label(self) -> str:
        return f"`compute_loss` of model `{self.owner.name}`"

    def noting(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return _method(self.owner, "compute_loss", self.noted(self.owner.compute_loss))

    def verdicts_of(self, sample: Sample, call: Call) -> list[Verdict]:
        def value(rows: slice) -> list[Any]:
            args, kwargs = sample.take(call, rows)
            return [self.owner.compute_loss(*args, **kwargs)]

        keras_hooks.replace_losses(self.owner, sample.sums)
        try:
            return [COUPLES if verdict == SUM else verdict for verdict in sample.judge(value)]
        finally:
            keras_hooks.replace_losses(self.owner, {id(s): s.loss for s in sample.sums.values()})

    def add_up(self, model: Any, are_sums: tuple[bool, ...]) -> None:
        raise AssertionError


class OwnLayer(Own):
    """What a layer, or its activity regulariser, hands to `add_loss`, in the order in which it does."""

    hint = "Let it add a mean or a sum over the rows."

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self._losses: list[list[Any]] = []

    @property
    def label(self) -> str:
        what = "model" if isinstance(self.owner, keras.Model) else "layer"
        return f"`add_loss` of {what} `{self.owner.name}`"

    @contextlib.contextmanager
    def noting(self, model: Any) -> Iterator[None]:
        call, add_loss = self.owner.call, self.owner.add_loss

        def noted_call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((args, kwargs))
            self._losses.append([])
            return call(*args, **kwargs)

        def noted_loss(loss: Any) -> None:
            self._losses[-1] += [keras.ops.sum(scalar) for scalar in keras.tree.flatten(loss)]
            add_loss(loss)

        with _method(self.owner, "call", noted_call), _method(self.owner, "add_loss", noted_loss):
            yield

    def verdicts(self, sample: Sample) -> list[Verdict]:
        calls, numbers = self.calls, [len(losses) for losses in self._losses]
        self.calls = [call for call, number in zip(calls, numbers, strict=True) if number]
        found = super().verdicts(sample)
        return found if len(found) == sum(numbers) else []

    def verdicts_of(self, sample: Sample, call: Call) -> list[Verdict]:
        found = sample.judge(lambda rows: self._added(*sample.take(call, rows)))
        if call[1].get("training") and {None, COUPLES} & set(found):
            # Without random numbers and the statistics of a batch, one can see what it is.
            quiet = (call[0], call[1] | {"training": False})
            without = sample.judge(lambda rows: self._added(*sample.take(quiet, rows)))
            if len(without) == len(found):
                found = [b if a in (None, COUPLES) else a for a, b in zip(found, without, strict=True)]
        return found

    def _added(self, args: Any, kwargs: Any) -> list[Any]:
        with self.noting(None):
            self.owner(*args, **kwargs)
        self.calls.pop()
        return self._losses.pop()

    def add_up(self, model: Any, are_sums: tuple[bool, ...]) -> None:
        keras_hooks.add_up(self.owner, are_sums)


class OwnMetric(Own):
    """A metric. What a function returns can be added up, since one of Keras's own metrics takes it."""

    hint = "Let each of its variables be a sum over the rows; or let it return one value a row, or their mean or sum."

    @property
    def label(self) -> str:
        return f"The metric `{self.owner.name}`"

    def noting(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return _method(self.owner, "update_state", self.noted(self.owner.update_state))

    def verdicts(self, sample: Sample) -> list[Verdict]:
        return [agreed(super().verdicts(sample))]

    def verdicts_of(self, sample: Sample, call: Call) -> list[Verdict]:
        old, whole = self._states(sample, call)
        wanted, again = self._result(whole), self._result(self._states(sample, call)[1])
        try:
            for is_sum in (False, True):
                keras_hooks.add_up(self.owner, (is_sum,))
                parts = [
                    self._states(sample, call, *part)[1]
                    for part in zip(sample.parts, sample.shares, strict=True)
                ]
                values = zip(self.owner.variables, old, *parts, strict=True)
                result = self._result([self._together(sample, *value) for value in values])
                margin = sample.tolerance * sum(np.abs(r) for r in (wanted, *map(self._result, parts)))
                if not np.isfinite(margin + result).all() or (np.abs(again - wanted) > margin).any():
                    return [None]  # what is random
                if (np.abs(result - wanted) <= margin).all():
                    return [SUM if is_sum else MEAN]
        finally:
            keras_hooks.add_up(self.owner, (False,))
        return [COUPLES]

    def _states(
        self, sample: Sample, call: Call, rows: slice = slice(None), share: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Returns what its variables are before and after it has seen some rows."""
        args, kwargs = sample.take(call, rows)
        with Unwritten() as scope:
            self.owner.reset_state()
            old = [variable.value for variable in self.owner.variables]
            with contextlib.nullcontext() if share is None else Part(sample.strategy, share, scope):
                self.owner.update_state(*args, **kwargs)
            return old, [variable.value for variable in self.owner.variables]

    def _together(self, sample: Sample, variable: Any, old: Any, first: Any, second: Any) -> Any:
        """Returns what a variable is once two replicas have written to it; see `ReplicaScope.aggregate`."""
        how = aggregation_of(variable)
        if how == "sum":
            return first + second - old
        if how == "mean":
            return sample.shares[0] * first + sample.shares[1] * second
        return first

    def _result(self, state: Sequence[Any]) -> np.ndarray:
        with Unwritten(list(zip(self.owner.variables, state, strict=True))):
            leaves = keras.tree.flatten(self.owner.result())
        return np.concatenate(
            [np.ravel(keras.ops.convert_to_numpy(keras.ops.cast(leaf, "float32"))) for leaf in leaves]
        )

    def add_up(self, model: Any, are_sums: tuple[bool, ...]) -> None:
        keras_hooks.add_up(self.owner, are_sums)
