"""The constructors of strategies: they have the signatures of `tf.distribute`, and refuse invalid arguments."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import kdist
from kdist.cluster_resolver import SimpleClusterResolver, TFConfigClusterResolver
from kdist.errors import InvalidArgumentError
from kdist.experimental import CollectiveCommunication, CommunicationImplementation, CommunicationOptions
from tests.helpers.processes import BACKENDS, each_backend, run, run_plain, strategy
from tests.helpers.scripts import Script

# Signatures ---------------------------------------------------------------------------------------------------


def parameters_of(function):
    """Returns the names and defaults of parameters, without `self` and keyword-only parameters."""
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self" or parameter.kind in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            continue
        default = parameter.default
        if default is parameter.empty:
            default = "required"
        found.append((name, getattr(default, "name", default)))
    return found


def native_signatures():
    import tensorflow as tf

    native = tf.distribute
    experimental = native.experimental
    return {
        "MirroredStrategy": parameters_of(native.MirroredStrategy.__init__),
        "MultiWorkerMirroredStrategy": parameters_of(native.MultiWorkerMirroredStrategy.__init__),
        "experimental.MultiWorkerMirroredStrategy": parameters_of(
            experimental.MultiWorkerMirroredStrategy.__init__
        ),
        "OneDeviceStrategy": parameters_of(native.OneDeviceStrategy.__init__),
        "HierarchicalCopyAllReduce": parameters_of(native.HierarchicalCopyAllReduce.__init__),
        "NcclAllReduce": parameters_of(native.NcclAllReduce.__init__),
        "ReductionToOneDevice": parameters_of(native.ReductionToOneDevice.__init__),
        "experimental.CommunicationOptions": parameters_of(experimental.CommunicationOptions.__new__)[1:]
        or parameters_of(experimental.CommunicationOptions.__init__),
        "experimental.CollectiveHints": parameters_of(experimental.CollectiveHints.__new__)[1:]
        or parameters_of(experimental.CollectiveHints.__init__),
        "experimental_set_strategy": parameters_of(native.experimental_set_strategy),
        "get_strategy": parameters_of(native.get_strategy),
        "has_strategy": parameters_of(native.has_strategy),
        "in_cross_replica_context": parameters_of(native.in_cross_replica_context),
        "get_replica_context": parameters_of(native.get_replica_context),
        **{
            f"Strategy.{name}": parameters_of(getattr(native.Strategy, name))
            for name in (
                "scope",
                "distribute_datasets_from_function",
                "experimental_distribute_dataset",
                "experimental_distribute_values_from_function",
                "experimental_local_results",
            )
        },
        "InputContext": parameters_of(native.InputContext.__init__),
        "experimental.ValueContext": parameters_of(experimental.ValueContext.__init__),
    }


def test_signatures_are_those_of_tf_distribute():
    native = run("tensorflow", 1, native_signatures)[0]
    for name, expected in native.items():
        target = kdist
        for part in name.split("."):
            target = getattr(target, part)
        ours = parameters_of(target.__init__ if inspect.isclass(target) else target)
        assert ours == expected, name
    assert native["MirroredStrategy"] == [("devices", None), ("cross_device_ops", None)]


def native_members():
    import tensorflow as tf

    enum = tf.distribute.experimental.CommunicationImplementation
    return [member.name for member in enum], tf.distribute.experimental.CollectiveCommunication is enum


def test_communication_implementations_are_those_of_tf_distribute():
    names, same = run("tensorflow", 1, native_members)[0]
    assert [member.name for member in CommunicationImplementation] == names
    assert same and CollectiveCommunication is CommunicationImplementation


def test_collective_hints_are_the_older_options():
    hints = kdist.experimental.CollectiveHints(1024, timeout_seconds=3)
    assert isinstance(hints, CommunicationOptions) and (hints.bytes_per_pack, hints.timeout_seconds) == (
        1024,
        3,
    )


def test_communication_options():
    options = CommunicationOptions(50 * 1024 * 1024, timeout_seconds=120.0, implementation="NCCL")
    assert options.bytes_per_pack == 50 * 1024 * 1024 and options.timeout_seconds == 120.0
    assert options.implementation is CommunicationImplementation.NCCL
    assert CommunicationOptions().implementation is CommunicationImplementation.AUTO
    for arguments, name in (
        ({"bytes_per_pack": -1}, "bytes_per_pack=-1"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        ({"compression": "int8"}, "compression='int8'"),
        ({"compression": "float16", "compression_rank": 2}, "compression='float16'"),
        ({"compression": "powersgd", "compression_rank": 0}, "compression_rank=0"),
        ({"compression": "powersgd", "compression_rank": True}, "compression_rank=True"),
        ({"implementation": "MPI"}, "implementation='MPI'"),
        ({"implementation": 3}, "implementation=3"),
    ):
        with pytest.raises(InvalidArgumentError) as info:
            CommunicationOptions(**arguments)
        assert name in str(info.value)


def test_cross_device_ops():
    assert kdist.NcclAllReduce(num_packs=2).num_packs == 2
    assert kdist.HierarchicalCopyAllReduce().num_packs == 1
    assert kdist.ReductionToOneDevice("cpu:0").reduce_to_device == "cpu:0"
    with pytest.raises(ValueError, match="num_packs=-1"):
        kdist.NcclAllReduce(num_packs=-1)


# Refusals -----------------------------------------------------------------------------------------------------


def refused():
    """Returns the error of each invalid construction: its name, classes and message."""
    wrong = {
        "no such GPU": lambda: kdist.MirroredStrategy(["gpu:7"]),
        "one of them missing": lambda: kdist.MirroredStrategy(["cpu:0", "gpu:9"]),
        "no such device": lambda: kdist.OneDeviceStrategy("/gpu:7"),
        "no such GPU of a worker": lambda: kdist.MultiWorkerMirroredStrategy(devices=["gpu:7"]),
        "TPU": lambda: kdist.MirroredStrategy(["tpu:0"]),
        "no device name": lambda: kdist.MirroredStrategy(["first"]),
        "empty": lambda: kdist.MirroredStrategy([]),
        "a word": lambda: kdist.MirroredStrategy("cpu:0"),
        "numbers": lambda: kdist.MirroredStrategy([0, 1]),
        "twice": lambda: kdist.MirroredStrategy(["cpu:0", "/CPU:0"]),
        "None for one device": lambda: kdist.OneDeviceStrategy(None),
        "ops of another kind": lambda: kdist.MirroredStrategy(["cpu:0"], cross_device_ops="nccl"),
        "options of another kind": lambda: kdist.MultiWorkerMirroredStrategy(communication_options="RING"),
        "resolver of another kind": lambda: kdist.MultiWorkerMirroredStrategy(cluster_resolver="worker"),
        "unknown communication": lambda: kdist.experimental.MultiWorkerMirroredStrategy("MPI"),
        "too late for more CPUs": lambda: kdist.MirroredStrategy([f"cpu:{i}" for i in range(5)]),
    }
    found = {}
    for name, call in wrong.items():
        try:
            found[name] = ("no error", [], f"{call()}")
        except Exception as error:
            found[name] = (type(error).__name__, [c.__name__ for c in type(error).__mro__], str(error))
    return found


REFUSED = {
    "no such GPU": ("DeviceError", "gpu:7"),
    "one of them missing": ("DeviceError", "gpu:9"),
    "no such device": ("DeviceError", "gpu:7"),
    "no such GPU of a worker": ("DeviceError", "gpu:7"),
    "TPU": ("DeviceError", "tpu:0"),
    "no device name": ("DeviceError", "'first'"),
    "empty": ("InvalidArgumentError", "devices=[]"),
    "a word": ("InvalidArgumentError", "devices='cpu:0'"),
    "numbers": ("InvalidArgumentError", "devices=[0, 1]"),
    "twice": ("InvalidArgumentError", "contains a device twice"),
    "None for one device": ("InvalidArgumentError", "device=None"),
    "ops of another kind": ("InvalidArgumentError", "cross_device_ops='nccl'"),
    "options of another kind": ("InvalidArgumentError", "communication_options='RING'"),
    "resolver of another kind": ("ClusterTypeError", "cluster_resolver='worker'"),
    "unknown communication": ("InvalidArgumentError", "'MPI'"),
    "too late for more CPUs": ("DeviceError", "cpu_devices_needed=5"),
}


@each_backend
def test_what_cannot_work_is_refused(backend):
    # The workers do not see GPUs, even if this machine has them.
    found = run(backend, 1, refused)[0]
    for name, (kind, word) in REFUSED.items():
        actual, classes, message = found[name]
        # Replicas on PyTorch are threads, so it is never too late.
        if backend == "torch" and name == "too late for more CPUs":
            assert actual == "no error"
            continue
        assert "KdistError" in classes and "ValueError" in classes, f"{name}: {actual} {message}"
        assert actual == kind and word in message, f"{name}: {actual} {message}"
    assert found["no such GPU"][2].count("cpu:0") == 1


TOO_LATE = """
import keras, kdist
keras.ops.convert_to_numpy(keras.ops.matmul(keras.ops.ones((2, 2)), keras.ops.ones((2, 2))))
for make in (lambda: kdist.MirroredStrategy(["cpu:0", "cpu:1"]), lambda: kdist.MirroredStrategy(["cpu:0"])):
    try:
        strategy = make()
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(keras.ops.ones((4, 2)), keras.ops.ones((4, 1)), verbose=0)
        print("MADE", strategy.num_replicas_in_sync)
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.in_turn(3)
def test_logical_cpus_that_come_too_late(backend, tmp_path):
    script = Script(tmp_path, "late", TOO_LATE, {"KERAS_BACKEND": backend}).finish()
    *lines, one = script.stdout().splitlines()
    two = "\n".join(lines)
    if backend == "torch":
        assert two == "MADE 2"
    else:
        assert two.startswith("DeviceError Cannot create logical CPU devices"), two
        assert "cpu_devices_needed=2" in two
    assert one == "MADE 1"


