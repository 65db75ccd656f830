"""Two hosts: two network namespaces joined by a veth pair, `kdist run --hosts` in each.

Skipped, with the reason, where namespaces cannot be made (that takes root, or the right to it) or `ip` is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.processes import BACKENDS, Script, full_unless, run_plain

NETWORK = "10.77.0"

SCRIPT = """
import json, os, sys
import numpy as np

def train(strategy):
    import contextlib, keras
    # Seeds one by one: Keras's `set_random_seed` imports TensorFlow everywhere.
    first, second = (keras.initializers.GlorotUniform(seed=seed) for seed in (3, 4))
    with strategy.scope() if strategy else contextlib.nullcontext():
        hidden = keras.layers.Dense(3, "tanh", kernel_initializer=first)
        model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1, kernel_initializer=second)])
        model.compile("adam", "mse", metrics=["mae"])
    x = np.random.RandomState(0).randn(30, 4).astype("float32")
    history = model.fit(x, x[:, :1], batch_size=7, epochs=3, shuffle=False, verbose=0, validation_data=(x, x[:, :1]))
    return history.history | {"predict": model.predict(x, verbose=0)[:, 0].tolist()}

if __name__ == "__main__":
    import kdist
    strategy = kdist.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == int(os.environ["WORLD_SIZE"])
    numbers = train(strategy)
    print(f"NUMBERS {os.environ['RANK']} " + json.dumps(numbers), flush=True)
"""


def ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=check)


@pytest.fixture
def hosts():
    """The names of two namespaces, whose addresses are 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` on this machine: apt-get install iproute2")
    names = [f"kdist-{os.getpid()}-{i}" for i in (0, 1)]
    links = [f"kd{os.getpid() % 100000}-{i}" for i in (0, 1)]
    with contextlib.ExitStack() as cleanup:
        try:
            for name in names:
                cleanup.callback(ip, "netns", "del", name, check=False)  # takes its end of the pair with it
                ip("netns", "add", name)
            cleanup.callback(ip, "link", "del", links[0], check=False)
            ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
            for number, (name, link) in enumerate(zip(names, links, strict=True), start=1):
                ip("link", "set", link, "netns", name)
                ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(
                f"network namespaces cannot be made here: {' '.join(error.cmd)}: {error.stderr.strip()}"
            )
        yield names


def one_device(source):
    namespace = {"__name__": "one_device"}
    exec(source, namespace)
    return namespace["train"](None)


@pytest.mark.parametrize(
    ("backend", "workers"),
    # Each worker is a Python of its own, which takes seconds to import its backend: two workers on JAX only.
    [
        pytest.param(backend, workers, marks=full_unless((workers == 2) == (backend == "jax")))
        for backend, workers in itertools.product(BACKENDS, (1, 2))
    ],
    scope="module",
)
def test_two_hosts_train_as_one_device(backend, workers, hosts, tmp_path):
    # Nothing else listens in a namespace of our own.
    addresses = f"{NETWORK}.1:5000,{NETWORK}.2:5000"
    started = []
    try:
        for index, name in enumerate(hosts):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "kdist", "run"]
            command += ["--backend", backend, "--num-workers", str(workers)]
            command += ["--hosts", addresses, "--host-index", str(index)]
            started.append(Script(tmp_path, f"host{index}", SCRIPT, {"KDIST_JOIN_TIMEOUT": "90"}, command))
        for script in started:
            assert script.wait() == 0, script.stdout() + script.stderr()
        printed = "\n".join(script.stdout() for script in started)
    finally:
        for script in started:
            script.kill()
    found = [
        line.partition("NUMBERS ")[2].partition(" ") for line in printed.splitlines() if "NUMBERS" in line
    ]
    numbers = {int(rank): json.loads(text) for rank, _, text in found}
    assert sorted(numbers) == list(range(2 * workers))
    expected = run_plain(backend, one_device, SCRIPT)
    for actual in numbers.values():
        assert actual.keys() == expected.keys()
        for name in expected:
            assert actual[name] == pytest.approx(expected[name], rel=1e-5, abs=2e-6), name
