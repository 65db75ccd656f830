"""Places variables on parameter servers, as whole variables or shards."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.distribute.sharded_variable import ShardedVariable

from kdist import keras_hooks
from kdist.arrays.splitting import even_split
from kdist.backends.coordination import number_of_parts

if TYPE_CHECKING:
    import numpy as np


class Shards(ShardedVariable):
    """A sharded variable that NumPy can convert to an array, like any other variable."""

    def __array__(self, dtype: str | np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().astype(dtype) if dtype is not None else self.numpy()

    # Without it, `model.export` fails, because Keras passes the shards to TensorFlow instead of a tensor.
    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": tf.convert_to_tensor(self)}


def shards_of(native: tf.Variable | ShardedVariable) -> list[tf.Variable]:
    """Returns the shards of a native variable, or the variable itself if it is not sharded."""
    return list(native.variables) if isinstance(native, ShardedVariable) else [native]


def offsets_of(native: tf.Variable | ShardedVariable) -> list[int]:
    """Returns the first row of each shard, and the total number of rows."""
    return [0, *itertools.accumulate(int(shard.shape[0]) for shard in shards_of(native))]


class Placement:
    """Places new variables on the servers in turn, and shards them if the partitioner requires it.

    An optimizer's variables are placed on the servers of the variable that they belong to, shard by shard.

    Args:
        devices: The device of each server.
        partitioner: Returns the number of shards per axis, given a variable's shape and dtype. `None` does
            not shard.
    """

    def __init__(self, devices: Sequence[str], partitioner: Callable[..., Sequence[int]] | None) -> None:
        self._next = itertools.cycle(devices)
        self._partitioner = partitioner
        self._placing = threading.local()

    def scope(self) -> AbstractContextManager[None]:
        """Returns a context manager that places new variables on servers."""
        return tf.variable_creator_scope(self._create)

    def _create(self, next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable | Shards:
        if getattr(self._placing, "on", False):  # the scope was entered twice
            return next_creator(**kwargs)
        self._placing.on = True
        try:
            return self._place(next_creator, **kwargs)
        finally:
            self._placing.on = False

    def _place(self, next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable | Shards:
        for name in ("aggregation", "synchronization"):  # there is only one copy to aggregate
            kwargs.pop(name, None)
        owner: Any = keras_hooks.owner_in_creation()
        beside = [] if owner is None else shards_of(keras_hooks.native_value(owner))
        initial, dtype = kwargs.pop("initial_value"), kwargs.pop("dtype", None)
        kwargs.pop("shape", None)  # Keras 3.16 passes the whole shape, which does not fit a shard
        value = initial() if callable(initial) else initial
        value = tf.convert_to_tensor(value, dtype=dtype)
        if beside and value.shape == owner.shape:
            devices = [shard.device for shard in beside]
        else:
            devices = [next(self._next) for _ in range(self._number_of_shards(value))]
        shards = []
        parts = [value]
        if len(devices) > 1:
            parts = [value[start:stop] for start, stop in even_split(value.shape[0], len(devices))]
        for part, device in zip(parts, devices, strict=True):
            with tf.device(device):
                shards.append(next_creator(initial_value=part, **kwargs))
        return Shards(shards) if len(shards) > 1 else shards[0]

    def _number_of_shards(self, value: tf.Tensor) -> int:
        if self._partitioner is None or not value.shape.rank or not value.shape[0]:
            return 1
        answer = self._partitioner(shape=value.shape, dtype=value.dtype)
        return min(number_of_parts(answer, value.shape, self._partitioner), value.shape[0])
