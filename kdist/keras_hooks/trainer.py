"""Access to private members of Keras's trainer that the loop of `fit` needs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from kdist.keras_hooks.wrapping import wrap

if TYPE_CHECKING:
    import keras
    from keras.src.trainers.trainer import Trainer as BaseTrainer

    from kdist.arrays.types import Function


# How often the user asked Keras to make the step functions of a model again.
_times_forced: weakref.WeakKeyDictionary[keras.Model, int] = weakref.WeakKeyDictionary()
# Models that the user compiled with `jit_compile=True`. Keras also turns "auto" into `True`.
_compiled_by_choice: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def base_trainer() -> type[BaseTrainer]:
    """Returns the base class of the trainers of all backends, which Keras 3.16 renames."""
    from keras.src.trainers import trainer

    return getattr(trainer, "BaseTrainer", None) or trainer.Trainer


def hook_compile() -> None:
    """Records models for `asks_for_jit`."""

    def compile(original: Function, self: BaseTrainer, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        is_chosen = (kwargs.get("jit_compile") or (*args, *[None] * 8)[7]) is True
        (_compiled_by_choice.add if is_chosen else _compiled_by_choice.discard)(self)

    def from_config(original: Function, self: BaseTrainer, config: Mapping[str, object]) -> None:
        original(self, config)
        _compiled_by_choice.discard(self)  # a file may contain Keras's choice for "auto"

    wrap(base_trainer(), "compile", compile)
    wrap(base_trainer(), "compile_from_config", from_config)


def hook_functions() -> None:
    """Records calls of `make_train_function(force=True)`, and of the methods for testing and predicting."""
    import keras

    def make(attribute: str, original: Function, self: keras.Model, force: bool = False) -> object:
        if getattr(self, attribute, None) is _function_of_kdist:
            setattr(self, attribute, None)  # Keras would return it
        if force:
            _times_forced[self] = _times_forced.get(self, 0) + 1
        return original(self, force)

    for kind in ("train", "test", "predict"):
        name = f"make_{kind}_function"
        owner = next(owner for owner in keras.Model.__mro__ if name in vars(owner))
        wrap(owner, name, functools.partial(make, f"{kind}_function"))


def _function_of_kdist(*_: object) -> NoReturn:
    raise NotImplementedError("kdist runs the steps of this model itself. Call `make_train_function` first.")


def is_reset(model: keras.Model, kind: str) -> bool:
    """Returns whether the user has set, for example, `model.train_function` to `None` since the last call."""
    before = getattr(model, f"{kind}_function", None)
    if before is None:
        setattr(model, f"{kind}_function", _function_of_kdist)
    return before is None


def asks_for_jit(model: keras.Model) -> bool:
    """Returns whether a model was compiled with `jit_compile=True`, rather than with "auto"."""
    return model in _compiled_by_choice


def require_compiled(model: keras.Model, method: str) -> None:
    """Raises Keras's own error if the model is not compiled."""
    model._assert_compile_called(method)


def compiled_state(model: keras.Model) -> tuple[object, ...]:
    """Returns the parts of a model that a step depends on. If any of them changes, a new step is needed."""
    return (
        getattr(model, "optimizer", None),
        getattr(model, "_compile_loss", None),
        getattr(model, "_compile_metrics", None),
        bool(getattr(model, "run_eagerly", False)),
        getattr(model, "_jit_compile", None),
        tuple(v.trainable for v in model.variables),
        _times_forced.get(model, 0),
    )


def layers_are_built(model: keras.Model) -> bool:
    """Returns whether the variables of all layers exist."""
    return all(layer.built for layer in model._flatten_layers())


def has_all_variables(layer: keras.Layer) -> bool:
    """Returns whether a layer is built, or all layers of a model that is never built, as a GAN without `call`."""
    import keras

    kind = type(layer)
    never_builds = kind.build is keras.Model.build and kind.call is keras.Model.call
    if layer.built or not (isinstance(layer, keras.Model) and never_builds):
        return bool(layer.built)
    inner = layer._flatten_layers(include_self=False)
    return bool(inner) and all(other.built for other in inner)


def is_built(model: keras.Model) -> bool:
    """Returns whether all variables of a compiled model exist. Keras checks this before it reads the data."""
    return not needs_batch(model) and (model.optimizer is None or model.optimizer.built)


def needs_batch(model: keras.Model) -> bool:
    """Returns whether Keras reads a batch to create variables. An optimizer needs only the variables."""
    return not (
        layers_are_built(model)
        and (model._compile_metrics is None or model._compile_metrics.built)
        and (model._compile_loss is None or model._compile_loss.built)
    )


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that a callback has set as the first one of `fit`, or `None`."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    model._initial_epoch = epoch


def metrics_or_logs(model: keras.Model, logs: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the results of the model's metrics, or the logs of a step if they have other entries."""
    return model._get_metrics_result_or_logs(logs)


def python_logs(
    model: keras.Model, logs: Mapping[str, object], return_dict: bool
) -> dict[str, float] | list[float] | float:
    """Returns logs as Keras's methods do: a dictionary, or only the values in the order of the metrics."""
    logs = pythonify_logs(logs)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def should_validate(model: keras.Model, epoch: int, freq: int | Sequence[int]) -> bool:
    return bool(model._should_eval(epoch, freq))


def overrides(model: keras.Model, name: str) -> bool:
    """Returns whether a model or its class replaces a method of `keras.Model`, such as `evaluate`."""
    import keras

    owner = next(parent for parent in type(model).__mro__ if name in vars(parent))
    return name in vars(model) or owner not in keras.Model.__mro__


def pythonify_logs(logs: Mapping[str, object]) -> dict[str, float]:
    """Converts logs to Python floats, flattened and sorted, as Keras does."""
    from keras.src.utils.python_utils import pythonify_logs as keras_pythonify_logs

    return keras_pythonify_logs(logs)
