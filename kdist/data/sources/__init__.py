"""The kinds of datasets that kdist reads: the one place that tells them apart.

A kind is recognised by the name of its class, so that no framework is imported for data of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kdist.data.sources.source import Source
from kdist.errors import DatasetError

KINDS = (
    "a tf.data.Dataset, a PyTorch DataLoader, a keras.utils.PyDataset, a Grain dataset, a generator function "
    "or an iterable of batches"
)


def source_of(dataset: Any) -> Source:
    """Returns a dataset of any kind as a source.

    Raises:
        DatasetError: It is no dataset.
    """
    if isinstance(dataset, Source):
        return dataset
    if is_tf_data(dataset):
        from kdist.data.sources.tf_data import TFDataSource

        return TFDataSource(dataset)
    if _is(dataset, "DataLoader", "torch.utils.data"):
        from kdist.data.sources.torch_loader import TorchLoaderSource

        return TorchLoaderSource(dataset)
    if _is(dataset, "PyDataset", "keras."):
        from kdist.data.sources.py_dataset import PyDatasetSource

        return PyDatasetSource(dataset)
    return _iterable(dataset)


def is_infinite(dataset: Any) -> bool:
    """Says whether data of any kind are known to have no end: a `tf.data.Dataset` that repeats forever."""
    return is_tf_data(dataset) and source_of(dataset).is_infinite


def is_tf_data(dataset: Any) -> bool:
    """Says whether a dataset is a `tf.data.Dataset`."""
    return _is(dataset, "DatasetV2", "tensorflow.")


def _iterable(dataset: Any) -> Source:
    from kdist.data.sources import iterables

    if any(_is(dataset, name, "grain") for name in ("MapDataset", "IterDataset", "DataLoader")):
        return iterables.GrainSource(dataset)
    if _is(dataset, "NumpyDataset", "kdist."):
        return iterables.NumpySource(dataset)
    if isinstance(dataset, Iterator):
        return iterables.IteratorSource(dataset)
    is_array = hasattr(dataset, "shape") or isinstance(dataset, (str, bytes, dict, tuple))
    if hasattr(dataset, "__iter__") and not is_array:
        return iterables.IterableSource(dataset)
    if callable(dataset) and not isinstance(dataset, type):
        return iterables.GeneratorFunctionSource(dataset)
    raise DatasetError(
        f"A dataset must be {KINDS}.",
        received={"type": type(dataset).__name__},
        hint="Make arrays a dataset with `strategy.make_experimental_numpy_dataset(arrays).batch(64)`."
        if is_array
        else "",
    )


def _is(dataset: Any, name: str, package: str) -> bool:
    return any(c.__name__ == name and c.__module__.startswith(package) for c in type(dataset).__mro__)
