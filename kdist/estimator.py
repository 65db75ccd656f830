"""`kdist.estimator`: `train_and_evaluate` of `tf.estimator`, with Keras models, on every backend.

A `RunConfig` contains the strategies. Functions that are called once per worker return the data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kdist import keras_hooks
from kdist.checkpoint import end_of_training, storage
from kdist.checkpoint.checkpoint import Checkpoint
from kdist.checkpoint.layout import latest_checkpoint
from kdist.checkpoint.manager import CheckpointManager
from kdist.cluster import Cluster, discover
from kdist.coordinator.evaluator import SidecarEvaluator
from kdist.errors import CheckpointNotFoundError, InvalidArgumentError, check_whole
from kdist.strategies.default import default_strategy
from kdist.strategies.strategy import Strategy

if TYPE_CHECKING:
    import keras

    from kdist.data.input_context import InputContext


__all__ = ["Estimator", "EvalSpec", "RunConfig", "TrainSpec", "train_and_evaluate"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The checkpoints and the strategies of a training job.

    Args:
        model_dir: The checkpoint directory, shared by all tasks. `None` means a temporary directory, for one task.
        tf_random_seed: The seed of all random numbers, set before the model is created.
        save_checkpoints_steps: The number of steps between two checkpoints. The last step is always saved.
        keep_checkpoint_max: The number of checkpoints to keep; `None` for all.
        train_distribute: The strategy for training; `None` for plain Keras.
        eval_distribute: The strategy for evaluation; `None` for plain Keras.

    Raises:
        InvalidArgumentError: If `save_checkpoints_steps` is not a positive integer.
    """

    model_dir: str | os.PathLike[str] | None = None
    tf_random_seed: int | None = None
    save_checkpoints_steps: int = 1000
    keep_checkpoint_max: int | None = 5
    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None

    def __post_init__(self) -> None:
        hint = "Pass the number of steps between two checkpoints: RunConfig(save_checkpoints_steps=1000)"
        check_whole("save_checkpoints_steps", self.save_checkpoints_steps, hint)


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """The data and the options of training.

    Args:
        input_fn: A function that returns a dataset with batches for one replica, and different rows on each
            worker. Called once per worker, with a `kdist.InputContext` if it has a parameter.
        max_steps: The number of steps (global batches) after which training ends, including steps before a
            restart; `None` for the end of the data.
        callbacks: Keras callbacks.
    """

    input_fn: Callable[..., object]
    max_steps: int | None = None
    callbacks: Sequence[keras.callbacks.Callback] = ()


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """The data and the options of evaluation.

    Args:
        input_fn: Like the `input_fn` of `TrainSpec`, but called for each evaluation.
        steps: The number of batches per evaluation; `None` for all.
        start_delay_secs: Seconds before the first evaluation, on the task "evaluator".
        throttle_secs: The minimum seconds between evaluations. The last checkpoint is always evaluated.
        callbacks: Keras callbacks, such as `kdist.callbacks.SidecarEvaluatorModelExport`.
    """

    input_fn: Callable[..., object]
    steps: int | None = 100
    start_delay_secs: float = 120.0
    throttle_secs: float = 600.0
    callbacks: Sequence[keras.callbacks.Callback] = ()