# Properties and results of strategies -------------------------------------------------------------------------


def resolvers():
    from kdist.cluster_resolver import ClusterSpec

    given = SimpleClusterResolver(ClusterSpec({"worker": ["localhost:1"]}), task_type="worker", task_id=0)
    with_given = kdist.MultiWorkerMirroredStrategy(given)
    experimental = kdist.experimental.MultiWorkerMirroredStrategy(cluster_resolver=given)
    assert with_given.extended.should_checkpoint and with_given.extended.should_save_summary
    found = kdist.MultiWorkerMirroredStrategy()
    assert with_given.cluster_resolver is given is experimental.cluster_resolver
    assert isinstance(found.cluster_resolver, TFConfigClusterResolver)
    assert kdist.MirroredStrategy(["cpu:0"]).cluster_resolver is None
    assert kdist.OneDeviceStrategy("cpu:0").cluster_resolver is None
    assert isinstance(experimental, kdist.MultiWorkerMirroredStrategy)
    assert type(experimental).__name__ == "MultiWorkerMirroredStrategy"
    names = [str(s) for s in (with_given, kdist.MirroredStrategy(["cpu:0", "cpu:1"]))]
    return found.cluster_resolver.task_id, names


@each_backend
def test_cluster_resolver_of_one_worker(backend):
    task, names = run(backend, 1, resolvers)[0]
    one, two = names
    assert task == 0 and one == f"<kdist.MultiWorkerMirroredStrategy on {backend}: 1 device (cpu:0)>"
    assert two == f"<kdist.MirroredStrategy on {backend}: 2 devices (cpu:0, cpu:1)>"


