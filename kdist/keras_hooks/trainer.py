"""What Keras's trainer keeps for itself, and the loop of `fit` needs; each function has one line of Keras's in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from kdist.keras_hooks.wrapping import wrap

# Models whose user has asked for `jit_compile=True`: Keras makes that of "auto", too.
_compiled_by_choice: weakref.WeakSet[Any] = weakref.WeakSet()


def base_trainer() -> Any:
    """Returns the class from which the trainers of all backends derive; Keras 3.16 renames it."""
    from keras.src.trainers import trainer

    return getattr(trainer, "BaseTrainer", None) or trainer.Trainer


def hook_compile() -> None:
    """Notes which models `asks_for_jit` is about."""

    def compile(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        is_chosen = (kwargs.get("jit_compile") or (*args, *[None] * 8)[7]) is True
        (_compiled_by_choice.add if is_chosen else _compiled_by_choice.discard)(self)

    def from_config(original: Callable[..., Any], self: Any, config: Any) -> None:
        original(self, config)
        _compiled_by_choice.discard(self)  # what a file says may be what Keras made of "auto"

    wrap(base_trainer(), "compile", compile)
    wrap(base_trainer(), "compile_from_config", from_config)


def asks_for_jit(model: Any) -> bool:
    """Says whether a model was compiled with `jit_compile=True`, and not with "auto"."""
    return model in _compiled_by_choice


def require_compiled(model: Any, method: str) -> None:
    """Raises Keras's own error unless the model was compiled."""
    model._assert_compile_called(method)


def compiled_state(model: Any) -> tuple[Any, ...]:
    """What a step was made from: another one is needed once any of it is another object."""
    return (
        getattr(model, "optimizer", None),
        getattr(model, "_compile_loss", None),
        getattr(model, "_compile_metrics", None),
        bool(getattr(model, "run_eagerly", False)),
        getattr(model, "_jit_compile", None),
        tuple(v.trainable for v in model.variables),
    )


def layers_are_built(model: Any) -> bool:
    """Says whether the variables of all layers are there."""
    return all(layer.built for layer in model._flatten_layers())


def is_built(model: Any) -> bool:
    """Says whether all variables of a compiled model are there: what Keras asks before it looks at the data."""
    return (
        layers_are_built(model)
        and (model._compile_metrics is None or model._compile_metrics.built)
        and (model._compile_loss is None or model._compile_loss.built)
        and (model.optimizer is None or model.optimizer.built)
    )


def initial_epoch(model: Any) -> int | None:
    """Returns the epoch that `fit` is to begin with, where a callback has set one."""
    return model._initial_epoch


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Sets what `initial_epoch` returns."""
    model._initial_epoch = epoch


def metrics_or_logs(model: Any, logs: Any) -> Any:
    """Returns the results of the model's metrics, or the logs of a step that says others."""
    return model._get_metrics_result_or_logs(logs)


def python_logs(model: Any, logs: Any, return_dict: bool) -> Any:
    """Returns logs as Keras's methods do: a dictionary, or the values alone, in the order of the metrics."""
    logs = pythonify_logs(logs)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def should_validate(model: Any, epoch: int, freq: Any) -> bool:
    """Says whether the epoch is one after which `fit` validates."""
    return bool(model._should_eval(epoch, freq))


def pythonify_logs(logs: Any) -> dict[str, Any]:
    """Keras's own translation of logs into Python floats, flattened and sorted."""
    from keras.src.utils.python_utils import pythonify_logs as keras_pythonify_logs

    return keras_pythonify_logs(logs)