class Estimator:
    """Trains a Keras model and evaluates its checkpoints, with separate strategies for both.

    Args:
        model: A function that returns a compiled model, called in the scope of each strategy. Or a compiled
            model, which is trained itself if it was created under `train_distribute`, and copied otherwise.
        config: A `RunConfig`.

    Raises:
        InvalidArgumentError: If `model` is neither a function nor a compiled model.

    Example:

    ```python
    strategy = kdist.MirroredStrategy()
    config = kdist.estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)
    regressor = kdist.estimator.Estimator(make_model, config)
    regressor.train(input_fn, steps=10)
    regressor.evaluate(input_fn, steps=10)
    ```
    """

    def __init__(
        self, model: keras.Model | Callable[[], keras.Model], config: RunConfig | None = None
    ) -> None:
        import keras

        if not callable(model) or (isinstance(model, keras.Model) and not model.compiled):
            raise InvalidArgumentError(
                "`model` is not a compiled Keras model or a function that returns a compiled model.",
                received={"model": model},
                hint="Compile the model, or pass a function that does: kdist.estimator.Estimator(make_model, config)",
            )
        self.config = config or RunConfig()
        self.model_dir = storage.absolute(
            self.config.model_dir or tempfile.mkdtemp(prefix="kdist-estimator-")
        )
        self._source = model
        self._models: dict[bool, keras.Model] = {}

    def train(
        self,
        input_fn: Callable[..., object],
        steps: int | None = None,
        max_steps: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        after_saving: Callable[[], object] | None = None,
    ) -> Estimator:
        """Trains the model, starting from the newest checkpoint. All workers must call it.

        Args:
            input_fn: See `TrainSpec`.
            steps: The number of additional steps to train.
            max_steps: See `TrainSpec`. Ignored if `steps` is set.
            callbacks: Keras callbacks.
            after_saving: A function that is called on each worker when a checkpoint is complete.

        Returns:
            This estimator.
        """
        strategy, model = self.config.train_distribute, self.model(trains=True)
        manager = CheckpointManager(Checkpoint(model=model), self.model_dir, self.config.keep_checkpoint_max)
        done = _steps_of(model, manager.restore_or_initialize())
        until = max_steps if steps is None else done + steps
        if until is None or done < until:
            from kdist.training.step_checkpoints import StepCheckpoints

            saves = StepCheckpoints(manager, done, self.config.save_checkpoints_steps, after_saving)
            model.fit(
                _dataset(strategy, input_fn),
                steps_per_epoch=None if until is None else until - done,
                callbacks=[*callbacks, saves],
                verbose=0,
            )
        return self

    def evaluate(
        self,
        input_fn: Callable[..., object],
        steps: int | None = None,
        checkpoint_path: str | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ) -> dict[str, float]:
        """Evaluates a checkpoint.

        Args:
            input_fn: See `EvalSpec`.
            steps: See `EvalSpec`.
            checkpoint_path: The path of the checkpoint; by default the newest checkpoint.
            callbacks: Keras callbacks.

        Returns:
            A dictionary with the loss, the metrics, and `global_step`, the number of steps of the checkpoint.

        Raises:
            CheckpointNotFoundError: If there is no checkpoint.
        """
        from kdist.checkpoint.restoring import restore_weights

        path = checkpoint_path or latest_checkpoint(self.model_dir)
        if path is None:
            raise CheckpointNotFoundError(
                "Cannot evaluate the model: `model_dir` contains no checkpoint.",
                received={"model_dir": self.model_dir},
                hint="Call `train` first, or pass the directory of an earlier run: RunConfig(model_dir=…)",
            )
        model, data = self.model(trains=False), _dataset(self.config.eval_distribute, input_fn)
        restore_weights(path, model)
        logs = model.evaluate(
            data, steps=_at_most(steps, data), callbacks=list(callbacks), verbose=0, return_dict=True
        )
        return logs | {"global_step": _steps_of(model, path)}

    def model(self, trains: bool) -> keras.Model:
        """Returns the model for training or for evaluation, and creates it on the first call."""
        import keras

        if trains not in self._models:
            strategy = self.config.train_distribute if trains else self.config.eval_distribute
            # Only once, because the data of training may draw random numbers before the first evaluation.
            if self.config.tf_random_seed is not None and not self._models:
                keras.utils.set_random_seed(self.config.tf_random_seed)
            with contextlib.nullcontext() if strategy is None else strategy.scope():
                self._models[trains] = self._make(strategy, trains)
        return self._models[trains]

    def _make(self, strategy: Strategy | None, trains: bool) -> keras.Model:
        import keras

        source = self._source
        if not isinstance(source, keras.Model):
            return source()
        if trains and keras_hooks.strategy_of(source) is strategy:
            return source
        copy = keras.models.clone_model(source)
        copy.compile_from_config(source.get_compile_config())
        if source.built:
            copy.set_weights(source.get_weights())
        return copy


def train_and_evaluate(
    model: Estimator | keras.Model | Callable[[], keras.Model],
    train_spec: TrainSpec,
    eval_spec: EvalSpec,
    config: RunConfig | None = None,
) -> dict[str, float] | None:
    """Trains a model and evaluates its checkpoints. Run the same script on every task of the cluster.

    The task "evaluator" evaluates each new checkpoint until training has ended. All other tasks train. A
    single process alternates between training and evaluation.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/train_and_evaluate

    Args:
        model: An `Estimator`, or the argument `model` of an `Estimator`.
        train_spec: A `TrainSpec`.
        eval_spec: An `EvalSpec`.
        config: A `RunConfig`. Ignored if `model` is an `Estimator`.

    Returns:
        The results of the last evaluation, with its `global_step`; `None` on tasks that do not evaluate.

    Raises:
        InvalidArgumentError: If there are several tasks, but no `model_dir` or no strategy that joins them.

    Example:

    ```python
    def input_fn(context):
        mine = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        return tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).repeat().batch(16)

    config = kdist.estimator.RunConfig(
        model_dir="checkpoints", save_checkpoints_steps=100, train_distribute=kdist.MultiWorkerMirroredStrategy()
    )
    kdist.estimator.train_and_evaluate(
        make_model,
        kdist.estimator.TrainSpec(input_fn, max_steps=1000),
        kdist.estimator.EvalSpec(test_input_fn, steps=None, throttle_secs=60),
        config,
    )
    ```
    """
    estimator = model if isinstance(model, Estimator) else Estimator(model, config)
    strategy = estimator.config.train_distribute
    cluster = discover(None if strategy is None else strategy.cluster_resolver)
    _check(estimator.config, cluster)
    if cluster.task_type == "evaluator":
        return _evaluate_as_they_come(estimator, train_spec, eval_spec)
    turns = None if cluster.num_workers > 1 else _Turns(estimator, eval_spec)
    estimator.train(
        train_spec.input_fn,
        max_steps=train_spec.max_steps,
        callbacks=train_spec.callbacks,
        after_saving=turns,
    )
    if cluster.is_chief:
        end_of_training.end([estimator.model_dir])  # even if no steps were left to train
    return None if turns is None else turns.last()


