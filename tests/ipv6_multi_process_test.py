"""Workers whose addresses are IPv6: by `TF_CONFIG`, and by `kdist run --hosts`."""

from __future__ import annotations

import socket

import pytest

from kdist.cluster import free_ports
from tests.helpers.processes import each_backend, each_backend_in_twelve_turns, run_plain
from tests.helpers.scripts import RUN, Script, environments_of, started

SCRIPT = """
import contextlib, json, os
import keras
import numpy as np

def train(strategy):
    first, second = (keras.initializers.GlorotUniform(seed=seed) for seed in (3, 4))
    with strategy.scope() if strategy else contextlib.nullcontext():
        hidden = keras.layers.Dense(3, "tanh", kernel_initializer=first)
        model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1, kernel_initializer=second)])
        model.compile("adam", "mse", metrics=["mae"])
    x = np.random.RandomState(0).randn(30, 4).astype("float32")
    history = model.fit(x, x[:, :1], batch_size=7, epochs=2, shuffle=False, verbose=0)
    return history.history | {"predict": model.predict(x, verbose=0)[:, 0].tolist()}

if __name__ == "__main__":
    import kdist
    strategy = kdist.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 2
    print("NUMBERS " + json.dumps(train(strategy)), flush=True)
"""


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        return True
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address, ::1")


def plain():
    namespace = {"__name__": "plain"}
    exec(SCRIPT, namespace)
    return namespace["train"](None)


def check_numbers(backend, scripts):
    expected = run_plain(backend, plain)
    for actual in [script.finish(120).told("NUMBERS ") for script in scripts]:
        assert actual.keys() == expected.keys()
        for name in expected:
            assert actual[name] == pytest.approx(expected[name], rel=1e-5, abs=2e-6), name


@pytest.mark.kills(ipv6_chief_listens_on_ipv4="[torch]")
@each_backend
def test_workers_with_ipv6_addresses_train_as_one_device(backend, tmp_path):
    addresses = [f"[::1]:{port}" for port in free_ports(2, "::1")]
    with started(tmp_path, SCRIPT, environments_of(backend, addresses)) as scripts:
        check_numbers(backend, scripts)


@each_backend_in_twelve_turns
def test_kdist_run_with_ipv6_hosts(backend, tmp_path):
    hosts = ",".join(f"[::1]:{port}" for port in free_ports(2, "::1"))
    command = (*RUN, "--backend", backend, "-n", "1", "--hosts", hosts, "--host-index")
    with (
        Script(tmp_path, "host0", SCRIPT, {}, (*command, "0")) as first,
        Script(tmp_path, "host1", SCRIPT, {}, (*command, "1")) as second,
    ):
        check_numbers(backend, [first, second])
