"""Wishes that an engine follows, or of which a warning says that they have no effect."""

from __future__ import annotations

import numpy as np

import kdist
from kdist.experimental import CollectiveCommunication, CommunicationOptions
from tests.processes import each_backend, run


def hints():
    """Strategies with every hint, and what was logged."""
    import logging

    import keras

    from kdist.communication import options as communication

    communication._ignored.clear()  # the worker is kept: what another test has wished may come again
    logged = []

    class Log(logging.Handler):
        def emit(self, record):
            logged.append(record.getMessage())

    logger = logging.getLogger("kdist")
    logger.addHandler(handler := Log())
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
        logger.setLevel(logging.NOTSET)
    for one in made:
        with one.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    native = [one.runtime.native for one in made[:3]] if keras.backend.backend() == "tensorflow" else []
    ops = [type(one.extended._cross_device_ops).__name__ for one in native]
    return [one.num_replicas_in_sync for one in made], ops, logged


@each_backend
def test_hints_are_followed_or_warned_about(backend):
    replicas, ops, logged = run(backend, 1, hints)[0]
    assert replicas == [2, 2, 2, 1, 1, 1, 1, 1]
    hinted = [line for line in logged if "is a hint that has no effect here" in line]
    if backend == "tensorflow":
        assert ops == ["HierarchicalCopyAllReduce", "ReductionToOneDevice", "ReductionToOneDevice"]
    names = ["HierarchicalCopyAllReduce", "ReductionToOneDevice"] * (backend != "tensorflow")
    assert len(hinted) == len(names), "each once"
    assert all(f"cross_device_ops={name}()" in line for name, line in zip(names, hinted, strict=True))


def resolvers():
    """The devices, or the error, by what a resolver says of GPUs."""
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


@each_backend
def test_a_resolver_that_was_told_of_gpus_is_asked(backend):
    none, unknown, two = run(backend, 1, resolvers)[0]
    assert none == ("cpu:0",) and all(name.startswith(("cpu:", "gpu:")) for name in unknown)
    assert two == ("gpu:0", "gpu:1") or "gpu:" in two, "an error names what is missing"
