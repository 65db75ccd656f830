"""`kdist run --hosts` on two hosts, which are two network namespaces that a veth pair connects.

The tests are skipped if they cannot create namespaces, which needs root or equal permissions, or if `ip` is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.processes import BACKENDS, each_backend, each_backend_in_twelve_turns, full_unless
from tests.helpers.same_numbers import SCRIPT, check_numbers
from tests.helpers.scripts import RUN, Script

NETWORK = "10.77.0"
NETWORK_6 = "fd77"

SMALL = "keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1, kernel_initializer=second)])"
# Has the same results as the small model, but a megabyte of additional gradients, which are zero.
LARGE = """keras.Sequential([keras.Input((4,)), hidden])
        one, other = (keras.layers.Dense(1, kernel_initializer=second) for _ in range(2))
        wide = keras.layers.Dense(50_000, kernel_initializer=first)(model.outputs[0])
        outputs = [one(model.outputs[0]), keras.layers.Rescaling(0.0)(other(wide))]
        model = keras.Model(model.inputs, keras.layers.Add()(outputs))"""


def ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=check)


def link_of(index):
    """Returns the name of the network interface of a host."""
    return f"kd{os.getpid() % 100000}-{index}"


@pytest.fixture
def hosts():
    """Creates namespaces with the addresses 10.77.0.1 and 10.77.0.2, and fd77::1 and fd77::2; yields their names."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` on this machine: apt-get install iproute2")
    names = [f"kdist-{os.getpid()}-{i}" for i in (0, 1)]
    links = [link_of(i) for i in (0, 1)]
    with contextlib.ExitStack() as cleanup:
        try:
            for name in names:
                cleanup.callback(ip, "netns", "del", name, check=False)  # also deletes its link
                ip("netns", "add", name)
            cleanup.callback(ip, "link", "del", links[0], check=False)
            ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
            for number, (name, link) in enumerate(zip(names, links, strict=True), start=1):
                ip("link", "set", link, "netns", name)
                ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", link)
                ip("-n", name, "addr", "add", f"{NETWORK_6}::{number}/64", "dev", link, "nodad")
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(
                f"network namespaces cannot be made here: {' '.join(error.cmd)}: {error.stderr.strip()}"
            )
        yield names


@contextlib.contextmanager
def job(hosts, backend, workers, folder, source, addresses, env=None):
    """Starts `kdist run` on each host; yields both processes."""
    environment = {"KDIST_JOIN_TIMEOUT": "90"} | (env or {})
    options = ("--backend", backend, "--num-workers", str(workers), "--hosts", addresses, "--host-index")
    with contextlib.ExitStack() as cleanup:
        yield [
            cleanup.enter_context(
                Script(
                    folder,
                    f"host{index}",
                    source,
                    environment,
                    ("ip", "netns", "exec", name, *RUN, *options, str(index)),
                )
            )
            for index, name in enumerate(hosts)
        ]


# These ports are free, because the namespaces do not contain other processes that listen.
IPV4 = f"{NETWORK}.1:5000,{NETWORK}.2:5000"
IPV6 = f"[{NETWORK_6}::1]:5000,[{NETWORK_6}::2]:5000"


@pytest.mark.parametrize(
    ("backend", "workers"),
    # Each worker is a new Python process, which takes seconds to import its backend, so only JAX has two per host.
    [
        pytest.param(backend, workers, marks=full_unless((workers == 2) == (backend == "jax")))
        for backend, workers in itertools.product(BACKENDS, (1, 2))
    ],
    scope="module",
)
@pytest.mark.in_turn(6)
def test_two_hosts_train_as_one_device(backend, workers, hosts, tmp_path):
    with job(hosts, backend, workers, tmp_path, SCRIPT, IPV4) as started:
        check_numbers(backend, 2 * workers, started)


@pytest.mark.kills(gloo_interface_of_ipv6_not_found="[torch]")
@pytest.mark.full
@each_backend_in_twelve_turns
def test_two_hosts_with_ipv6_addresses_train_as_one_device(backend, hosts, tmp_path):
    for name in hosts:
        ip("-n", name, "-4", "addr", "flush", "scope", "global")
    with job(hosts, backend, 1, tmp_path, SCRIPT, IPV6) as started:
        check_numbers(backend, 2, started)


# Failed and slow networks -------------------------------------------------------------------------------------

HEARTBEAT = 6.0
# Additional seconds for a busy machine, after the heartbeat timeout.
SLACK = 12.0

ENDLESS = """
import os
import kdist, keras
import numpy as np

class Note(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            print(f"TRAINS {os.environ['RANK']} PID {os.getpid()} ", flush=True)

strategy = kdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.RandomState(0).rand(4000, 3)
model.fit(x, x[:, :1], batch_size=4, epochs=10**6, verbose=0, callbacks=[Note()])
"""


