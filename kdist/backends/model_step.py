"""Runs Keras's steps in replicas that run one by one, and computes metric results over all replicas."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import keras

from kdist.arrays.row_exchange import decode, encode
from kdist.arrays.splitting import have_all_rows
from kdist.backends.contract import ReplicaBatches
from kdist.backends.kept_gradients import KeepingSteps, KeptInReplicas
from kdist.backends.replica import Replica
from kdist.context import current_replica
from kdist.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kdist.arrays.types import Structure, Tensor


class ReplicatedSteps(KeepingSteps[KeptInReplicas]):
    """Runs a step of Keras or of the user in each local replica, on its rows of a global batch.

    The base class for backends that run replicas one by one.
    """

    def __exit__(self, kind: type[BaseException] | None = None, *exc: Any) -> None:
        if kind is not None and self.kept is not None:
            self.kept.drop(exc[0])
        super().__exit__(kind, *exc)

    def __call__(self, batches: Sequence[ReplicaBatches]) -> Structure:
        """Runs a step per batch. Returns the last logs (train, test) or the rows of all batches (predict)."""
        if self.kind == "predict":
            outputs = [self._predict(batch) for batch in batches]
            return keras.tree.map_structure(lambda *parts: self.concatenate(parts), *outputs)
        for batch in batches:
            if self.keeps and self.kept is not None:
                self.kept.next_batch()
            logs = self.run(batch)[0]
        return logs

    @abstractmethod
    def run(self, batch: ReplicaBatches) -> Sequence[Structure]:
        """Calls `in_replica` in each local replica, within `around_replicas`, and returns the results."""

    def around_replicas(self) -> AbstractContextManager[None]:
        """A context manager, entered outside the replicas, in which metric results cover all replicas."""
        return contextlib.nullcontext() if self.kind == "predict" else global_metric_results(self.model)

    def in_replica(self, replica: Replica, part: Structure) -> Structure:
        """Runs the step in the context and scope of one replica, on its rows."""
        if self.kind != "predict":
            replica.kept_gradients = self.kept if self.keeps else None
            return run_step(replica, self.model, f"{self.kind}_step", part)
        outputs = self.model.predict_step(part)
        replica.scope.aggregate()
        return outputs

    def _predict(self, batch: ReplicaBatches) -> Structure:
        results = self.run(batch)
        rows = [stop - start for start, stop in batch.split]
        for replica_id, result in zip(self.runtime.replica_ids, results, strict=True):
            check_rows(result, rows[replica_id])
        if have_all_rows(batch.split):
            return self.of_chief(results[0])
        per_worker = len(results)
        return self.gather(results, [sum(rows[i : i + per_worker]) for i in range(0, len(rows), per_worker)])

    def concatenate(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenates the rows of tensors."""
        return keras.ops.concatenate(list(parts))

    def of_chief(self, outputs: Structure) -> Structure:
        """Returns the chief's outputs. If all replicas have all rows, outputs of random layers can differ."""
        mine = encode(keras.tree.map_structure(keras.ops.convert_to_numpy, outputs))
        return decode(self.runtime.group.all_gather_bytes(mine if self.runtime.worker_index == 0 else b"")[0])

    def gather(self, results: Sequence[Structure], sizes: Sequence[int]) -> Structure:
        """Gathers the predictions of all replicas, given the local ones and each worker's number of rows."""
        local = keras.tree.map_structure(lambda *parts: self.concatenate(parts), *results)
        return keras.tree.map_structure(self.runtime.gather_over_workers, local)


def run_step(replica: Replica, model: keras.Model, method: str, data: Structure) -> Structure:
    """Runs `model.train_step` or `model.test_step` in a replica. Returns logs that are equal on all replicas.

    Call it in the context and scope of the replica, within `global_metric_results(model)`. Results of metrics
    are exact. Other scalars are means weighted by the number of rows.
    """
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
def global_metric_results(model: keras.Model) -> Iterator[None]:
    """Makes `metric.result()` in a replica cover all replicas. Enter this context outside the replicas.

    It sets a temporary attribute of each instance, because each Keras metric overrides `result` and a patch
    of the base class would miss these calls.
    """
    metrics = _metrics_of(model)
    for metric in metrics:
        metric.__dict__["result"] = _global_result(type(metric).result.__get__(metric))
    try:
        yield
    finally:
        for metric in metrics:
            metric.__dict__.pop("result", None)


def check_rows(outputs: Structure, num_rows: int) -> None:
    """Raises an error unless the outputs of `predict_step` match the rows of a replica."""
    for leaf in keras.tree.flatten(outputs):
        shape = tuple(getattr(leaf, "shape", ()))
        if not shape or shape[0] % num_rows:
            raise InvalidArgumentError(
                "`predict_step` returned an array whose number of rows does not match its input.",
                received={"rows": num_rows, "shape": shape},
                hint="Return one entry per row of the input, or a fixed number per row.",
            )


def _global_result(result: Callable[[], Structure]) -> Callable[[], Structure]:
    def wrapper() -> Structure:
        replica = current_replica()
        if not isinstance(replica, Replica) or replica.scope is None:
            return result()
        replica.scope.aggregate()
        value = result()
        # Keep the object and not only its id, because Python reuses ids of deleted objects.
        replica.global_values.update((id(leaf), leaf) for leaf in keras.tree.flatten(value))
        return value

    return wrapper


def _metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    found: dict[int, keras.metrics.Metric] = {}
    stack = list(model.metrics)
    while stack:
        metric = stack.pop()
        if id(metric) not in found:
            found[id(metric)] = metric
            stack.extend(getattr(metric, "metrics", ()) or ())
    return list(found.values())
