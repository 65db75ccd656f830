"""Counts, takes and joins the rows of batches, for all types of arrays.

A batch is a structure (tuples, lists, dictionaries, `None`) of arrays whose first axis is the rows: NumPy
arrays, tensors of any framework, TensorFlow's sparse and ragged tensors, and SciPy's sparse matrices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import keras
import numpy as np

from kdist.errors import DatasetError

if TYPE_CHECKING:
    from types import ModuleType

    from kdist.arrays.types import Structure, T, Tensor


def flatten(batch: Structure) -> list[Tensor | None]:
    """Returns the leaves of a batch, like `keras.tree.flatten`."""
    return list(batch) if _is_flat(batch) else keras.tree.flatten(batch)


def map_leaves(function: Callable[[Any], object], batch: Structure) -> Any:
    """Calls a function for each leaf of a batch, like `keras.tree.map_structure`."""
    return type(batch)(map(function, batch)) if _is_flat(batch) else keras.tree.map_structure(function, batch)


def _is_flat(batch: Any) -> TypeGuard[tuple[Any, ...] | list[Any]]:
    """Returns whether a batch is a tuple or a list of arrays. On PyTorch, `keras.tree` would take 50 times as long."""
    if type(batch) not in (tuple, list):
        return False
    for leaf in batch:  # noqa: SIM110  # a generator would cost a call per leaf
        if leaf is not None and not hasattr(leaf, "shape"):
            return False
    return True


def leaves_of(batch: Structure) -> list[Tensor]:
    """Returns the arrays of a batch, without `None`."""
    return [leaf for leaf in flatten(batch) if leaf is not None]


def num_rows(batch: Structure) -> int:
    """Returns the number of rows of a batch.

    Raises:
        DatasetError: If there is no array, an array has no axis for rows, or the numbers of rows differ.
    """
    leaves = leaves_of(batch)
    if not leaves:
        raise DatasetError(
            "The batch does not contain an array.",
            received={"batch": type(batch).__name__},
            hint="Yield `x`, `(x, y)` or `(x, y, sample_weight)`.",
        )
    counts = [_rows_of(leaf) for leaf in leaves]
    if None in counts:
        raise DatasetError(
            "The dataset is not batched: an array has no dimension for rows.",
            received={"shapes": [_shape(leaf) for leaf in leaves]},
            hint="Batch it first: `dataset.batch(64)`, or `DataLoader(dataset, batch_size=64)`.",
        )
    if len(set(counts)) > 1:
        raise DatasetError(
            "The parts of the batch have different numbers of rows.",
            received={"rows": counts},
            hint="Yield the same number of rows in x, y and sample_weight.",
        )
    assert counts[0] is not None
    return counts[0]


def is_single(batch: Structure) -> bool:
    """Returns whether a batch is an element of an unbatched dataset, because it contains a scalar."""
    return any(getattr(leaf, "shape", None) is not None and len(leaf.shape) == 0 for leaf in leaves_of(batch))


def _shape(leaf: Tensor) -> tuple[int | None, ...]:
    return tuple(getattr(leaf, "shape", ()))


def _rows_of(leaf: Tensor) -> int | None:
    shape = getattr(leaf, "shape", None)
    if shape is None or len(shape) == 0:
        return None
    if shape[0] is None and hasattr(leaf, "dense_shape"):
        return int(leaf.dense_shape[0])
    return int(shape[0])


def cut(batch: Structure, bounds: Sequence[tuple[int, int]]) -> list[Structure]:
    """Returns the parts of a batch for adjacent pairs (start, stop) of rows; `stop` is not included."""
    leaves = [_cut_leaf(leaf, bounds) for leaf in flatten(batch)]
    parts = [list(part) for part in zip(*leaves, strict=True)]
    return [type(batch)(p) if _is_flat(batch) else keras.tree.pack_sequence_as(batch, p) for p in parts]


def _cut_leaf(leaf: Tensor | None, bounds: Sequence[tuple[int, int]]) -> Sequence[Tensor | None]:
    if is_eager(leaf):
        return _cut_tensor(leaf, bounds)
    return [None if leaf is None else _take(leaf, start, stop) for start, stop in bounds]


def _cut_tensor(tensor: Any, bounds: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    """Cuts a TensorFlow tensor on its device. By default, the operations would run on a GPU."""
    tf = _tensorflow()
    first, last = bounds[0][0], bounds[-1][1]
    others = len(tensor.shape) - 1
    # Eager even while TensorFlow traces a function that reads batches.
    with tf.init_scope(), tf.device(tensor.device):
        if (first, last) != (0, tensor.shape[0]):
            tensor = tf.slice(tensor, [first, *[0] * others], [last - first, *[-1] * others])
        # Faster than one slice per part.
        return [tensor] if len(bounds) == 1 else tf.split(tensor, [stop - start for start, stop in bounds])


def _take(leaf: Tensor, start: int, stop: int) -> Tensor:
    if is_tf_sparse(leaf):
        inner = [int(size) for size in leaf.dense_shape[1:]]
        return _tensorflow().sparse.slice(leaf, [start, *[0] * len(inner)], [stop - start, *inner])
    return (leaf.tocsr() if is_scipy(leaf) else leaf)[start:stop]


def to_host(batch: Structure) -> Any:
    """Returns a batch with NumPy arrays in host memory. Sparse and ragged tensors stay so, except PyTorch's.

    Arrays are copied only if necessary, so they may be the user's arrays; see `owned`. On the TensorFlow
    backend, its tensors on the CPU stay tensors, because they have rows like arrays and cannot be written to.
    """
    return map_leaves(_leaf_to_host, batch)


def _leaf_to_host(leaf: Tensor | None) -> Tensor | None:
    if leaf is None or isinstance(leaf, np.ndarray) or is_tf_sparse(leaf) or is_ragged(leaf):
        return leaf
    if hasattr(leaf, "detach"):
        return torch_to_numpy(leaf)
    if is_eager(leaf) and keras.ops.is_tensor(leaf) and "CPU" in leaf.device:  # only with TensorFlow
        return leaf
    if is_scipy(leaf):
        return leaf.tocsr()  # the format with rows
    if type(leaf).__module__.startswith("jax.experimental.sparse"):
        return leaf
    return np.asarray(leaf)


def owned(batch: T) -> T:
    """Returns a batch on the host whose arrays no other code writes to.

    Use it for batches that wait for their step on the host, because a generator may reuse the same array.
    """
    return map_leaves(
        lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) or is_scipy(leaf) else leaf, batch
    )


def is_scipy(leaf: object) -> TypeGuard[Any]:
    """Returns whether an array is a sparse matrix of SciPy."""
    return hasattr(leaf, "tocsr")


def torch_to_numpy(tensor: Any) -> np.ndarray:
    """Returns a PyTorch tensor, of any device and dtype, as a NumPy array."""
    tensor = tensor.detach().cpu()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    if str(tensor.dtype) != "torch.bfloat16":
        return tensor.numpy()
    import ml_dtypes  # a dependency of Keras

    torch = sys.modules["torch"]
    return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def is_tf_sparse(leaf: object) -> TypeGuard[Any]:
    """Returns whether an array is a `tf.SparseTensor`."""
    return type(leaf).__name__ == "SparseTensor" and type(leaf).__module__.startswith("tensorflow.")


def is_eager(leaf: object) -> TypeGuard[Any]:
    """Returns whether an array is a dense TensorFlow tensor with known values."""
    return type(leaf).__name__ == "EagerTensor"


def dtype_name(leaf: Tensor) -> str:
    """Returns the dtype of an array as a name that is the same for all frameworks."""
    name = getattr(leaf.dtype, "name", str(leaf.dtype)).removeprefix("torch.")
    return "string" if name in ("object", "string") or name.startswith(("str", "bytes")) else name


def has_sparse(batch: Structure) -> bool:
    for leaf in leaves_of(batch):  # noqa: SIM110  # a generator would cost a call per leaf
        if is_tf_sparse(leaf) or not hasattr(leaf, "__array__"):
            return True
    return False


def is_ragged(leaf: object) -> TypeGuard[Any]:
    """Returns whether an array is a `tf.RaggedTensor`."""
    return type(leaf).__name__ == "RaggedTensor" and type(leaf).__module__.startswith("tensorflow.")


def _tensorflow() -> ModuleType:
    # TensorFlow is already imported, because the array is one of its tensors.
    return sys.modules["tensorflow"]


def to_dense(leaf: Tensor) -> np.ndarray:
    """Returns an array of any type as a dense NumPy array.

    Raises:
        DatasetError: If the array is ragged, because only TensorFlow has ragged tensors.
    """
    if is_ragged(leaf):
        raise DatasetError(
            "Cannot use a ragged tensor: only the TensorFlow backend supports them.",
            received={"shape": tuple(leaf.shape)},
            hint="Make it dense in the pipeline: `dataset.map(lambda x: x.to_tensor())`.",
        )
    if is_tf_sparse(leaf):
        return _tensorflow().sparse.to_dense(leaf).numpy()
    return np.asarray(leaf.toarray() if hasattr(leaf, "toarray") else leaf)


def empty_like(batch: Structure) -> Structure:
    """Returns a batch without rows, with the structure, dtypes and inner shapes of another batch."""
    return cut(batch, [(0, 0)])[0]


def join(batches: Sequence[T]) -> T:
    """Joins the rows of batches of NumPy arrays."""
    if len(batches) == 1:
        return batches[0]
    return keras.tree.map_structure(
        lambda *leaves: None if leaves[0] is None else np.concatenate(leaves), *batches
    )
