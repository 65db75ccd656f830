"""Distributed datasets in a `tf.function`: when the graph needs a step, it calls Python to read the batch."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from kdist.arrays import rows
from kdist.data.distributed_dataset import DistributedDataset, DistributedIterator, Optional, numbered
from kdist.errors import DatasetError, KdistError, OutOfRangeError, StrategyScopeError
from kdist.values import component, regroup

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime


# Loops -------------------------------------------------------------------------------------------------------------


class LoopInGraphError(StrategyScopeError):
    """Raised when Python loops over a distributed dataset in a graph, because the loop would never end."""

    def __init__(self) -> None:
        super().__init__(
            "AutoGraph did not convert a `for` loop over a distributed dataset in a compiled function.",
            hint="Compile a function that has source code, without autograph=False. Or call `iter(dataset)` outside, "
            "pass the iterator, and call `next(iterator)`.",
        )


def register_loops() -> None:
    """Registers loops over distributed datasets with AutoGraph, which has no public API for this."""
    from tensorflow.python.autograph.operators.control_flow import for_loop_registry

    for kind in (DistributedDataset, DistributedIterator, GraphIterator):
        for_loop_registry.register(kind, _for_loop)


def _for_loop(
    iterable: DistributedDataset | DistributedIterator | GraphIterator,
    extra_test: Callable[[], object] | None,
    body: Callable[..., object],
    *rest: Any,
) -> None:
    """Converts a `for` loop over a distributed dataset or iterator to a graph loop. Called by AutoGraph."""
    from tensorflow.python.autograph.operators import control_flow

    if tf.executing_eagerly():
        control_flow._py_for_stmt(iterable, extra_test, body, *rest)
        return
    *state, options = rest
    # One iteration at a time, because parallel steps could mix up their sums over the workers.
    state.append({**options, "parallel_iterations": 1})
    if isinstance(iterable, GraphIterator):
        control_flow._tf_iterator_for_stmt(iterable, extra_test, body, *state)
    elif isinstance(iterable, DistributedIterator):
        if Element.is_there(iterable):
            control_flow._tf_iterator_for_stmt(traced(iterable), extra_test, body, *state)
    elif Element.is_there(iterable):
        passes = _Passes(iterable)
        iterator = passes.begin(Element.of(iterable))
        control_flow._tf_iterator_for_stmt(iterator, extra_test, body, *state)
        passes.end(iterator)
    else:
        _Passes(iterable).begin_none()


class _Passes:
    """Starts an iterator over a dataset each time the graph reaches a loop, and closes it after the loop."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = weakref.ref(dataset)  # the caller of the compiled function keeps it alive
        self._open: dict[int, DistributedIterator] = {}  # one per thread that runs the loop

    def begin(self, element: Element) -> GraphIterator:
        """Returns the iterator of a pass, for the graph that is being traced."""
        this = _kept_by_graph(self)
        (number,) = _in_turn(lambda: [this()._begin()], [], [tf.int64])
        return GraphIterator(element, number)

    def end(self, iterator: GraphIterator) -> None:
        """Ends the pass, also after a `break`."""
        this = _kept_by_graph(self)
        _in_turn(lambda number: this()._end(int(number)), [iterator.number], [])

    def begin_none(self) -> None:
        """Begins an empty pass. Without a batch during tracing, the structure of the batches is unknown."""
        this = _kept_by_graph(self)
        _in_turn(lambda: this()._begin_none(), [], [])

    def _begin(self) -> int:
        while len(self._open) >= _MOST_OPEN:
            self._end(next(iter(self._open)))
        iterator = self._iterator()
        self._open[iterator.number] = iterator
        return iterator.number

    def _end(self, number: int) -> None:
        self._open.pop(number).close()

    def _begin_none(self) -> None:
        if next(self._iterator(), None) is not None:
            error = DatasetError(
                "A loop in a compiled function cannot read this dataset: it was empty when TensorFlow compiled the "
                "function, and now it has batches.",
                hint="Make the first call of the function when the dataset has a batch.",
            )
            _raised.append(error)
            raise error

    def _iterator(self) -> DistributedIterator:
        dataset = self._dataset()
        assert dataset is not None
        return iter(dataset)


# Limit of open passes per loop. A pass that failed stays open until this limit is reached.
_MOST_OPEN = 8


def _in_turn(
    function: Callable[..., object], inputs: Sequence[tf.Tensor], outputs: Sequence[tf.DType | tf.TypeSpec]
) -> list[tf.Tensor] | tf.Operation:
    """Calls a Python function when the graph runs, in program order.

    They all use one resource, because TensorFlow keeps the order of operations on a resource, also in loops.
    """
    return tf.py_function(lambda _, *args: function(*args), [_turn(), *inputs], outputs)


