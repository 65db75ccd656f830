"""Distributed datasets in a `tf.function`: Python reads a step whenever the graph asks for one."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.arrays import rows
from kdist.data.distributed_dataset import DistributedDataset, DistributedIterator, Optional, numbered
from kdist.errors import DatasetError, KdistError, OutOfRangeError, StrategyScopeError
from kdist.values import component, regroup

# Loops -------------------------------------------------------------------------------------------------------------


class LoopInGraphError(StrategyScopeError):
    """Python loops over a distributed dataset in a graph, which would have no end."""

    def __init__(self) -> None:
        super().__init__(
            "In a compiled function on TensorFlow, a `for` over a distributed dataset is a loop of the graph, "
            "which AutoGraph must see.",
            hint="Compile a function whose source can be found, and not with autograph=False; or call "
            "`iter(dataset)` outside, pass the iterator, and call `next(iterator)`.",
        )


def register_loops() -> None:
    """Makes loops over distributed datasets known to AutoGraph, which has no public way to."""
    from tensorflow.python.autograph.operators.control_flow import for_loop_registry

    for kind in (DistributedDataset, DistributedIterator, GraphIterator):
        for_loop_registry.register(kind, _for_loop)


def _for_loop(iterable: Any, extra_test: Any, body: Any, *rest: Any) -> None:
    """What AutoGraph calls for a `for` over something distributed: a loop of the graph, whatever its length."""
    from tensorflow.python.autograph.operators import control_flow

    if tf.executing_eagerly():
        control_flow._py_for_stmt(iterable, extra_test, body, *rest)
        return
    *state, options = rest
    # One after the other: the sums of two steps over the workers would be taken for each other.
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
    """Starts an iterator over a dataset each time that the graph gets to a loop, and ends it."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = weakref.ref(dataset)  # held by whoever calls what is compiled
        self._open: dict[int, DistributedIterator] = {}  # one for each thread that is in the loop

    def begin(self, element: Element) -> GraphIterator:
        """Returns the iterator of a pass, for the graph that is being built."""
        this = _kept_by_graph(self)
        (number,) = _in_turn(lambda: [this()._begin()], [], [tf.int64])
        return GraphIterator(element, number)

    def end(self, iterator: GraphIterator) -> None:
        """Ends the pass, also where a `break` has left it."""
        this = _kept_by_graph(self)
        _in_turn(lambda number: this()._end(int(number)), [iterator.number], [])

    def begin_none(self) -> None:
        """Begins a pass that has no batch, as there was none when the function was traced: nobody knows its kind."""
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
                "On TensorFlow a loop in a compiled function goes over no batch of a dataset that had no batch when "
                "the function was compiled.",
                hint="Call the function for the first time when the dataset has a batch.",
            )
            _raised.append(error)
            raise error

    def _iterator(self) -> DistributedIterator:
        dataset = self._dataset()
        assert dataset is not None
        return iter(dataset)


# Passes of one loop that are kept: those that an error has left are not ended before.
_MOST_OPEN = 8


