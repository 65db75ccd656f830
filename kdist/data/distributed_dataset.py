"""`DistributedDataset` and `DistributedIterator`: a dataset as the replicas of a strategy consume it."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist.backends.contract import Runtime
from kdist.context import current_replica, in_function
from kdist.errors import DatasetError, InvalidArgumentError, OutOfRangeError, StrategyScopeError
from kdist.values import regroup

# What needs Keras is imported when a dataset is read: the class alone is light.
if TYPE_CHECKING:
    from kdist.data.agreement import Step, Steps


class DistributedDataset:
    """A dataset whose elements have one batch for each replica.

    Comes from `Strategy.experimental_distribute_dataset` and `Strategy.distribute_datasets_from_function`.
    Iterate over it, or hand it to `fit`, `evaluate` and `predict`; it can be iterated again and again, and all
    workers must iterate alike. Pipelines of different lengths are fine: nothing hangs and no row is lost.

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
        inner_shapes: list[Any] | None = None,
        sources: Sequence[Any] = (),
    ) -> None:
        self._runtime = runtime
        self._open_at = open_at  # an epoch and a step
        self._element_spec: Any = None
        self._next = {"epoch": 0, "step": 0}  # where the next iterator begins
        self._newest: dict[str, int] | None = None  # the position of the newest iterator
        self._peeked: DistributedIterator | None = None
        self.kind = kind
        """What the dataset was made of, for messages."""
        self.num_steps = num_steps
        """Steps of an epoch; `None` where unknown or without end."""
        self.is_infinite = is_infinite
        """Whether an epoch is known to have no end."""
        self.sources = sources
        """The pipelines that it reads."""
        self.inner_shapes = inner_shapes
        """The shape of a row of each array, with `None` for what differs; `None` where the first batch tells."""

    def __len__(self) -> int:
        if self.num_steps is None:
            raise TypeError(
                f"The number of steps of {self.kind} is unknown. Count the steps while you iterate."
            )
        return self.num_steps

    def __iter__(self) -> DistributedIterator:
        """Starts the next epoch, or goes on where `set_state` said. Other iterators are not disturbed."""
        self._runtime.begin_loop()
        iterator, self._peeked = self._peeked or DistributedIterator(self, self._next), None
        iterator._is_looped = in_function()  # begun in a function, it is in a loop there
        self._newest = iterator._position
        self._next = {"epoch": self._next["epoch"] + 1, "step": 0}
        return iterator

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Goes through one epoch with a function that makes a new state of the old one and an element.

        All workers must call it. In a `tf.function`, write a `for` loop instead.

        Args:
            initial_state: What the function is given with the first element.
            reduce_func: Called with a state and an element; returns the next state.

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
        """The structure of an element, with a spec for each array.

        On TensorFlow a `tf.TypeSpec`, as `tf.distribute` has it (with several replicas, one that holds the spec of
        each), for `tf.function(input_signature=...)`; elsewhere a `keras.KerasTensor`, and `None` for strings.
        Shapes are those of one replica, without the number of rows. Where the dataset has not been read yet,
        this reads the first step; all workers must ask.
        """
        if self._element_spec is None:
            self._note_spec(self.peek_part())
        return self._element_spec

    def peek(self) -> Step | None:
        """Returns the first step of the next iterator without consuming it; `None` if there is none."""
        if self._peeked is None:
            self._peeked = DistributedIterator(self, self._next)
        return self._peeked.peek()

    def peek_part(self) -> Any:
        """Returns a batch of one replica, the first of the next iterator. All workers must call it."""
        self.peek()
        assert self._peeked is not None
        return self._peeked.peek_part()

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the newest iterator: how many epochs and steps have been consumed.

        Equal on all workers. JSON can hold it: keep it in a checkpoint. A new dataset, made in the same way (on
        the same number of workers, unless it holds global batches), goes on from there after `set_state`.
        """
        return self._in_epoch(self._next if self._newest is None else self._newest)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on, with the next iterator, where `get_state` was called. Iterators that live stay where they are.

        Args:
            state: What `get_state` returned, in this process or another.

        Raises:
            InvalidArgumentError: It is something else.
        """
        if set(state) != {"epoch", "step"} or any(not isinstance(v, int) or v < 0 for v in state.values()):
            raise InvalidArgumentError(
                "The state of the dataset does not consist of an epoch and a step.",
                received={"state": dict(state)},
                hint="Pass the result of `get_state()`.",
            )
        self._next, self._newest = self._in_epoch(state), None
        if self._peeked is not None:
            self._peeked.close()
            self._peeked = None

    def _in_epoch(self, position: Mapping[str, int]) -> dict[str, int]:
        """A position after the last step is the beginning of the next epoch."""
        epoch, step = position["epoch"], position["step"]
        ended = self.num_steps is not None and 0 < self.num_steps <= step
        return {"epoch": epoch + 1, "step": 0} if ended else {"epoch": epoch, "step": step}

    def _note_spec(self, part: Any) -> None:
        if self._element_spec is None:
            self._element_spec = self._runtime.element_spec(part, self.inner_shapes)

    def __repr__(self) -> str:
        return f"<DistributedDataset of {self.kind}, num_steps={self.num_steps}>"


