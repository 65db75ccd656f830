"""`TPUStrategy` without a TPU: uses recorded environments of the runtime, and logical CPU devices instead of TPUs."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from kdist.testing import free_ports
from tests.helpers.processes import each_backend, run
from tests.helpers.scripts import finished

# The variables that GKE sets for two slices of one host each. The test uses a different port, which must be free.
_SLICES = {
    "TPU_WORKER_HOSTNAMES": "127.0.0.1",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "true",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1:8080",
}
_TRAINS = """
    import json, os
    import keras
    import numpy as np
    from kdist.cluster import tpu_slice
    import kdist

    tpu_slice.PORT = int(os.environ["FREE_PORT"])
    strategy = kdist.TPUStrategy(devices=["cpu:0", "cpu:1"])
    x, y = np.load("rows.npy")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, "linear", False, "zeros")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    runtime = strategy.runtime
    print(json.dumps({
        "weight": float(model.get_weights()[0][0, 0]),
        "replicas": [strategy.num_replicas_in_sync, *runtime.replica_ids],
        "chief": strategy.extended.should_checkpoint,
        "mesh": [[device.process_index for device in row] for row in runtime.mesh.devices.reshape(2, 2)],
        "addresses": strategy.cluster_resolver.cluster_spec().as_dict(),
    }))
"""


def _by_hand(x, y):
    """Returns the weight after an epoch with batches of four rows."""
    weight = 0.0
    for rows in (slice(0, 4), slice(4, 7)):
        weight -= 0.1 * float(np.mean(2 * (weight * x[rows] - y[rows]) * x[rows]))
    return weight


@pytest.mark.kills("tpu_slices_train_alone")
def test_two_slices_train_as_one_device_does(tmp_path):
    (port,) = free_ports(1)
    x, y = np.random.default_rng(3).normal(size=(2, 7, 1)).astype("float32")
    np.save(tmp_path / "rows.npy", np.stack([x, y]))
    env = {**_SLICES, "KERAS_BACKEND": "jax", "FREE_PORT": str(port)}
    slices = finished(tmp_path, _TRAINS, [{**env, "MEGASCALE_SLICE_ID": str(i)} for i in range(2)])
    for index, script in enumerate(slices):
        found = script.told()
        assert found["weight"] == pytest.approx(_by_hand(x, y), rel=1e-5)
        assert found["replicas"] == [4, 2 * index, 2 * index + 1]
        assert found["chief"] is (index == 0)
        assert found["mesh"] == [[0, 0], [1, 1]]
        assert found["addresses"] == {"worker": [f"127.0.0.1:{port}"]}


def _refusals():
    import kdist.experimental
    from kdist.cluster_resolver import TPUClusterResolver

    one_host = TPUClusterResolver(environ={"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"})
    answers = []
    for make in (
        lambda: kdist.TPUStrategy(one_host),
        lambda: kdist.TPUStrategy(one_host, experimental_device_assignment=[[0]]),
        lambda: kdist.experimental.TPUStrategy(one_host, device_assignment=[[0]]),
    ):
        with pytest.raises(kdist.errors.KdistError) as info:
            make()
        answers.append((type(info.value).__name__, str(info.value)))
    return answers


@pytest.mark.kills(tpu_trains_on_the_cpu="[jax]")
@each_backend
def test_what_cannot_be_is_refused(backend):
    (answers,) = run(backend, 1, _refusals)
    if backend != "jax":
        assert {kind for kind, _ in answers} == {"UnsupportedError"}
        assert all("KERAS_BACKEND=jax" in text for _, text in answers)
        return
    (no_tpu, no_tpu_said), (divided, divided_said), older = answers
    assert no_tpu == "DeviceError" and "found no TPU" in no_tpu_said and "jax[tpu]" in no_tpu_said
    assert divided == "InvalidArgumentError" and "kdist.ModelParallelStrategy" in divided_said
    assert older == (divided, divided_said)


def _logical_devices():
    from kdist.cluster_resolver import TPUClusterResolver

    one_host = TPUClusterResolver(environ={"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"})
    strategy = kdist.TPUStrategy(one_host, devices=["cpu:0", "cpu:1"])
    same = [
        strategy.experimental_assign_to_logical_device("x", 0),
        strategy.experimental_split_to_logical_devices("x", [1, 1]),
        strategy.experimental_replicate_to_logical_devices("x"),
    ]
    for divide in (
        lambda: strategy.experimental_assign_to_logical_device("x", 1),
        lambda: strategy.experimental_split_to_logical_devices("x", [1, 2]),
    ):
        with pytest.raises(kdist.errors.InvalidArgumentError, match="split a replica over several devices"):
            divide()
    return same


def test_a_replica_has_one_logical_device():
    assert run("jax", 1, _logical_devices) == [["x", "x", "x"]]
