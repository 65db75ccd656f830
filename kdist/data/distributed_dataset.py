"""`DistributedDataset` and `DistributedIterator`, which yield one batch per replica."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist.backends.contract import Runtime
from kdist.cluster.logs import logger
from kdist.context import current_replica, in_function
from kdist.errors import DatasetError, InvalidArgumentError, OutOfRangeError, StrategyScopeError
from kdist.values import regroup

# Modules that need Keras are imported when a dataset is read, so importing this module stays cheap.
if TYPE_CHECKING:
    from kdist.arrays.types import Shape, Structure, T
    from kdist.backends.contract import ReplicaBatches
    from kdist.data.agreement import Step, Steps
    from kdist.data.sources.source import Source


class DistributedDataset:
    """A dataset whose elements contain one batch per replica.

    `Strategy.experimental_distribute_dataset` and `Strategy.distribute_datasets_from_function` return it. You
    can iterate over it repeatedly, or pass it to `fit`, `evaluate` and `predict`. All workers must do the
    same. If each worker has its own pipeline of batches, the lengths can differ, and no row is lost.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedDataset
    """

    def __init__(
        self,
        runtime: Runtime,
        open_at: Callable[[int, int], Steps],
        *,
        kind: str,
        num_steps: int | None,
        is_infinite: bool,
        inner_shapes: list[Shape] | None = None,
        sources: Sequence[Source] = (),
        num_pipelines: int = 1,
    ) -> None:
        self._runtime = runtime
        self._open_at = open_at  # takes an epoch and a step
        self._element_spec: Structure = None
        self._next = {"epoch": 0, "step": 0}  # where the next iterator starts
        self._newest: dict[str, int] | None = None  # the position of the newest iterator
        self._peeked: DistributedIterator | None = None
        self.kind = kind
        """The kind of the original dataset, for messages."""
        self.num_steps = num_steps
        """The number of steps per epoch, or `None` if it is unknown or infinite."""
        self.is_infinite = is_infinite
        """Whether the dataset is known to repeat forever."""
        self.sources = sources
        """The pipelines that this worker reads."""
        self.inner_shapes = inner_shapes
        """The row shape of each array, with `None` for varying axes. `None` to use the first batch."""
        self.num_pipelines = num_pipelines
        """The number of pipelines with different rows. 1 for global batches."""

    def __len__(self) -> int:
        if self.num_steps is None:
            raise TypeError(
                f"The number of steps of {self.kind} is unknown. Count the steps while you iterate."
            )
        return self.num_steps

    def __iter__(self) -> DistributedIterator:
        """Starts the next epoch, or resumes after `set_state`. Does not affect other iterators."""
        self._runtime.begin_loop()
        iterator, self._peeked = self._peeked or DistributedIterator(self, self._next), None
        iterator._is_looped = in_function()  # inside a function, it belongs to a loop
        self._newest = iterator._position
        self._next = {"epoch": self._next["epoch"] + 1, "step": 0}
        return iterator

    def reduce(self, initial_state: T, reduce_func: Callable[[T, Any], T]) -> T:
        """Combines the elements of one epoch with a function, like `functools.reduce`.

        All workers must call it. In a `tf.function`, write a `for` loop instead.

        Args:
            initial_state: The state that is passed with the first element.
            reduce_func: A function of a state and an element that returns the next state.

        Returns:
            The last state.

        Example:

        ```python
        batches = strategy.experimental_distribute_dataset(dataset)
        number_of_steps = batches.reduce(0, lambda steps, batch: steps + 1)
        ```
        """
        return functools.reduce(reduce_func, self, initial_state)

    @property
    def element_spec(self) -> Any:
        """The structure of an element, with one spec per array.

        On TensorFlow, a spec is a `tf.TypeSpec` as in `tf.distribute` for `tf.function(input_signature=...)`.
        With several replicas, it contains one spec per replica. On other backends, it is a
        `keras.KerasTensor`, or `None` for strings. Shapes describe one replica, without the number of rows.
        If the dataset has not been read yet, this reads the first step, so all workers must access it.
        """
        if self._element_spec is None:
            self._note_spec(self.peek_part())
        return self._element_spec

    def peek(self) -> Step | None:
        """Returns the first step of the next iterator without consuming it, or `None` if there is none."""
        if self._peeked is None:
            self._peeked = DistributedIterator(self, self._next)
        return self._peeked.peek()

    def peek_part(self) -> Structure:
        """Returns one replica's batch from the first step of the next iterator. All workers must call it."""
        self.peek()
        assert self._peeked is not None
        return self._peeked.peek_part()

    def get_state(self) -> dict[str, int]:
        """Returns the position of the newest iterator: its epoch, and the steps consumed in this epoch.

        It is JSON-compatible and equal on all workers. A new dataset, created in the same way, resumes there
        after `set_state`. If the dataset has no global batches, the number of workers must be the same.
        """
        return self._in_epoch(self._next if self._newest is None else self._newest)

    def set_state(self, state: Mapping[str, int]) -> None:
        """Makes the next iterator resume at a position from `get_state`. Does not affect existing iterators.

        Args:
            state: The result of `get_state`, in this or another process.

        Raises:
            InvalidArgumentError: If `state` does not consist of integers from 0: an epoch, a step, and the number of
                pipelines.
        """
        is_whole = all(isinstance(value, int) and value >= 0 for value in state.values())
        if set(state) | {"pipelines"} != {"epoch", "step", "pipelines"} or not is_whole:
            raise InvalidArgumentError(
                "The state of the dataset does not consist of an epoch, a step and a number of pipelines.",
                received={"state": dict(state)},
                hint="Pass the result of `get_state()`.",
            )
        self._next, self._newest = self._in_epoch(state), None
        saved, here = state.get("pipelines", self.num_pipelines), self.num_pipelines
        if saved != here and self._next["step"] and self._runtime.worker_index == 0:
            logger.warning(
                "the dataset had %d pipelines when its position was saved, and now has %d. %d steps of the epoch were "
                "consumed before, so this epoch repeats or skips rows.\n"
                "To resume with the same rows, start the same number of workers.",
                saved,
                here,
                self._next["step"],
            )
        if self._peeked is not None:
            self._peeked.close()
            self._peeked = None

    def _in_epoch(self, position: Mapping[str, int]) -> dict[str, int]:
        """Replaces the position after the last step with the start of the next epoch."""
        epoch, step = position["epoch"], position["step"]
        ended = self.num_steps is not None and 0 < self.num_steps <= step
        epoch, step = (epoch + 1, 0) if ended else (epoch, step)
        return {"epoch": epoch, "step": step, "pipelines": self.num_pipelines}

    def _note_spec(self, part: Structure) -> None:
        if self._element_spec is None:
            self._element_spec = self._runtime.element_spec(part, self.inner_shapes)

    def __repr__(self) -> str:
        return f"<DistributedDataset of {self.kind}, num_steps={self.num_steps}>"