@functools.cache
def _turn() -> tf.Tensor:
    with tf.init_scope(), tf.device("cpu:0"):
        return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=(), shared_name="kdist_reading")


def _kept_by_graph(value: object) -> Callable[[], Any]:
    """Keeps a value alive as long as the traced function, and returns a weak reference to it.

    The reference is weak because TensorFlow keeps Python functions in a graph until the process ends.
    """
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph.outer_graph, tf.__internal__.FuncGraph):
        graph = graph.outer_graph
    graph._kept_for_kdist = [*getattr(graph, "_kept_for_kdist", ()), value]
    return weakref.ref(value)


# Elements ----------------------------------------------------------------------------------------------------------


class Element:
    """The structure, dtypes and inner shapes that all elements of a distributed dataset share.

    Datasets with equal descriptions share a compiled function.

    Args:
        runtime: The runtime whose replicas receive the elements.
        part: A batch of one replica.
        shapes: The inner shape of each array, or `None` to use the inner shapes of `part`.
    """

    def __init__(
        self, runtime: Runtime, part: object, shapes: Sequence[Sequence[int | None] | None] | None
    ) -> None:
        self.runtime = runtime
        is_single = rows.is_single(part)
        self.no_rows = rows.leaves_of(part if is_single else rows.empty_like(part))
        self._marks = _marks(part)
        leaves = rows.leaves_of(part)
        if shapes is None or len(shapes) != len(leaves):
            shapes = [None] * len(leaves)
        self.specs = [
            spec_of_any_rows(leaf, shape, is_single) for leaf, shape in zip(leaves, shapes, strict=True)
        ]

    @staticmethod
    def is_there(source: DistributedDataset | DistributedIterator) -> bool:
        """Returns whether a first element is available or known. All workers must call it, as all trace."""
        dataset = source if isinstance(source, DistributedDataset) else source._dataset
        with tf.init_scope():
            return dataset in _elements or source.peek() is not None

    @classmethod
    def of(cls, source: DistributedDataset | DistributedIterator) -> Element:
        """Returns the description of the first batch, without consuming it. All workers must call it."""
        dataset = source if isinstance(source, DistributedDataset) else source._dataset
        if dataset not in _elements:
            runtime = dataset._runtime
            with tf.init_scope():
                if isinstance(source, DistributedIterator) and source.peek() is None:
                    raise source.at_end()
                (part, *_) = runtime.place([source.peek_part()] * len(runtime.devices))
            _elements[dataset] = cls(runtime, part, dataset.inner_shapes)
        return _elements[dataset]

    def iterator(self, number: np.ndarray | tf.Tensor) -> DistributedIterator | GraphIterator:
        """Returns the iterator with a number, which is an array now or a tensor of the graph."""
        return numbered(int(number)) if isinstance(number, np.ndarray) else GraphIterator(self, number)

    def checked(self, part: object) -> list[tf.Tensor]:
        """Returns the arrays of another batch. Raises a `DatasetError` if its structure differs."""
        leaves = rows.leaves_of(part)
        if _marks(part) != self._marks or not all(map(tf.TypeSpec.is_compatible_with, self.specs, leaves)):
            raise DatasetError(
                "A batch differs from the first batch in its structure, dtypes or inner shapes. The compiled "
                "function cannot read it.",
                received={"first": self.specs, "batch": list(map(tf.type_spec_from_value, leaves))},
                hint="Pad the batches to one length, use a tf.data.Dataset whose element_spec allows all shapes, or "
                "read the dataset outside of the compiled function.",
            )
        return leaves

    def packed(self, leaves: Sequence[object]) -> Any:
        """Returns a batch with this structure and the given arrays."""
        left = iter(leaves)
        return keras.tree.map_structure(lambda mark: None if mark is None else next(left), self._marks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Element) and self._key() == other._key()

    def __hash__(self) -> int:
        return id(self.runtime)

    def _key(self) -> tuple[object, ...]:
        return id(self.runtime), self._marks, self.specs


_elements: weakref.WeakKeyDictionary[DistributedDataset, Element] = weakref.WeakKeyDictionary()


def _marks(part: object) -> object:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else True, part)


def spec_of_any_rows(
    leaf: tf.Tensor, inner: Sequence[int | None] | None = None, is_single: bool = False
) -> tf.TypeSpec:
    """Returns the `tf.TypeSpec` of an array, for any number of rows and optionally another inner shape."""
    spec = tf.type_spec_from_value(leaf)
    dims = [] if is_single else [None]
    shape = tf.TensorShape([*dims, *(leaf.shape[len(dims) :] if inner is None else inner)])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


# Iterators ---------------------------------------------------------------------------------------------------------


def traced(iterator: DistributedIterator) -> GraphIterator:
    """Returns the substitute for a distributed iterator that the traced function closes over."""
    return GraphIterator(Element.of(iterator), tf.constant(iterator.number), iterator)


