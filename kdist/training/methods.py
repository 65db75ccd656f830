"""`fit`, `evaluate`, `predict` and their `…_on_batch` forms, for models created under a strategy.

Signatures and meanings equal `keras.Model` (https://keras.io/api/models/model_training_apis/), and all
backends use the same loop. Arguments refer to global batches, and all workers must pass the same ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kdist import faults, keras_hooks, tracing
from kdist.backends import get_backend
from kdist.backends.kept_gradients import may_keep
from kdist.checkpoint.checkpoint import wait_for_all
from kdist.context import StrategyLike
from kdist.control import whereabouts
from kdist.data.agreement import split_batch
from kdist.errors import InvalidArgumentError, check_whole
from kdist.training import keras_callbacks
from kdist.training.backup_and_restore import BackupAndRestore
from kdist.training.batches import GlobalBatches
from kdist.training.keras_callbacks import Ending
from kdist.training.progress import Progress
from kdist.training.session import Session, session_of
from kdist.training.validation import Validation, evaluate_batches
from kdist.training.voting import Ballot, act_on_batches, any_worker, reads_variables

if TYPE_CHECKING:
    from kdist.training.keras_callbacks import UserCallbacks


# Predictions are copied from the device together for this many batches, while it computes the next ones.
_COPIED_TOGETHER = 4


def fit(
    strategy: StrategyLike,
    model: keras.Model,
    x: object = None,
    y: object = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: UserCallbacks = None,
    validation_split: float = 0.0,
    validation_data: object = None,
    shuffle: bool | str = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: object = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
) -> keras.callbacks.History:
    """Trains the model for a number of epochs. Arguments and result are the same as for `keras.Model.fit`."""
    session = session_of(strategy, model)
    keras_hooks.require_compiled(model, "fit")
    epochs, initial_epoch = (
        check_whole(name, value, f"Pass a number of epochs, for example {name}=2.", least=0)
        for name, value in {"epochs": epochs, "initial_epoch": initial_epoch}.items()
    )
    epochs = min(epochs, keras.config.max_epochs() or epochs)
    whereabouts.enter("the beginning of fit", 0)
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = keras_hooks.train_validation_split(
            (x, y, sample_weight), validation_split
        )
    with session.runtime.engine_errors():
        batches, validation = session.open_data(
            lambda: (
                session.iterator(
                    x=x,
                    y=y,
                    sample_weight=sample_weight,
                    batch_size=batch_size,
                    steps_per_epoch=steps_per_epoch,
                    epochs=epochs - initial_epoch,
                    shuffle=shuffle,
                    class_weight=class_weight,
                ),
                Validation(
                    session,
                    validation_data,
                    validation_freq,
                    batch_size=validation_batch_size or batch_size,
                    steps_per_epoch=validation_steps,
                ),
            )
        )
        facts = {
            "epochs": epochs,
            "initial_epoch": initial_epoch,
            "steps_per_execution": model.steps_per_execution,
            "callbacks that all workers need": keras_callbacks.speaking(callbacks),
        }
        facts |= batches.facts() | validation.facts()
        with session.agree("arguments of fit", facts, callbacks) as callbacks:
            faults.point("begin")
            batches.share_random_state()
            session.prepare(batches)
            batches.reset()
            callbacks = session.callback_list(callbacks, verbose, batches, epochs, add_history=True)
            try:
                with tracing.span("fit", "loop"):
                    _train(session, batches, validation, callbacks, initial_epoch, epochs)
            finally:
                session.progress = None
                batches.close()
                validation.close()
    whereabouts.enter("")
    return model.history


def _train(
    session: Session,
    batches: GlobalBatches,
    validation: Validation,
    callbacks: keras.callbacks.CallbackList,
    initial_epoch: int,
    epochs: int,
) -> None:
    model = session.model
    ballot = Ballot(session.runtime, callbacks)
    # Only some workers may have a callback that reads variables, but then all must send.
    keeps = may_keep(session.runtime, model) and not any_worker(session.runtime, reads_variables(callbacks))
    tells, reads_logs = act_on_batches(callbacks), keras_hooks.reads_logs_at_once(callbacks)
    ending = Ending(session.runtime, callbacks)
    function = session.function("train")
    model.stop_training = False
    logs: dict[str, object] = {}
    session.progress = progress = Progress(batches, callbacks, initial_epoch)
    progress.before_save = lambda: function.keep_gradients(keeps)
    with function, progress.at_end:
        stops = session.run_callbacks(callbacks.on_train_begin)
        progress.restore_callbacks()
        # Backups come last, because they contain what the other callbacks change after the same step.
        callbacks.callbacks.sort(key=lambda callback: isinstance(callback, BackupAndRestore))
        # Keras's BackupAndRestore sets the initial epoch of the model, kdist's sets `progress.epoch`.
        progress.epoch = keras_hooks.initial_epoch(model) or progress.epoch
        for epoch in range(progress.epoch, 0 if progress.has_stopped else epochs):
            with tracing.span("epoch", "loop", epoch=epoch + 1):
                whereabouts.enter("the beginning", epoch + 1)
                step_logs: Mapping[str, object] = {}
                if progress.is_resumed:
                    step_logs = model.get_metrics_result()
                    # A schedule may depend on the rate, which it changed already before the interruption.
                    with keras_hooks.keeping_learning_rates(model.optimizer):
                        callbacks.on_epoch_begin(epoch)
                else:
                    model.reset_metrics()
                    callbacks.on_epoch_begin(epoch)
                stops = ballot.before_batches("train", model.stop_training, stops)
                function.keep_gradients(keeps)
                for begin, end, data in batches:
                    faults.enter_steps(begin, end)
                    if tells:
                        callbacks.on_train_batch_begin(begin)
                    with session.step_span("train", begin, end, batches.num_rows(data)):
                        step_logs = function(data)
                    progress.after_step(end)
                    said = step_logs
                    if tells:
                        if reads_logs:
                            with tracing.span("until ready", "step"):
                                said = keras_hooks.pythonify_logs(step_logs)
                        with tracing.span("callbacks", "callbacks"):
                            callbacks.on_train_batch_end(end, said)
                    if ballot.after_batch("train", model.stop_training, stops, said):
                        model.stop_training = True
                        break
                function.keep_gradients(False)
                function.sync()
                logs = dict(keras_hooks.metrics_or_logs(model, step_logs))
                logs.update(validation.run(epoch, callbacks, ballot))
                progress.after_epoch()
                whereabouts.enter("the end")
                with tracing.span("callbacks, end of the epoch", "callbacks", epoch=epoch + 1):
                    stops = session.run_callbacks(functools.partial(callbacks.on_epoch_end, epoch, logs))
                faults.point("epoch-end")
            if stops:
                break
    whereabouts.enter("the end of fit")
    if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
        with session.strategy.scope():
            model.optimizer.finalize_variable_values(model.trainable_weights)
    # All files of callbacks must be complete when `fit` returns.
    session.run_callbacks(functools.partial(callbacks.on_train_end, logs=logs))
    tracing.flush()
    wait_for_all(session.runtime)
    ending.leave()


def evaluate(
    strategy: StrategyLike,
    model: keras.Model,
    x: object = None,
    y: object = None,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    sample_weight: object = None,
    steps: int | None = None,
    callbacks: UserCallbacks = None,
    return_dict: bool = False,
    _use_cached_eval_dataset: bool = False,
) -> dict[str, float] | list[float] | float:
    """Returns the loss and the metrics. Arguments and result are the same as for `keras.Model.evaluate`."""
    keras_hooks.require_compiled(model, "evaluate")
    session = session_of(strategy, model)
    if _use_cached_eval_dataset and session.validation is not None:
        logs = evaluate_batches(session, callbacks, *session.validation)
        return keras_hooks.python_logs(model, logs, return_dict)
    data = {
        "x": x,
        "y": y,
        "sample_weight": sample_weight,
        "batch_size": batch_size,
        "steps_per_epoch": steps,
    }
    with _one_epoch(strategy, model, "evaluate", callbacks, verbose, **data) as (session, batches, callbacks):
        logs = evaluate_batches(session, callbacks, batches, Ballot(session.runtime, callbacks))
    return keras_hooks.python_logs(model, logs, return_dict)


@contextlib.contextmanager
def _one_epoch(
    strategy: StrategyLike,
    model: keras.Model,
    method: str,
    callbacks: UserCallbacks,
    verbose: str | int,
    **data: object,
) -> Iterator[tuple[Session, GlobalBatches, keras.callbacks.CallbackList]]:
    session = session_of(strategy, model)
    with session.runtime.engine_errors():
        batches = session.open_data(lambda: session.iterator(**data))
        with session.agree(f"arguments of {method}", batches.facts(), callbacks) as callbacks:
            try:
                if method == "evaluate":
                    session.prepare(batches)
                else:
                    is_built = keras_hooks.layers_are_built(model)
                    session.prepare(data_batch=None if is_built else batches.peek(), layers_only=True)
                yield session, batches, session.callback_list(callbacks, verbose, batches)
            finally:
                batches.close()


def predict(
    strategy: StrategyLike,
    model: keras.Model,
    x: object,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    steps: int | None = None,
    callbacks: UserCallbacks = None,
) -> Any:
    """Returns the predictions for all rows, in order, on every worker, as `keras.Model.predict` does."""
    data = {"x": x, "batch_size": batch_size, "steps_per_epoch": steps}
    with _one_epoch(strategy, model, "predict", callbacks, verbose, **data) as (session, batches, callbacks):
        return _predict(session, batches, callbacks)


def _predict(session: Session, batches: GlobalBatches, callbacks: keras.callbacks.CallbackList) -> Any:
    model = session.model
    function = session.function("predict")
    model.stop_predicting = False
    join = get_backend().join_predictions
    ballot = Ballot(session.runtime, callbacks)
    parts: list[object] = []
    on_device: list[object] = []  # a copy would wait until they are computed
    with function, tracing.span("prediction", "prediction"):
        callbacks.on_predict_begin()
        stops = ballot.before_batches("predict", model.stop_predicting)
        for begin, end, data in batches:
            callbacks.on_predict_batch_begin(begin)
            with session.step_span("predict", begin, end):
                outputs = function(data)
            on_device.append(outputs)
            if len(on_device) == 2 * _COPIED_TOGETHER:
                # Separately, because TensorFlow cannot join a dense array of these with ragged batches that follow.
                parts += [join([outputs]) for outputs in on_device[:_COPIED_TOGETHER]]
                del on_device[:_COPIED_TOGETHER]
            callbacks.on_predict_batch_end(end, {"outputs": outputs})
            if ballot.after_batch("predict", model.stop_predicting, stops, {}):
                break
        callbacks.on_predict_end()
    parts += on_device
    if not parts:
        raise InvalidArgumentError(
            "`predict` received no data.", received={"batches": 0}, hint="Pass at least one batch of data."
        )
    return join(parts)


def train_on_batch(
    strategy: StrategyLike,
    model: keras.Model,
    x: object,
    y: object = None,
    sample_weight: object = None,
    class_weight: Mapping[int, float] | None = None,
    return_dict: bool = False,
) -> dict[str, float] | list[float] | float:
    """Trains the model on one global batch, as `keras.Model.train_on_batch` does."""
    keras_hooks.require_compiled(model, "train_on_batch")
    if class_weight is not None:
        if sample_weight is not None:
            raise InvalidArgumentError(
                "`train_on_batch` received both `sample_weight` and `class_weight`.",
                received={"class_weight": class_weight},
                hint="Pass only one of them.",
            )
        sample_weight = keras_hooks.class_weight_to_sample_weights(y, class_weight)
    logs = _on_batch(strategy, model, "train", (x, y, sample_weight))
    return keras_hooks.python_logs(model, logs, return_dict)


def test_on_batch(
    strategy: StrategyLike,
    model: keras.Model,
    x: object,
    y: object = None,
    sample_weight: object = None,
    return_dict: bool = False,
) -> dict[str, float] | list[float] | float:
    """Tests the model on one global batch, as `keras.Model.test_on_batch` does."""
    keras_hooks.require_compiled(model, "test_on_batch")
    logs = _on_batch(strategy, model, "test", (x, y, sample_weight))
    return keras_hooks.python_logs(model, logs, return_dict)


def predict_on_batch(strategy: StrategyLike, model: keras.Model, x: object) -> Any:
    """Returns the predictions for one global batch, as `keras.Model.predict_on_batch` does."""
    return get_backend().join_predictions([_on_batch(strategy, model, "predict", (x,))])


def _on_batch(strategy: StrategyLike, model: keras.Model, kind: str, data: object) -> Any:
    session = session_of(strategy, model)
    with session.runtime.engine_errors():
        data = keras.tree.map_structure(
            lambda leaf: np.asarray(leaf) if isinstance(leaf, (int, float, Sequence)) else leaf, data
        )
        shapes = [list(leaf.shape) for leaf in keras.tree.flatten(data) if leaf is not None]
        session.agree(f"arguments of {kind}_on_batch", {"shapes": shapes})
        session.prepare(data_batch=data, layers_only=kind == "predict")
        if kind != "predict":
            model.reset_metrics()
        with session.function(kind) as function:
            batch = split_batch(session.runtime, data)
            rows = batch.split[-1][1] if kind == "train" else None
            with session.step_span(kind, 0, 0, rows):
                result = function([batch])
    return result