def resolver_of_two():
    mine = strategy()
    resolver = mine.cluster_resolver
    again = kdist.MultiWorkerMirroredStrategy()
    assert again.num_replicas_in_sync == mine.num_replicas_in_sync == 2
    assert isinstance(mine.extended, kdist.StrategyExtended)
    writes = mine.extended.should_checkpoint, mine.extended.should_save_summary
    return resolver.task_type, resolver.task_id, resolver.cluster_spec().as_dict(), writes


@each_backend
def test_cluster_resolver_of_two_workers(backend):
    one, two = run(backend, 2, resolver_of_two)
    assert one[:2] == ("worker", 0) and two[:2] == ("worker", 1)
    assert one[2] == two[2] and len(one[2]["worker"]) == 2
    assert one[3] == (True, True) and two[3] == (False, False)


def train(make):
    """Trains two epochs with or without a strategy; returns the history, the predictions and the weights."""
    import contextlib

    import keras

    keras.utils.set_random_seed(9)
    one = make()
    with one.scope() if one is not None else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Dense(5, "relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
    x = np.random.RandomState(1).randn(22, 4).astype("float32")
    history = model.fit(x, x[:, :1], batch_size=5, epochs=2, verbose=0, validation_split=0.2)
    return {
        **history.history,
        "predict": model.predict(x, verbose=0),
        **{f"weight {i}": keras.ops.convert_to_numpy(w) for i, w in enumerate(model.weights)},
    }


def one_device():
    return [train(lambda name=name: kdist.OneDeviceStrategy(name)) for name in ("cpu:0", "/cpu:1")]


@each_backend
def test_one_device_strategy_gives_the_numbers_of_plain_keras(backend):
    plain = run_plain(backend, train, lambda: None)
    for other in run(backend, 1, one_device)[0]:
        for name, expected in plain.items():
            np.testing.assert_allclose(other[name], expected, rtol=1e-5, atol=2e-6, err_msg=name)


def where():
    import keras

    found = []
    for device in ("cpu:0", "cpu:1"):
        one = kdist.OneDeviceStrategy(device)
        assert one.num_replicas_in_sync == 1
        with one.scope():
            value = keras.Variable([1.0]).value
        found.append(str(getattr(value, "device", None)))
    return found


def test_one_device_strategy_places_variables_on_its_device():
    # PyTorch does not distinguish logical CPUs.
    first, second = run("tensorflow", 1, where)[0]
    assert first.endswith("CPU:0") and second.endswith("CPU:1")
