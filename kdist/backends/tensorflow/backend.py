"""`TensorFlowBackend`: devices, native strategies and random state on TensorFlow."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist import keras_hooks
from kdist.backends import device_names
from kdist.backends.contract import Backend
from kdist.backends.tensorflow import components, effects, functions, iteration, tasks, workers
from kdist.backends.tensorflow import devices as tensorflow_devices
from kdist.backends.tensorflow.coordination import NativeCoordination
from kdist.backends.tensorflow.runtime import SynchronousRuntime, TensorFlowRuntime
from kdist.communication.cross_device_ops import CrossDeviceOps
from kdist.communication.options import CommunicationOptions
from kdist.data.sources.tf_data import Iterated
from kdist.topology import Topology


class TensorFlowBackend(Backend):
    """The TensorFlow backend. Its strategies use native strategies of `tf.distribute`."""

    name = "tensorflow"
    native_moments = True
    steps_build = True
    # Building a dataset takes longer than a step, and each iteration of a dataset shuffles differently.
    keeps_batches = True

    list_devices = staticmethod(tensorflow_devices.list_devices)
    require_devices = staticmethod(tensorflow_devices.require_devices)
    function = staticmethod(functions.function)
    native_coordination = NativeCoordination
    start_server = staticmethod(tasks.start_server)
    synchronous_runtime = SynchronousRuntime
    value_and_grad = staticmethod(functions.value_and_grad)

    def __init__(self) -> None:
        _keep_from_autograph()
        _convert_mirrored_variables()
        iteration.register_loops()
        keras_hooks.hook_tensorflow_optimizers(tf.distribute.has_strategy)
        keras_hooks.hook_compile()
        keras_hooks.hook_assignments(components.assigned)
        keras_hooks.hook_embedding(effects.look_up)

    def native_batches(self, adapter: Any) -> Iterable[object]:
        """Returns the batches of a `tf.data.Dataset`, or the batches of kdist's own adapter unchanged."""
        batches = adapter.get_tf_dataset()
        if keras_hooks.reads_generator(adapter):
            batches = _without_prefetch(batches)
        return Iterated(batches) if isinstance(batches, tf.data.Dataset) else batches

    def join_predictions(self, batches: Sequence[object]) -> Any:
        """Returns arrays, or ragged tensors if the outputs are ragged or their inner shapes differ."""
        return keras.tree.map_structure(_joined, *batches)

    def create_runtime(
        self,
        topology: Topology,
        options: CommunicationOptions | None = None,
        ops: CrossDeviceOps | None = None,
    ) -> TensorFlowRuntime:
        options, cluster = options or CommunicationOptions(), topology.cluster
        names = tuple(map(device_names.short_name, topology.devices))
        if cluster is None:
            names = self.require_devices(names or self.list_devices())
        else:
            names = tensorflow_devices.devices_of_worker(cluster, names)
        options = options.for_devices(names, topology.worker_index)
        topology = dataclasses.replace(topology, devices=names)
        if cluster is None:
            return TensorFlowRuntime(_mirrored(names, ops), topology, workers.Workers())
        native, joined = workers.join(cluster, options, names)
        return TensorFlowRuntime(native, topology, joined)

    def seed_shuffling(self) -> None:
        """Sets TensorFlow's global seed if the user has not, because array shuffles derive from it."""
        if _global_seed() is None:
            tf.random.set_seed(random.SystemRandom().randrange(2**31))

    def random_state(self) -> bytes:
        """Returns TensorFlow's global seed, or an empty state if none is set.

        Does not set one, because workers would get different seeds, which `shuffle(seed=…)` also uses.
        """
        seed = _global_seed()
        return b"" if seed is None else str(seed).encode()

    def set_random_state(self, state: bytes) -> None:
        """Sets another worker's global seed if it differs, because setting a seed restarts all draws."""
        if state and _global_seed() != int(state):
            tf.random.set_seed(int(state))

    def numpy_dataset(self, arrays: object) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(arrays)


def _without_prefetch(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns Keras's dataset over a generator without its last step, and without TensorFlow's own prefetch.

    They read an unpredictable number of batches ahead, which are lost at the end of an epoch. Workers would lose
    different numbers, and then combine the rows of different batches.
    """
    (dataset,) = dataset._inputs()
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def _keep_from_autograph() -> None:
    """Makes AutoGraph call kdist's functions without conversion, as it does with Keras."""
    from tensorflow.python.autograph.core import config

    # There is no public API to exclude a package.
    config.CONVERSION_RULES = (config.DoNotConvert("kdist"), *config.CONVERSION_RULES)


def _convert_mirrored_variables() -> None:
    """Adds `int()` and `float()` to mirrored variables. TensorFlow's other variables have them."""
    from tensorflow.python.distribute.values import DistributedVariable

    for kind in (int, float):
        setattr(DistributedVariable, f"__{kind.__name__}__", lambda self, kind=kind: kind(self.numpy()))


def _joined(*parts: tf.Tensor | tf.RaggedTensor) -> np.ndarray | tf.RaggedTensor:
    ragged = any(isinstance(part, tf.RaggedTensor) for part in parts)
    if ragged or len({tuple(part.shape[1:]) for part in parts}) > 1:
        return keras_hooks.joined_ragged(list(map(keras.ops.convert_to_tensor, parts)))
    return np.concatenate(list(map(keras.ops.convert_to_numpy, parts)))


# More keys than one strategy uses. TensorFlow's own tests use the same step.
_KEYS_PER_STRATEGY = 100_000


def _mirrored(names: Sequence[str], ops: CrossDeviceOps | None) -> tf.distribute.Strategy:
    """Creates a native strategy whose collectives have unique keys in this process.

    In TensorFlow, the keys of all strategies start at the same number. A second strategy, for example in a
    notebook cell that runs again, fails with "Shape mismatch in the collective instance".
    """
    tf.distribute.MirroredStrategy._collective_key_base += _KEYS_PER_STRATEGY
    native_ops = None
    if ops is not None:  # TensorFlow's class has the same name and arguments
        native_ops = getattr(tf.distribute, type(ops).__name__)(**vars(ops))
    return tf.distribute.MirroredStrategy([name.upper() for name in names], native_ops)


def _global_seed() -> int | None:
    from tensorflow.python.eager import context

    # There is no public getter for the value of `tf.random.set_seed`.
    return context.global_seed()