class GraphIterator:
    """A distributed iterator in a graph: a tensor with its number and, if known, the iterator itself."""

    def __init__(
        self, element: Element, number: tf.Tensor, iterator: DistributedIterator | None = None
    ) -> None:
        self._element = element
        self.number = number
        self._iterator = iterator

    # Same as in `DistributedIterator`, because a `tf.function` may pass its argument to another function.
    def __tf_flatten__(self) -> tuple[tuple[Element], tuple[tf.Tensor]]:
        return (self._element,), (self.number,)

    @classmethod
    def __tf_unflatten__(
        cls, metadata: tuple[Element], components: Sequence[tf.Tensor]
    ) -> DistributedIterator | GraphIterator:
        return metadata[0].iterator(components[0])

    def __iter__(self) -> NoReturn:
        raise LoopInGraphError

    def __next__(self) -> Any:
        return self.get_next()

    def get_next(self) -> Any:
        """Returns the next element. At the end of the data, the graph raises an `OutOfRangeError`."""
        _, parts = self._read(ends=True)
        return regroup(parts)

    def get_next_as_optional(self) -> GraphOptional:
        """Returns an optional with the next element, which may be missing when the graph runs."""
        return GraphOptional(*self._read(ends=False))

    def _read(self, ends: bool) -> tuple[tf.Tensor, list[object]]:
        element, this = self._element, _kept_by_graph(self)
        number_local = len(element.runtime.devices)
        specs = element.specs * number_local
        has_value, *leaves = _in_turn(
            lambda number: this()._next(int(number), ends), [self.number], [tf.bool, *specs]
        )
        has_value.set_shape(())
        for leaf, spec in zip(leaves, specs, strict=True):
            if isinstance(spec, tf.TensorSpec):
                leaf.set_shape(spec.shape)
        size = len(element.specs)
        return has_value, [element.packed(leaves[i * size : (i + 1) * size]) for i in range(number_local)]

    def _next(self, number: int, ends: bool) -> list[object]:
        """Reads when the graph runs: whether there is a batch, and the arrays of all local replicas."""
        iterator = self._iterator or numbered(number)
        local = range(len(self._element.runtime.devices))
        try:
            batch = next(iterator)
            parts = [component(batch, i) for i in local]
            return [True, *(leaf for part in parts for leaf in self._element.checked(part))]
        except StopIteration:
            if ends:
                _raised.append(iterator.at_end())
                raise
            return [False, *self._element.no_rows * len(local)]
        except KdistError as error:
            _raised.append(error)
            raise


class GraphOptional(Optional):
    """An element that may be missing when the graph runs. A missing element has parts without rows."""

    def __init__(self, is_there: tf.Tensor, parts: list[object]) -> None:
        super().__init__(parts)
        self._is_there = is_there

    def has_value(self) -> tf.Tensor:
        return self._is_there

    def get_value(self) -> Any:
        """Returns the element. If there is none, the graph raises an `InvalidArgumentError`."""
        with tf.control_dependencies(
            [tf.debugging.Assert(self._is_there, ["An empty Optional has no value."])]
        ):
            parts = keras.tree.map_structure(
                lambda leaf: None if leaf is None else tf.identity(leaf), self._values
            )
        return regroup(parts)


# Errors ------------------------------------------------------------------------------------------------------------

# The last Python error that was raised in a graph. The graph's own error contains only its text.
_raised: collections.deque[KdistError] = collections.deque(maxlen=1)


class _TensorFlowOutOfRangeError(OutOfRangeError, tf.errors.OutOfRangeError):
    """An error that loops for kdist and loops for TensorFlow can both catch."""

    def __init__(self, problem: str, *, received: Mapping[str, object] | None = None, hint: str = "") -> None:
        OutOfRangeError.__init__(self, problem, received=received, hint=hint)
        (message,) = self.args
        tf.errors.OutOfRangeError.__init__(self, None, None, message)
        self.args = (message,)


@contextlib.contextmanager
def python_errors() -> Iterator[None]:
    """A context manager that raises Python's original error instead of the graph's error."""
    try:
        yield
    except tf.errors.OpError as error:
        known = _raised[0] if _raised else None
        if isinstance(known, OutOfRangeError) and isinstance(error, tf.errors.OutOfRangeError):
            raise _TensorFlowOutOfRangeError(
                known.problem, received=known.received, hint=known.hint
            ) from None
        if known is not None and str(known) in str(error):
            raise known from None
        raise
    except Exception as error:
        # An error of AutoGraph. Its type differs if AutoGraph cannot create an error of the original type.
        original: Any = error.__context__
        if hasattr(error, "ag_error_metadata") and hasattr(original, "ag_error_metadata"):
            del original.ag_error_metadata  # otherwise an outer function would process it again
            raise original from None
        raise
    finally:
        _raised.clear()
