"""The validation of `fit`, and the loop of `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from kdist import faults, keras_hooks, tracing
from kdist.control import whereabouts
from kdist.training.batches import GlobalBatches
from kdist.training.session import Session

if TYPE_CHECKING:
    from kdist.training.voting import Ballot


class Validation:
    """The validation data of `fit`, and the epochs in which it validates."""

    def __init__(self, session: Session, data: object, freq: int | Sequence[int], **arguments: Any) -> None:
        self._session = session
        self._freq = freq
        self._arguments = arguments
        self._batches: GlobalBatches | None = None
        if data is not None:
            names = ("x", "y", "sample_weight")
            self._arguments |= dict(zip(names, keras.utils.unpack_x_y_sample_weight(data), strict=True))
            self._batches = session.iterator(**self._arguments)

    def facts(self) -> dict[str, object]:
        if self._batches is None:
            return {"validation data": None}
        return {f"validation {name}": value for name, value in self._batches.facts().items()}

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()

    def run(self, epoch: int, callbacks: keras.callbacks.CallbackList, ballot: Ballot) -> dict[str, float]:
        if self._batches is None or not keras_hooks.should_validate(self._session.model, epoch, self._freq):
            return {}
        whereabouts.enter("validation")
        faults.point("validation")
        if keras_hooks.overrides(self._session.model, "evaluate"):
            logs = self._run_the_users(callbacks, ballot)
        else:
            logs = evaluate_batches(self._session, callbacks, self._batches, ballot)
        return {f"val_{name}": value for name, value in logs.items()}

    def _run_the_users(self, callbacks: keras.callbacks.CallbackList, ballot: Ballot) -> dict[str, float]:
        """Calls a method `evaluate` that the user has written, with the arguments that Keras passes."""
        session, arguments = self._session, dict(self._arguments)
        arguments["steps"] = arguments.pop("steps_per_epoch")
        assert self._batches is not None
        session.validation = self._batches, ballot
        try:
            return session.model.evaluate(
                **arguments, callbacks=callbacks, return_dict=True, _use_cached_eval_dataset=True
            )
        finally:
            session.validation = None


def evaluate_batches(
    session: Session, callbacks: keras.callbacks.CallbackList, batches: GlobalBatches, ballot: Ballot
) -> dict[str, float]:
    """Runs the test step of a model on all batches. Returns the loss and the metrics."""
    model = session.model
    batches.reset()
    function = session.function("test")
    model.stop_evaluating = False
    logs: Mapping[str, object] = {}
    with function, tracing.span("validation", "validation"):
        callbacks.on_test_begin()
        stops = ballot.before_batches("test", model.stop_evaluating)
        model.reset_metrics()
        for begin, end, data in batches:
            callbacks.on_test_batch_begin(begin)
            with session.step_span("test", begin, end):
                logs = function(data)
            callbacks.on_test_batch_end(end, logs)
            if ballot.after_batch("test", model.stop_evaluating, stops, logs):
                break
    logs = keras_hooks.pythonify_logs(keras_hooks.metrics_or_logs(model, logs))
    callbacks.on_test_end(logs)
    return logs
