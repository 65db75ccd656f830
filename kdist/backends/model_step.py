"""One of Keras's own steps in a replica, and the results of metrics for all replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from kdist.backends.replica import Replica
from kdist.context import current_replica
from kdist.errors import InvalidArgumentError


def run_step(replica: Replica, model: Any, method: str, data: Any) -> Any:
    """Runs `model.train_step` or `model.test_step` in a replica and returns logs that are equal on all replicas.

    Call it inside the replica's context and scope, within `global_metric_results(model)`.

    Args:
        replica: The replica that runs.
        model: A compiled Keras model.
        method: `"train_step"` or `"test_step"`.
        data: This replica's rows.

    Returns:
        The logs of the global batch. Results of metrics are exact; other scalars are means weighted by rows.
    """
    assert replica.scope is not None
    logs = getattr(model, method)(data)
    replica.scope.aggregate()
    leaves = keras.tree.flatten(logs)
    others = [
        i for i, leaf in enumerate(leaves) if leaf is not None and id(leaf) not in replica.global_values
    ]
    if others:
        values = [keras.ops.convert_to_tensor(leaves[i], dtype=keras.config.floatx()) for i in others]
        for i, mean in zip(others, replica.mean_over_rows(values), strict=True):
            leaves[i] = mean
    return keras.tree.pack_sequence_as(logs, leaves)


@contextlib.contextmanager
def global_metric_results(model: Any) -> Iterator[None]:
    """For the time of a step, lets `metric.result()` in a replica answer for all replicas.

    An attribute of the instance that is gone afterwards, not a change of a class: Keras's metrics each
    override `result`, so no method of a base class sees every call. Enter it outside the replicas.
    """
    metrics = _metrics_of(model)
    for metric in metrics:
        metric.__dict__["result"] = _global_result(type(metric).result.__get__(metric))
    try:
        yield
    finally:
        for metric in metrics:
            metric.__dict__.pop("result", None)


def check_rows(outputs: Any, num_rows: int) -> None:
    """Raises unless the outputs of `predict_step` in a replica stand for its rows: they are put together by rows."""
    for leaf in keras.tree.flatten(outputs):
        shape = tuple(getattr(leaf, "shape", ()))
        if not shape or shape[0] % num_rows:
            raise InvalidArgumentError(
                "What `predict_step` returns must have as many rows as its input, or a multiple of them.",
                received={"rows": num_rows, "shape": shape},
                hint="Override `predict_step` to return one entry a row.",
            )


def _global_result(result: Callable[[], Any]) -> Callable[[], Any]:
    def wrapper() -> Any:
        replica = current_replica()
        if not isinstance(replica, Replica) or replica.scope is None:
            return result()
        replica.scope.aggregate()
        value = result()
        # Kept in the replica, not only its id: an id is unique among living objects only.
        replica.global_values.update((id(leaf), leaf) for leaf in keras.tree.flatten(value))
        return value

    return wrapper


def _metrics_of(model: Any) -> list[Any]:
    found: dict[int, Any] = {}
    stack = list(model.metrics)
    while stack:
        metric = stack.pop()
        if id(metric) not in found:
            found[id(metric)] = metric
            stack.extend(getattr(metric, "metrics", ()) or ())
    return list(found.values())
