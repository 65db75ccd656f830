"""Hints for communication: the framework follows them, or kdist warns that they have no effect."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from kdist.experimental import CollectiveCommunication, CommunicationOptions
from tests.helpers import by_hand
from tests.helpers.models import network
from tests.helpers.processes import each_backend, run, start_pool
from tests.helpers.scripts import Script


def hints():
    """Trains with every hint; returns the numbers of replicas, TensorFlow's cross-device operations, and the log."""
    import logging

    import keras

    from kdist.communication import options as communication

    communication._ignored.clear()  # other tests in this worker may have logged the same warnings
    logged = []

    class Log(logging.Handler):
        def emit(self, record):
            logged.append(record.getMessage())

    logger = logging.getLogger("kdist")
    logger.addHandler(handler := Log())
    level = logger.level
    logger.setLevel(logging.WARNING)
    devices = ["cpu:0", "cpu:1"]

    try:
        made = [
            kdist.MirroredStrategy(devices, kdist.HierarchicalCopyAllReduce(num_packs=2)),
            kdist.MirroredStrategy(devices, cross_device_ops=kdist.ReductionToOneDevice()),
            kdist.MirroredStrategy(devices, cross_device_ops=kdist.ReductionToOneDevice()),
            kdist.MultiWorkerMirroredStrategy(),
            kdist.MultiWorkerMirroredStrategy(
                communication_options=CommunicationOptions(implementation="RING")
            ),
            kdist.MultiWorkerMirroredStrategy(
                communication_options=CommunicationOptions(implementation="AUTO")
            ),
            kdist.experimental.MultiWorkerMirroredStrategy(CollectiveCommunication.RING),
            kdist.experimental.MultiWorkerMirroredStrategy(communication=CollectiveCommunication.AUTO),
        ]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    for one in made:
        model = network(1, inputs=2, scope=one.scope())
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    native = [one.runtime.native for one in made[:3]] if keras.backend.backend() == "tensorflow" else []
    ops = [type(one.extended._cross_device_ops).__name__ for one in native]
    return [one.num_replicas_in_sync for one in made], ops, logged


@pytest.mark.kills(cross_device_ops_not_handed_on="[tensorflow]", hints_not_warned_about="[torch]")
@each_backend
def test_hints_are_followed_or_warned_about(backend):
    replicas, ops, logged = run(backend, 1, hints)[0]
    assert replicas == [2, 2, 2, 1, 1, 1, 1, 1]
    hinted = [line for line in logged if " has no effect: " in line]
    if backend == "tensorflow":
        assert ops == ["HierarchicalCopyAllReduce", "ReductionToOneDevice", "ReductionToOneDevice"]
    names = ["HierarchicalCopyAllReduce", "ReductionToOneDevice"] * (backend != "tensorflow")
    assert len(hinted) == len(names), "each once"
    assert all(f"cross_device_ops={name}()" in line for name, line in zip(names, hinted, strict=True))


def rings():
    """Returns the hints and timeouts of TensorFlow's collectives during training, and the weights."""
    from tensorflow.python.ops import collective_ops

    reduce, told = collective_ops.all_reduce_v2, set()

    def noted(*args, **kwargs):
        told.add((kwargs["communication_hint"], kwargs["timeout"]))
        return reduce(*args, **kwargs)

    collective_ops.all_reduce_v2 = noted
    options = CommunicationOptions(implementation="RING", timeout_seconds=77)
    with kdist.MultiWorkerMirroredStrategy(communication_options=options).scope():
        model = by_hand.model()
    by_hand.fit(model, 1)
    return told, np.concatenate([np.ravel(weight) for weight in model.get_weights()])


@pytest.mark.kills("tensorflow_rings_not_passed_on")
def test_tensorflow_reduces_gradients_in_rings():
    pool = start_pool(2, "tensorflow")
    try:
        for told, weights in pool.run(rings):
            assert told == {("RING", 77)}
            np.testing.assert_allclose(weights, by_hand.weights(1), rtol=1e-5)
    finally:
        pool.close()


def sums(implementation):
    """Returns the number of sums in shared memory during training, the weights, a tensor, and its sum."""
    import keras

    from kdist.communication.shared_memory import SharedMemory

    started, original = [], SharedMemory.start

    def start(self, *arrays):
        started.append(original(self, *arrays))
        return started[-1]

    SharedMemory.start = start
    options = CommunicationOptions(implementation=implementation)
    strategy = kdist.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        model = by_hand.model()
    by_hand.fit(model, 1)

    def total(x):
        return x, kdist.get_replica_context().all_reduce("SUM", x)

    x = keras.ops.convert_to_tensor(np.full(3, strategy.runtime.worker_index + 1.0, "float32"))
    both = [keras.ops.convert_to_numpy(value).tolist() for value in strategy.run(total, args=(x,))]
    return len(started), np.concatenate([np.ravel(w) for w in model.get_weights()]), both