_numbers = itertools.count()
_iterators: weakref.WeakValueDictionary[int, DistributedIterator] = weakref.WeakValueDictionary()


def numbered(number: int) -> DistributedIterator:
    """Returns the iterator of a number."""
    return _iterators[number]


class DistributedIterator:
    """Goes through one epoch of a `DistributedDataset`.

    Each element has the structure of the dataset's, with a `PerReplica` of one batch a local replica for every
    array; where the worker has one replica, the array itself.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedIterator
    """

    _source: Steps | None = None  # `torch.compile` makes objects of the class without calling `__init__`

    def __init__(self, dataset: DistributedDataset, position: Mapping[str, int]) -> None:
        self._dataset = dataset
        self._position = dict(position)
        self._generator: Iterator[Step] | None = None
        self._ahead: list[Step | None] = []  # at most one: what `peek` has read
        self._is_looped = False
        self.number = next(_numbers)
        """Unique in this process."""
        _iterators[self.number] = self

    @property
    def steps(self) -> Iterator[Step]:
        """The steps themselves, for the training loop; they are read once."""
        if self._generator is None:
            self._source = self._dataset._open_at(self._position["epoch"], self._position["step"])
            self._generator = _counted(self._source, self._ahead, self._position)
        return self._generator

    def peek(self) -> Step | None:
        """Returns the next step without consuming it; `None` at the end."""
        if not self._ahead:
            self.steps  # noqa: B018  # opens them
            assert self._source is not None
            self._ahead.append(self._source.next())
        return self._ahead[0]

    def peek_part(self) -> Any:
        """Returns the batch of one replica, of the next step."""
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

    def batches(self) -> Iterator[Any]:
        """What step functions take, for the training loop. The epoch ends with the iterator, however it ends."""
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

    def _next(self) -> Any:
        import keras

        runtime = self._dataset._runtime
        step = next(self.steps)
        parts = step.as_parts(runtime)
        if step.batch is None or not step.batch.is_placed or 0 in step.counts:
            parts = runtime.place(parts)
        if len(set(step.counts)) == 1:
            runtime.note_even(parts)
        self._dataset._note_spec(parts[0])
        return regroup(parts, keras.tree.map_structure)

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
            OutOfRangeError: The epoch has ended.
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

    # TensorFlow's protocol for what enters a `tf.function`: iterators over the same kind of elements share what is
    # compiled.
    def __tf_flatten__(self) -> tuple[Any, tuple[Any, ...]]:
        import numpy as np

        return (self._dataset._runtime.element_of(self),), (np.asarray(self.number),)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Sequence[Any]) -> Any:
        return metadata[0].iterator(components[0])

    @property
    def element_spec(self) -> Any:
        """As `DistributedDataset.element_spec`."""
        return self._dataset.element_spec

    def get_state(self) -> dict[str, Any]:
        """Returns this iterator's position, as `DistributedDataset.get_state` does."""
        return self._dataset._in_epoch(self._position)

    def close(self) -> None:
        """Ends the pipeline before its end, with its threads."""
        if self._source is not None:
            self._source.close()

    def __del__(self) -> None:
        self.close()


def _counted(source: Steps, ahead: list[Step | None], position: dict[str, int]) -> Iterator[Step]:
    # A function, and no method: the iterator would wait for the garbage collector, with its thread and batches.
    try:
        while (step := ahead.pop() if ahead else source.next()) is not None:
            position["step"] += 1
            yield step
        position.update(epoch=position["epoch"] + 1, step=0)
    finally:
        source.close()


class Optional:
    """An element that may be missing, in the manner of `tf.experimental.Optional`."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def has_value(self) -> bool:
        """Says whether there is an element."""
        return bool(self._values)

    def get_value(self) -> Any:
        """Returns the element.

        Raises:
            OutOfRangeError: There is none.
        """
        if not self._values:
            raise OutOfRangeError(
                "Cannot get the value: the Optional is empty.", hint="Call `has_value()` first."
            )
        return self._values[0]
