"""Datasets of the workers' own, and their iterators: made anew where a worker is replaced."""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from kdist.backends.coordination import PerWorkerValues


class Values(PerWorkerValues):
    """A copy of a dataset on each worker, or its iterator.

    Args:
        dataset: The dataset, as it was made here.
        iterates: Whether the values are iterators.
    """

    def __init__(self, dataset: tf.data.Dataset, iterates: bool = False) -> None:
        self._dataset, self._iterates = dataset, iterates
        self._graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset), external_state_policy=0
        ).numpy()
        element = dataset.element_spec
        self.spec = tf.data.IteratorSpec(element) if iterates else tf.data.DatasetSpec(element)
        self._made: dict[int, tuple[int, Any]] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Values:
        return Values(self._dataset, iterates=True)

    def peek(self) -> Any:
        """Returns the first element of the dataset as it was made here."""
        return next(iter(self._dataset.as_numpy_iterator()))

    def on(self, coordination: Any, index: int) -> Any:
        """Returns the value of a worker, whose device is in scope."""
        incarnation = coordination.incarnations[index]
        with self._lock:
            made = self._made.get(index)
        if made is None or made[0] != incarnation:
            variant = tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(self._graph))
            value: Any = tf.data.experimental.from_variant(variant, self._dataset.element_spec)
            made = incarnation, iter(value) if self._iterates else value
            with self._lock:
                self._made[index] = made
        return made[1]
