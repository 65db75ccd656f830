"""Tests whether numbers of custom losses, layers and metrics are means or sums over the rows of a batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import keras

from kdist import keras_hooks
from kdist.backends.aggregation import aggregation_of
from kdist.context import current_replica
from kdist.training.verdicts import COUPLES, SUM, UNCHECKED, Call, Sample, Unwritten, Verdict, agreed

if TYPE_CHECKING:
    from kdist.keras_hooks.scalars import OwnLoss


_MAY_RETURN = "return one value per row, or the mean or the sum of these values."
_OF_A_LOSS = f"Let the loss {_MAY_RETURN}"
_OF_A_LAYER = "Add a mean or a sum over the rows."
_OF_A_METRIC = f"Make each variable of the metric a sum over the rows, or let the metric {_MAY_RETURN}"
_OF_A_TOTAL = "Return a mean over the rows."


def owns_of(model: keras.Model) -> list[Own]:
    """Returns the custom losses, layers and metrics of a compiled model, and at the end `compute_loss`."""
    found = [
        Own(loss, f"The loss `{loss.name}`", "call", _of_loss, _OF_A_LOSS)
        for loss in keras_hooks.own_losses(model)
    ]
    for layer in keras_hooks.own_layers(model):
        what = "model" if isinstance(layer, keras.Model) else "layer"
        label = f"`add_loss` of {what} `{layer.name}`"
        found.append(Own(layer, label, "call", _of_layer, _OF_A_LAYER, makes_several=True))
    found += [
        Own(metric, f"The metric `{metric.name}`", "update_state", _of_metric, _OF_A_METRIC)
        for metric in keras_hooks.own_metrics(model)
    ]
    if keras_hooks.is_own(type(model).compute_loss):
        label, method = f"`compute_loss` of model `{model.name}`", "compute_loss"
        found.append(Own(model, label, method, _of_total, _OF_A_TOTAL, is_added_up=False))
    return found


def note_calls(model: keras.Model, owns: Sequence[Own], batch: object, training: bool) -> None:
    """Computes a step without gradients, and records the arguments of all calls of `owns`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    with Unwritten(), contextlib.ExitStack() as stack:
        for own in owns:
            stack.enter_context(own.noting())
        # In training mode, PyTorch's modules would update their statistics.
        training = training and not keras_hooks.has_torch_modules(model)
        keras_hooks.compute_step(model, x, y, sample_weight, training)


@dataclass
class Own:
    """A custom object that computes numbers from the rows: a loss, a layer, a metric, or a model.

    Args:
        owner: The object, or an `OwnLoss` that wraps it.
        label: The name of the object in messages.
        method: The name of the method that receives the rows.
        numbers: A function that returns the numbers for the arguments of a call.
        hint: The fix that the warning suggests.
        makes_several: Whether there are several independent numbers, each of which may be a mean or a sum.
        is_added_up: Whether kdist can add up its sums over the replicas.
    """

    owner: object
    label: str
    method: str
    numbers: Callable[..., Sequence[object]]
    hint: str
    makes_several: bool = False
    is_added_up: bool = True
    calls: list[Call] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """The reason for different results if the object couples the rows."""
        what = "neither a mean nor a sum" if self.is_added_up else "not a mean"
        return f"It is {what} over the rows of a batch, and each replica only has its part of the rows."

    @property
    def doubt(self) -> str:
        """The reason for a warning if the object cannot be tested."""
        return "kdist could not check how it reduces the rows of a batch, because it does not accept a part of them."

    def noting(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that records the calls."""
        function = getattr(self.owner, self.method)

        def noted(*args: object, **kwargs: object) -> object:
            self.calls.append(keras.tree.map_structure(_copy, (args, kwargs)))
            return function(*args, **kwargs)

        return keras_hooks.temporarily(self.owner, **{self.method: noted})

    def judge(self, sample: Sample) -> list[Verdict]:
        """Returns a verdict per number, and enables adding up sums.

        The list is empty if the object requests the rows of other replicas itself.
        """
        try:
            found = [verdict for call in self.calls for verdict in self._judge_call(sample, call)]
        except NotImplementedError:  # of `_Part`
            return []
        except Exception:  # it does not accept parts of a batch
            return [UNCHECKED]
        found = found if self.makes_several else [agreed(found)]
        if SUM in found:  # the probe of `compute_loss` needs this, because it contains losses
            keras_hooks.add_up(self.owner, are_sums(found))
        return found

    def _judge_call(self, sample: Sample, call: Call) -> list[Verdict]:
        numbers, (args, kwargs) = functools.partial(self.numbers, self.owner), call
        found = sample.judge(numbers, call)
        if kwargs.get("training") and {None, COUPLES} & set(found):
            # Random numbers and batch statistics may hide the result, so test again without them.
            quiet = sample.judge(numbers, (args, kwargs | {"training": False}))
            if len(quiet) == len(found):
                found = [b if a in (None, COUPLES) else a for a, b in zip(found, quiet, strict=True)]
        return found if self.is_added_up else [COUPLES if verdict == SUM else verdict for verdict in found]


def are_sums(verdicts: Sequence[Verdict]) -> tuple[bool, ...]:
    """Converts verdicts to the argument of `keras_hooks.add_up`."""
    return tuple(verdict == SUM for verdict in verdicts)


def _copy(leaf: object) -> object:
    # Without gradients, because PyTorch would keep the whole graph in memory.
    return keras.ops.stop_gradient(keras.ops.copy(leaf)) if keras.ops.is_tensor(leaf) else leaf


def _of_loss(loss: OwnLoss, y: object, y_pred: object, *weights: object) -> Sequence[object]:
    # Keras applies the weights, unless a custom loss overrides `__call__`.
    weights = weights if keras_hooks.is_own(type(loss.loss).__call__) else ()
    return [keras.ops.mean(loss.loss(y, y_pred, *weights))]


def _of_layer(layer: keras.Layer, /, *args: object, **kwargs: object) -> Sequence[object]:
    with keras_hooks.handed(layer) as scalars:
        layer(*args, **kwargs)
    return scalars


def _of_metric(metric: keras.metrics.Metric, /, *args: object, **kwargs: object) -> Sequence[object]:
    """Returns the scalars that a Keras metric receives, or otherwise the changes of its variables.

    Scales the changes of sum variables to all rows of the batch, because the test expects means.
    """
    metric.reset_state()
    old = [variable.value for variable in metric.variables]
    with keras_hooks.handed(metric) as scalars:
        metric.update_state(*args, **kwargs)
    replica: Any = current_replica()
    return scalars or [
        keras_hooks.of_all_rows(replica, variable.value - before)
        if replica is not None and aggregation_of(variable) == "sum"
        else variable.value - before
        for variable, before in zip(metric.variables, old, strict=True)
    ]


def _of_total(model: keras.Model, /, *args: object, **kwargs: object) -> Sequence[object]:
    return [model.compute_loss(*args, **kwargs)]
