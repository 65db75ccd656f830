"""Recognizes the kinds of datasets that kdist reads.

Compares the names of classes, so that kdist does not import frameworks that the dataset does not use.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdist.data.sources.iterables import (
    GeneratorFunctionSource,
    GrainSource,
    IterableSource,
    IteratorSource,
    NumpySource,
)
from kdist.data.sources.py_dataset import PyDatasetSource
from kdist.data.sources.source import Source
from kdist.data.sources.tf_data import TFDataSource
from kdist.data.sources.torch_loader import TorchLoaderSource
from kdist.errors import DatasetError

_TF_DATA = ("DatasetV2", "tensorflow.")
# The keys are the name of a class and the start of its module's name.
_CLASSES: dict[tuple[str, str], type[Source]] = {
    _TF_DATA: TFDataSource,
    ("DataLoader", "torch.utils.data"): TorchLoaderSource,
    ("PyDataset", "keras."): PyDatasetSource,
    ("MapDataset", "grain"): GrainSource,
    ("IterDataset", "grain"): GrainSource,
    ("DataLoader", "grain"): GrainSource,
    ("NumpyDataset", "kdist."): NumpySource,
}


def source_of(dataset: object) -> Source:
    """Wraps a dataset of any kind in a `Source`.

    Raises:
        DatasetError: If kdist cannot read the object as a dataset.
    """
    if isinstance(dataset, Source):
        return dataset
    for (name, package), kind in _CLASSES.items():
        if _is(dataset, name, package):
            return kind(dataset)
    if isinstance(dataset, Iterator):
        return IteratorSource(dataset)
    is_array = hasattr(dataset, "shape") or isinstance(dataset, (str, bytes, dict, tuple))
    if hasattr(dataset, "__iter__") and not is_array:
        return IterableSource(dataset)
    if callable(dataset) and not isinstance(dataset, type):
        return GeneratorFunctionSource(dataset)
    raise DatasetError(
        f"kdist cannot read an object of type {type(dataset).__name__!r} as a dataset.",
        hint="Pass a tf.data.Dataset, a PyTorch DataLoader, a keras.utils.PyDataset, a Grain dataset, a generator "
        "function or an iterable of batches."
        + (
            "\nTo convert arrays: strategy.make_experimental_numpy_dataset(arrays).batch(64)"
            if is_array
            else ""
        ),
    )


def is_infinite(dataset: object) -> bool:
    """Returns whether the object is a `tf.data.Dataset` that repeats forever."""
    return is_tf_data(dataset) and source_of(dataset).is_infinite


def is_tf_data(dataset: object) -> bool:
    return _is(dataset, *_TF_DATA)


def _is(dataset: object, name: str, package: str) -> bool:
    return any(c.__name__ == name and c.__module__.startswith(package) for c in type(dataset).__mro__)