def _check(config: RunConfig, cluster: Cluster) -> None:
    if (cluster.num_workers > 1 or cluster.task_type == "evaluator") and config.model_dir is None:
        raise InvalidArgumentError(
            "`model_dir` is not set, but the tasks of the cluster share checkpoints.",
            received={"model_dir": None, "task_type": cluster.task_type},
            hint='Pass a directory that all tasks share: RunConfig(model_dir="/shared/checkpoints", …)',
        )
    strategy = config.train_distribute
    if cluster.num_workers > 1 and (strategy is None or strategy.cluster_resolver is None):
        raise InvalidArgumentError(
            "The job has several workers, but `train_distribute` does not connect them.",
            received={"num_workers": cluster.num_workers, "train_distribute": strategy},
            hint="Pass a strategy for several workers: "
            "RunConfig(train_distribute=kdist.MultiWorkerMirroredStrategy(), …)",
        )


def _evaluate_as_they_come(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> dict[str, float] | None:
    done = _Evaluator(
        estimator.model(trains=False),
        lambda: _dataset(estimator.config.eval_distribute, eval_spec.input_fn),
        estimator.model_dir,
        steps=eval_spec.steps,
        max_evaluations=train_spec.max_steps,  # checkpoints are numbered by their steps
        callbacks=list(eval_spec.callbacks),
        start_delay=eval_spec.start_delay_secs,
        throttle_seconds=eval_spec.throttle_secs,
    ).start()
    if not done:
        return None
    return done[-1].logs | {"global_step": _steps_of(estimator.model(trains=False), done[-1].path)}


class _Evaluator(SidecarEvaluator):
    """Limits `steps` to the number of batches in the data."""

    def _arguments(self) -> dict[str, Any]:
        found = super()._arguments()
        return found | {"steps": _at_most(found["steps"], found["x"])}


class _Turns:
    """Evaluates between two training steps, if there is no evaluator task."""

    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self._began = time.monotonic()
        self._path: str | None = None
        self._logs: dict[str, float] = {}

    def __call__(self) -> None:
        if time.monotonic() - self._began >= self._spec.throttle_secs:
            self.last()

    def last(self) -> dict[str, float]:
        """Returns the results of the newest checkpoint, and evaluates it first if necessary."""
        newest = latest_checkpoint(self._estimator.model_dir)
        if newest is None or newest != self._path:
            self._began, spec = time.monotonic(), self._spec
            self._logs = self._estimator.evaluate(spec.input_fn, spec.steps, newest, spec.callbacks)
            self._path = newest
        return self._logs


def _dataset(strategy: Strategy | None, input_fn: Callable[..., object]) -> Any:
    def call(context: InputContext) -> object:
        parameters = inspect.signature(input_fn).parameters
        if "input_context" in parameters:
            return input_fn(input_context=context)
        is_wanted = any(parameter.default is parameter.empty for parameter in parameters.values())
        return input_fn(context) if is_wanted else input_fn()

    return (strategy or default_strategy()).distribute_datasets_from_function(call)


def _at_most(steps: int | None, data: Any) -> int | None:
    """Limits `steps` to the length of the data, because Keras warns about more steps."""
    with contextlib.suppress(TypeError):  # the length of the data is unknown
        return min(steps, len(data)) if steps is not None else None
    return steps


def _steps_of(model: keras.Model, path: str | None) -> int:
    """Returns the number of trained steps of a model that was restored from a checkpoint, if any."""
    import keras

    counted = int(keras.ops.convert_to_numpy(keras_hooks.step_variable(model.optimizer)))
    number = os.path.basename(path or "").rpartition("-")[2]
    # The optimizer does not count the steps that loss scaling skips, but the number of the checkpoint does.
    return max(counted, int(number) if number.isdecimal() else 0)
