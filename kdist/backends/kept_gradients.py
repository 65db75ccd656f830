"""Gradients that stay on their workers until an optimizer that accumulates gradients needs their sum."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import keras

from kdist import keras_hooks
from kdist.backends.contract import Runtime, StepFunction

if TYPE_CHECKING:
    from kdist.arrays.types import Tensor, TensorT

KeptT = TypeVar("KeptT", bound="KeptGradients")
_LOST = (
    "The gradients of the last batches, which the optimizer has not applied yet, are lost. "
    "Restore a checkpoint if you continue to train the model."
)


def may_keep(runtime: Runtime, model: keras.Model) -> bool:
    """Returns whether no code but the optimizer's uses the gradients of a model's step."""
    strategy = keras_hooks.strategy_of(model)
    return (
        runtime.num_workers > 1
        and getattr(strategy, "own_ops", None) is None
        and not runtime.divides_over_workers
        and not keras_hooks.overrides(model, "train_step")
        and keras_hooks.only_accumulates(model.optimizer, model.trainable_variables)
    )


class KeptGradients(ABC):
    """The sums of the gradients of several batches, for each local replica and variable.

    With `gradient_accumulation_steps=n`, the workers send gradients only after n batches. Before, Keras's optimizer
    accumulates zeros. `no_sync` of DDP has the same purpose:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html

    Args:
        runtime: The runtime of the workers.
        model: The model that these gradients belong to, with an optimizer for which `may_keep` is true.
    """

    def __init__(self, runtime: Runtime, model: keras.Model) -> None:
        self._runtime = runtime
        self._optimizer = model.optimizer
        self._every: int = model.optimizer.gradient_accumulation_steps
        self._positions = {id(variable): i for i, variable in enumerate(model.trainable_variables)}
        self._batch = 0
        self._has_some = False
        self.is_due = True
        """Whether the optimizer needs the sum after this batch."""

    def belongs_to(self, model: keras.Model) -> bool:
        """Returns whether the model still has the same optimizer and trains the same variables."""
        return self._optimizer is model.optimizer and [*self._positions] == [
            *map(id, model.trainable_variables)
        ]

    def start(self) -> None:
        """Reads how many batches the optimizer has counted, because another program or the user may change it."""
        self._batch = int(keras.ops.convert_to_numpy(keras_hooks.step_variable(self._optimizer)))

    def next_batch(self) -> None:
        self._batch += 1
        self.is_due = self._batch % self._every == 0
        self._has_some = not self.is_due

    def add_to_optimizer(self) -> None:
        """Adds the sums over all replicas to the accumulators of the optimizer. All workers must call it."""
        if not self._has_some:
            return
        self._has_some = False
        totals = self._runtime.sum_over_workers(self.take())
        for variable, total in zip(keras_hooks.accumulators(self._optimizer), totals, strict=True):
            variable.assign_add(total)

    def drop(self, error: BaseException) -> None:
        """Forgets the sums after an error, because the workers may have failed at different batches."""
        if self._has_some:
            self._has_some = False
            self.take()
            error.add_note(_LOST)

    @abstractmethod
    def take(self) -> list[Tensor]:
        """Returns the sums over the local replicas, for each variable, and sets all sums to zero."""


class KeptInReplicas(KeptGradients):
    """Gradients that each replica keeps, for backends that run replicas one by one."""

    def positions(self, variables: Sequence[keras.Variable]) -> list[int]:
        return [self._positions[id(variable)] for variable in variables]

    @abstractmethod
    def add(self, local_index: int, positions: Sequence[int], gradients: Sequence[TensorT]) -> list[TensorT]:
        """Adds gradients of a local replica to its sums, and returns these sums."""

    @abstractmethod
    def clear(self, local_index: int, positions: Sequence[int]) -> None:
        """Sets sums of a local replica to zero."""


class KeepingSteps(StepFunction, Generic[KeptT]):
    """Steps that keep gradients between two calls of `keep_gradients`."""

    def __init__(self, runtime: Runtime, model: keras.Model, kind: str) -> None:
        self.runtime = runtime
        self._model = weakref.ref(model)  # a weak reference, because the model owns this object
        self.kind = kind
        self.kept: KeptT | None = None
        self.keeps = False
        self.can_keep = type(self).new_kept is not KeepingSteps.new_kept

    @property
    def model(self) -> keras.Model:
        return self._model()

    def keep_gradients(self, keeps: bool) -> None:
        model = self.model
        if self.kept is not None:
            self.kept.add_to_optimizer()
            if not self.kept.belongs_to(model):
                self.kept = None
        self.keeps = keeps and self.can_keep and may_keep(self.runtime, model)
        if self.keeps:
            self.kept = self.kept or self.new_kept()
            self.kept.start()

    def new_kept(self) -> KeptT:
        """Returns an object in which the replicas keep gradients. Without this method, steps keep none."""
        raise NotImplementedError
