"""Datasets and iterators on the workers, which are created again when a worker is replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.backends.coordination import PerWorkerValues, on_worker
from kdist.data.distributed_dataset import DistributedDataset
from kdist.errors import InvalidArgumentError


class Values(PerWorkerValues):
    """A dataset on each worker, or its iterator.

    This process creates the datasets. It copies their graphs to the workers, which read independently.
    """

    def __init__(self, graph: Callable[[int], bytes], element_spec: object, iterates: bool = False) -> None:
        self._graph, self._element_spec, self._iterates = graph, element_spec, iterates
        self.spec = tf.data.IteratorSpec(element_spec) if iterates else tf.data.DatasetSpec(element_spec)
        self._made: dict[int, tuple[int, object]] = {}

    def __iter__(self) -> Values:
        return Values(self._graph, self._element_spec, iterates=True)

    def peek(self) -> object:
        variant = tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(self._graph(0)))
        dataset: tf.data.Dataset = tf.data.experimental.from_variant(variant, self._element_spec)
        return next(dataset.as_numpy_iterator())

    def on(self, coordination: Any, index: int) -> object:
        """Returns the value of a worker. Only the worker's thread calls it, in the worker's device scope."""
        incarnation = coordination.incarnations[index]
        if self._made.get(index, (None,))[0] != incarnation:
            variant = tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(self._graph(index)))
            value: tf.data.Dataset = tf.data.experimental.from_variant(variant, self._element_spec)
            self._made[index] = incarnation, iter(value) if self._iterates else value
        return self._made[index][1]


def per_worker(dataset_fn: object, num_workers: int) -> Values:
    """Creates the workers' datasets from a function or from one dataset."""
    dataset_fn = getattr(
        dataset_fn, "python_function", dataset_fn
    )  # eagerly, because kdist cannot get a dataset's graph inside a graph

    def graph(index: int) -> tuple[bytes, object]:
        with on_worker(index):
            dataset = dataset_fn() if callable(dataset_fn) else dataset_fn
        if isinstance(dataset, DistributedDataset):  # for the coordinator's only replica
            dataset = getattr(dataset.sources[0], "dataset", None)
        if not isinstance(dataset, tf.data.Dataset):
            raise InvalidArgumentError(
                "Cannot copy the dataset to the workers: it is not a tf.data.Dataset.",
                received={"dataset": dataset},
                hint="Return a tf.data.Dataset from the function, or a dataset that the strategy distributes.",
            )
        variant = tf.data.experimental.to_variant(dataset)
        return tf.raw_ops.DatasetToGraphV2(input_dataset=variant).numpy(), dataset.element_spec

    # Created now, because the workers' threads may have another device and no strategy in scope.
    graphs = [graph(index) for index in range(num_workers)]
    return Values(lambda index: graphs[index][0], graphs[0][1])