@pytest.mark.kills(
    torch_ring_in_shared_memory="[RING-torch]",
    jax_ring_in_shared_memory="[RING-jax]",
    jax_sums_in_sockets="[AUTO-jax]",
    tensorflow_ring_in_shared_memory="[RING-tensorflow]",
    tensorflow_sums_in_sockets="[AUTO-tensorflow]",
    torch_sum_without_its_numbers="[RING-torch]",
    torch_sum_changes_its_tensor="[AUTO-torch]",
)
@each_backend
@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_workers_sum_in_shared_memory_unless_a_ring_is_wanted(implementation, backend):
    pool = start_pool(2, backend)
    try:
        for index, (number, weights, both) in enumerate(pool.run(sums, implementation)):
            assert (number > 0) == (implementation == "AUTO")
            np.testing.assert_allclose(weights, by_hand.weights(1), rtol=1e-5)
            assert both == [[index + 1.0] * 3, [3.0] * 3]
    finally:
        pool.close()


def nccl():
    """Trains with each option for NCCL, without GPUs; returns the warnings, the weights, and the expected weights."""
    import logging

    import keras

    from kdist.communication import options as communication
    from tests.helpers.processes import strategy

    communication._ignored.clear()
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("kdist").addHandler(handler)
    options = CommunicationOptions(implementation="NCCL")
    devices = ["cpu:0", "cpu:1"]
    rows = np.random.default_rng(7).normal(size=(8, 2)).astype("float32")
    kernel = np.array([[0.5], [-1.5]], "float32")
    strategy()
    try:
        made = [kdist.MultiWorkerMirroredStrategy(communication_options=options) for _ in range(2)]
        made += [kdist.experimental.MultiWorkerMirroredStrategy("NCCL")]
        if made[0].runtime.num_workers == 1:
            made += [kdist.MirroredStrategy(devices, kdist.NcclAllReduce()) for _ in range(2)]
    finally:
        logging.getLogger("kdist").removeHandler(handler)
    weights = []
    for one in made:
        with one.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.set_weights([kernel])
        model.fit(rows, rows[:, :1], batch_size=8, shuffle=False, verbose=0)
        weights.append(model.get_weights()[0])
    gradient = 2 * rows.T @ (rows @ kernel - rows[:, :1]) / 8
    return [line for line in logged if " has no effect: " in line], weights, kernel - 0.1 * gradient


@pytest.mark.kills(nccl_without_gpus_not_warned_of="torch")
@each_backend
@pytest.mark.parametrize("num_workers", [1, 2])
def test_nccl_without_gpus_is_a_hint(backend, num_workers):
    for index, (logged, weights, expected) in enumerate(run(backend, num_workers, nccl)):
        for one in weights:
            np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)
        words = ["implementation=NCCL", "cross_device_ops=NcclAllReduce()"][: 3 - num_workers]
        assert [line.split(" has no effect")[0] for line in logged] == (words if index == 0 else [])


MISSING = """
    import numpy as np

    import kdist

    def train(devices):
        strategy = kdist.MirroredStrategy(devices)
        import keras

        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        return strategy.num_replicas_in_sync

    for make in (kdist.MirroredStrategy, lambda names: kdist.MultiWorkerMirroredStrategy(devices=names)):
        try:
            make(["gpu:0", "gpu:1"])
        except kdist.errors.DeviceError as error:
            print(error)
    print("replicas:", train(["cpu:0", "cpu:1", "cpu:2"]))
"""


@pytest.mark.kills(missing_gpu_starts_jax="[jax]")
@each_backend
def test_a_script_falls_back_to_cpus_where_gpus_are_missing(backend, tmp_path):
    told = {"KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    script = Script(tmp_path, "missing", MISSING, told).finish()
    *errors, last = script.stdout().splitlines()
    assert last == "replicas: 3" and sum("'gpu:0' does not exist" in line for line in errors) == 2


def resolvers():
    """Returns the devices, or the error, for resolvers with 0 GPUs, an unknown number, and 2 GPUs."""
    from kdist.cluster_resolver import ClusterSpec, SimpleClusterResolver

    found = []
    for told in ({"GPU": 0}, {}, {"GPU": 2}):
        resolver = SimpleClusterResolver(
            ClusterSpec({"worker": ["localhost:2222"]}), task_type="worker", task_id=0, num_accelerators=told
        )
        try:
            found.append(kdist.MultiWorkerMirroredStrategy(resolver).extended.worker_devices)
        except kdist.errors.DeviceError as error:
            found.append(str(error))
    return found


@pytest.mark.kills("resolver_not_asked_for_devices")
@each_backend
def test_a_resolver_that_was_told_of_gpus_is_asked(backend):
    none, unknown, two = run(backend, 1, resolvers)[0]
    assert none == ("cpu:0",) and all(name.startswith(("cpu:", "gpu:")) for name in unknown)
    assert two == ("gpu:0", "gpu:1") or "gpu:" in two, "an error names what is missing"
