"""The data adapter through which Keras's iterator reads kdist's batches."""

from __future__ import annotations

import inspect

import pytest

from tests.backends.where import in_worker

if in_worker:
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    from kdist import keras_hooks


@pytest.mark.kills("data_adapter_without_super_batch")
def test_the_adapter_takes_the_arguments_of_keras_own_adapters():
    batches = [1, 2]
    adapter = keras_hooks.data_adapter(2, batches)
    assert adapter.get_jax_iterator(super_batch=None) is batches  # Keras 3.16 passes it
    for name in ("get_numpy_iterator", "get_tf_dataset", "get_jax_iterator", "get_torch_dataloader"):
        wanted = set(inspect.signature(getattr(DataAdapter, name)).parameters)
        taken = set(inspect.signature(getattr(type(adapter), name)).parameters)
        assert wanted <= taken, name