def _in_turn(function: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Calls a Python function when the graph runs, in the program's order.

    TensorFlow keeps the order of what uses the same tensor of a resource, loops included: so all of these use one.
    """
    return tf.py_function(lambda _, *args: function(*args), [_turn(), *inputs], outputs)


@functools.cache
def _turn() -> Any:
    with tf.init_scope(), tf.device("cpu:0"):
        return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=(), shared_name="kdist_reading")


def _kept_by_graph(value: Any) -> Callable[[], Any]:
    """Keeps a value as long as the function that is being traced; returns what a Python function in it may hold.

    TensorFlow keeps such functions, and what they hold, as long as the process.
    """
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph.outer_graph, tf.__internal__.FuncGraph):
        graph = graph.outer_graph
    graph._kept_for_kdist = [*getattr(graph, "_kept_for_kdist", ()), value]
    return weakref.ref(value)


# Elements ----------------------------------------------------------------------------------------------------------


class Element:
    """What the elements of a distributed dataset have in common: structure, dtypes, and shapes but for the rows.

    Equal ones run what is compiled for one of them.

    Args:
        runtime: Whose replicas take them.
        part: A batch of one replica.
        shapes: Inner shapes of all batches, for each array, where the dataset knows them; else those of `part`.
    """

    def __init__(self, runtime: Any, part: Any, shapes: list[Any] | None) -> None:
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
        """Says whether there is an element to look at, now or before. All workers trace, so all do."""
        dataset = source if isinstance(source, DistributedDataset) else source._dataset
        with tf.init_scope():
            return dataset in _elements or source.peek() is not None

    @classmethod
    def of(cls, source: DistributedDataset | DistributedIterator) -> Element:
        """Looks at the first batch, which stays to be read. All workers trace, so all do.

        Raises:
            OutOfRangeError: The iterator has ended, and nobody has looked before.
        """
        dataset = source if isinstance(source, DistributedDataset) else source._dataset
        if dataset not in _elements:
            runtime = dataset._runtime
            with tf.init_scope():
                if isinstance(source, DistributedIterator) and source.peek() is None:
                    raise source.at_end()
                (part, *_) = runtime.place([source.peek_part()] * len(runtime.devices))
            _elements[dataset] = cls(runtime, part, dataset.inner_shapes)
        return _elements[dataset]

    def iterator(self, number: Any) -> DistributedIterator | GraphIterator:
        """Returns the iterator of a number, which is known now or when the graph runs."""
        return numbered(int(number)) if isinstance(number, np.ndarray) else GraphIterator(self, number)

    def checked(self, part: Any) -> list[Any]:
        """Returns the arrays of another batch of this kind."""
        leaves = rows.leaves_of(part)
        if _marks(part) != self._marks or not all(map(tf.TypeSpec.is_compatible_with, self.specs, leaves)):
            raise DatasetError(
                "In a compiled function on TensorFlow all batches have the structure, dtypes and inner shapes of "
                "the first one, unless a tf.data.Dataset says otherwise.",
                received={"first": self.specs, "batch": list(map(tf.type_spec_from_value, leaves))},
                hint="Pad the batches to one length, or read the dataset outside of the compiled function.",
            )
        return leaves

    def packed(self, leaves: list[Any]) -> Any:
        """Returns a batch of other arrays."""
        left = iter(leaves)
        return keras.tree.map_structure(lambda mark: None if mark is None else next(left), self._marks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Element) and self._key() == other._key()

    def __hash__(self) -> int:
        return id(self.runtime)

    def _key(self) -> Any:
        return id(self.runtime), self._marks, self.specs


_elements: weakref.WeakKeyDictionary[DistributedDataset, Element] = weakref.WeakKeyDictionary()


def _marks(part: Any) -> Any:
    """The structure alone."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else True, part)


def spec_of_any_rows(leaf: Any, inner: Any = None, is_single: bool = False) -> Any:
    """Returns the type of arrays like this one, of any number of rows, and of other inner shapes if told so."""
    spec = tf.type_spec_from_value(leaf)
    dims = [] if is_single else [None]
    shape = tf.TensorShape([*dims, *(leaf.shape[len(dims) :] if inner is None else inner)])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


# Iterators ---------------------------------------------------------------------------------------------------------


def traced(iterator: DistributedIterator) -> GraphIterator:
    """Returns what a distributed iterator is in the function that is being traced, which closes over it."""
    return GraphIterator(Element.of(iterator), tf.constant(iterator.number), iterator)


class GraphIterator:
    """A distributed iterator in a graph: a tensor that is its number, and the iterator itself where it is known."""

    def __init__(self, element: Element, number: Any, iterator: DistributedIterator | None = None) -> None:
        self._element = element
        self.number = number
        self._iterator = iterator

    # As `DistributedIterator`'s: what enters a `tf.function` may be passed on to another one.
    def __tf_flatten__(self) -> tuple[Any, tuple[Any, ...]]:
        return (self._element,), (self.number,)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Sequence[Any]) -> Any:
        return metadata[0].iterator(components[0])

    def __iter__(self) -> Any:
        raise LoopInGraphError

    def __next__(self) -> Any:
        return self.get_next()

    def get_next(self) -> Any:
        """Returns the next element; when the graph runs, the end of the data is an `OutOfRangeError`."""
        _, parts = self._read(ends=True)
        return regroup(parts, keras.tree.map_structure)

    def get_next_as_optional(self) -> GraphOptional:
        """Returns the next element and whether there is one, as the graph will know."""
        return GraphOptional(*self._read(ends=False))

    def _read(self, ends: bool) -> tuple[Any, list[Any]]:
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

    def _next(self, number: int, ends: bool) -> list[Any]:
        """When the graph runs: whether there is a batch, and the arrays of all local replicas."""
        iterator = self._iterator or numbered(number)
        local = range(len(self._element.runtime.devices))
        try:
            batch = next(iterator)
            parts = [component(batch, i, keras.tree.map_structure) for i in local]
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
    """An element that may be missing when the graph runs; its parts have no rows then."""

    def __init__(self, is_there: Any, parts: list[Any]) -> None:
        super().__init__(parts)
        self._is_there = is_there

    def has_value(self) -> Any:
        """Returns a tensor that says whether there is an element."""
        return self._is_there

    def get_value(self) -> Any:
        """Returns the element; when the graph runs and there is none, that is an `InvalidArgumentError`."""
        with tf.control_dependencies(
            [tf.debugging.Assert(self._is_there, ["An empty Optional has no value."])]
        ):
            parts = keras.tree.map_structure(
                lambda leaf: None if leaf is None else tf.identity(leaf), self._values
            )
        return regroup(parts, keras.tree.map_structure)


# Errors ------------------------------------------------------------------------------------------------------------

# What Python has raised in a graph last: the graph's own error holds its text only.
_raised: collections.deque[KdistError] = collections.deque(maxlen=1)


class _TensorFlowOutOfRangeError(OutOfRangeError, tf.errors.OutOfRangeError):
    """What a loop that was written for either may catch."""

    def __init__(self, problem: str, *, received: Mapping[str, object] | None = None, hint: str = "") -> None:
        OutOfRangeError.__init__(self, problem, received=received, hint=hint)
        (message,) = self.args
        tf.errors.OutOfRangeError.__init__(self, None, None, message)
        self.args = (message,)


@contextlib.contextmanager
def python_errors() -> Iterator[None]:
    """Within this, what Python has raised in a graph comes out as it was, and not as the graph's error."""
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
        # AutoGraph's, which has another type where it cannot make one of the same.
        original: Any = error.__context__
        if hasattr(error, "ag_error_metadata") and hasattr(original, "ag_error_metadata"):
            del original.ag_error_metadata  # else a function around this one would look into it again
            raise original from None
        raise
    finally:
        _raised.clear()