@pytest.mark.kills(partition_noticed_late="[torch]")
@each_backend_in_twelve_turns
def test_a_partition_ends_both_sides(backend, hosts, tmp_path):
    env = {"KDIST_HEARTBEAT_TIMEOUT": str(HEARTBEAT)}
    with job(hosts, backend, 1, tmp_path, ENDLESS, IPV4, env) as started:
        for index, script in enumerate(started):
            script.wait_for(f"TRAINS {index} ")
        ip("-n", hosts[0], "link", "set", link_of(0), "down")  # both ends lose the connection
        start = time.monotonic()
        codes = [script.wait() for script in started]
        seconds = time.monotonic() - start
    for index, (script, code) in enumerate(zip(started, codes, strict=True)):
        assert code != 0
        assert f"The job lost worker {1 - index} ({NETWORK}.{2 - index}:5000)" in script.stderr(), (
            script.stderr()
        )
    assert seconds < HEARTBEAT + SLACK


@pytest.mark.kills("stopped_worker_of_several_machines_lives")
@pytest.mark.full
@each_backend_in_twelve_turns
def test_a_stopped_worker_on_another_host_ends_the_job_in_seconds(backend, hosts, tmp_path):
    with job(hosts, backend, 1, tmp_path, ENDLESS, IPV4) as started:
        for index, script in enumerate(started):
            script.wait_for(f"TRAINS {index} ")
        os.kill(int(started[1].stdout().partition(" PID ")[2].split()[0]), signal.SIGSTOP)
        start = time.monotonic()
        codes = [script.wait() for script in started]
        seconds = time.monotonic() - start
    print(f"{backend}: {seconds:.1f} s")
    assert "was stopped by a signal such as SIGSTOP" in started[1].stderr(), started[1].stderr()
    assert f"The job lost worker 1 ({NETWORK}.2:5000)" in started[0].stderr(), started[0].stderr()
    assert 0 not in codes and seconds < SLACK  # the heartbeat timeout is 15 s


ONE_END = """
import socket, sys, time
from kdist.control.connections import Connection, frame

address = ("{network}.1", 5001)
if sys.argv[1] == "0":
    with socket.create_server(address) as listening:
        link = Connection(listening.accept()[0], 100)
else:
    link = Connection(socket.create_connection(address), 100)
for _ in range(5):
    link.send(frame(b"b", 0))
    time.sleep(0.1)
print("QUIET", flush=True)
sys.stdin.readline()  # the last beat is acknowledged before the link is cut
began = time.monotonic()
while not link.is_unreachable(2.0):
    link.send(frame(b"b", 0))
    link.read()
    time.sleep(0.2)
print("UNREACHABLE", time.monotonic() - began, flush=True)
"""


@pytest.mark.kills("partition_without_a_route_unnoticed")
def test_both_ends_of_a_cut_connection_notice_it(hosts, tmp_path):
    """The network interface of the first host is down, so its kernel sends nothing that can be acknowledged."""
    (tmp_path / "end.py").write_text(ONE_END.format(network=NETWORK))
    with contextlib.ExitStack() as cleanup:
        ends = []
        for index, name in enumerate(hosts):
            command = ("ip", "netns", "exec", name, sys.executable, tmp_path / "end.py", str(index))
            ends.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            cleanup.enter_context(ends[-1])
            cleanup.callback(ends[-1].kill)
            time.sleep(1)
        for end in ends:
            assert end.stdout.readline() == "QUIET\n"
        ip("-n", hosts[0], "link", "set", link_of(0), "down")
        for end in ends:
            end.stdin.write("\n")
            end.stdin.flush()
        for end in ends:
            out, _ = end.communicate(timeout=30)
            assert float(out.split()[1]) < 12


@pytest.mark.kills(slow_link_is_a_lost_worker="[torch]")
@pytest.mark.full
@each_backend
def test_a_slow_link_changes_nothing(backend, hosts, tmp_path):
    if shutil.which("tc") is None:
        pytest.skip("there is no `tc` on this machine: apt-get install iproute2")
    for index, name in enumerate(hosts):
        # An exchange takes longer than the interval at which a worker checks whether the others are alive.
        limit = ("tbf", "rate", "4mbit", "burst", "4kb", "latency", "2s")
        tc = ["tc", "-n", name, "qdisc", "add", "dev", link_of(index), "root", *limit]
        done = subprocess.run(tc, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            pytest.skip(f"this kernel has no token bucket filter: {done.stderr.strip()}")
    # The heartbeats of the coordination service share the link with the tensors, and can be late by seconds.
    env = {} if backend == "torch" else {"KDIST_HEARTBEAT_TIMEOUT": "60"}
    with job(hosts, backend, 1, tmp_path, SCRIPT.replace(SMALL, LARGE), IPV4, env) as started:
        check_numbers(backend, 2, started)