_numbers = itertools.count()
_iterators: weakref.WeakValueDictionary[int, DistributedIterator] = weakref.WeakValueDictionary()


def numbered(number: int) -> DistributedIterator:
    return _iterators[number]


class DistributedIterator:
    """Iterates over one epoch of a `DistributedDataset`.

    Elements have the structure of the dataset's elements. Each array is a `PerReplica` with one batch per
    local replica, or the plain array if the worker has one replica.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedIterator
    """

    _source: Steps | None = None  # `torch.compile` creates objects of the class without calling `__init__`

    def __init__(self, dataset: DistributedDataset, position: Mapping[str, int]) -> None:
        self._dataset = dataset
        self._position = dict(position)
        self._generator: Iterator[Step] | None = None
        self._ahead: list[Step | None] = []  # at most one step, read by `peek`
        self._is_looped = False
        self.kept: list[Structure] | None = None
        """The elements that were read since this was set to an empty list; `None` to keep none."""
        self._again: list[Structure] = []  # read before the steps
        self.number = next(_numbers)
        """Unique in this process."""
        _iterators[self.number] = self

    @property
    def steps(self) -> Iterator[Step]:
        """The steps, for the training loop. They can be iterated only once."""
        if self._generator is None:
            self._source = self._dataset._open_at(self._position["epoch"], self._position["step"])
            self._generator = _counted(self._source, self._ahead, self._position)
        return self._generator

    def peek(self) -> Step | None:
        """Returns the next step without consuming it, or `None` at the end."""
        if not self._ahead:
            self.steps  # noqa: B018  # opens the pipeline
            assert self._source is not None
            self._ahead.append(self._source.next())
        return self._ahead[0]

    def peek_part(self) -> Structure:
        """Returns one replica's batch from the next step, preferably a batch with rows."""
        from kdist.arrays import rows

        step = self.peek()
        if step is None:
            kind = self._dataset.kind
            raise DatasetError(
                "The dataset contains no batches.",
                received={"dataset": kind},
                hint="Pass a dataset with at least one batch.",
            )
        parts = step.as_parts(self._dataset._runtime)
        if rows.is_single(parts[0]):
            return parts[0]
        return next((part for part in parts if rows.num_rows(part)), parts[0])

    def batches(self) -> Iterator[ReplicaBatches]:
        """Returns batches for step functions. The pipeline closes when the iterator ends or is deleted."""
        return (step.as_batch(self._dataset._runtime) for step in self.steps)

    def __iter__(self) -> DistributedIterator:
        self._dataset._runtime.begin_loop()
        self._is_looped = self._is_looped or in_function()
        return self

    def __next__(self) -> Any:
        if (traced := self._traced()) is not None:
            return next(traced)
        try:
            return self._next()
        except StopIteration:
            if in_function() and not self._is_looped:
                raise self.at_end() from None
            raise

    def _traced(self) -> Any:
        if current_replica() is not None:
            raise StrategyScopeError(
                "Cannot read a distributed dataset inside a replica.",
                hint="Read the batch outside and pass it: strategy.run(step, args=(next(iterator),))",
            )
        return self._dataset._runtime.traced(self)

    def repeat(self) -> None:
        """Makes the elements in `kept` the next elements again."""
        self._again[:0], self.kept = self.kept or [], None

    def _next(self) -> Structure:
        element = self._again.pop(0) if self._again else self._placed(next(self.steps))
        if self.kept is not None:
            self.kept.append(element)
        return element

    def _placed(self, step: Step) -> Structure:
        runtime = self._dataset._runtime
        parts = step.as_parts(runtime)
        if step.batch is None or not step.batch.is_placed or 0 in step.counts:
            parts = runtime.place(parts)
        if len(set(step.counts)) == 1:
            runtime.note_even(parts)
        self._dataset._note_spec(parts[0])
        return regroup(parts)

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
            OutOfRangeError: If the epoch has ended.
        """
        try:
            return next(self)
        except StopIteration:
            raise self.at_end() from None

    def at_end(self) -> OutOfRangeError:
        """Returns the error for the end of the epoch."""
        return OutOfRangeError(
            "The distributed dataset has ended.",
            received={"dataset": self._dataset.kind},
            hint="Create another iterator, or repeat the dataset.",
        )

    def get_next_as_optional(self) -> Optional:
        """Returns the next element, or an empty `Optional` at the end of the epoch."""
        if (traced := self._traced()) is not None:
            return traced.get_next_as_optional()
        try:
            return Optional((self._next(),))
        except StopIteration:
            return Optional(())

    # TensorFlow's protocol for arguments of a `tf.function`. Iterators over the same kind of elements share a
    # compiled function.
    def __tf_flatten__(self) -> tuple[object, tuple[object, ...]]:
        import numpy as np

        return (self._dataset._runtime.element_of(self),), (np.asarray(self.number),)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Sequence[object]) -> Any:
        return metadata[0].iterator(components[0])

    @property
    def element_spec(self) -> Any:
        """See `DistributedDataset.element_spec`."""
        return self._dataset.element_spec

    def get_state(self) -> dict[str, int]:
        """Returns the position of this iterator. See `DistributedDataset.get_state`."""
        return self._dataset._in_epoch(self._position)

    def close(self) -> None:
        """Stops the pipeline and its threads, also before the epoch ends."""
        if self._source is not None:
            self._source.close()

    def __del__(self) -> None:
        self.close()


def _counted(source: Steps, ahead: list[Step | None], position: dict[str, int]) -> Iterator[Step]:
    # Not a method, because a reference cycle would keep the thread and the batches until garbage collection.
    try:
        while (step := ahead.pop() if ahead else source.next()) is not None:
            position["step"] += 1
            yield step
        position.update(epoch=position["epoch"] + 1, step=0)
    finally:
        source.close()


class Optional:
    """An element that may be missing, like `tf.experimental.Optional`."""

    def __init__(self, values: Sequence[object]) -> None:
        self._values = values

    def has_value(self) -> bool:
        """Returns whether there is an element."""
        return bool(self._values)

    def get_value(self) -> Any:
        """Returns the element.

        Raises:
            OutOfRangeError: If there is no element.
        """
        if not self._values:
            raise OutOfRangeError(
                "Cannot get the value: the Optional is empty.", hint="Call `has_value()` first."
            )
        return self._values[0]
