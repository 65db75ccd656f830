"""Provokes problems before workers have joined, or that end processes. Each function returns the output."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kdist
from kdist.cluster import discover, timeouts
from kdist.control import rendezvous
from kdist.coordinator.rpc import Peer, Service
from kdist.doctor import examination
from tests.helpers.scripts import RUN, TRAINS, Script, local_addresses, run_python, started, tf_config

ENDS = """
import os, sys, time
for name in ("RANK", "WORLD_SIZE"):
    print(name, os.environ.get(name), flush=True)
"""
JOIN = """
import kdist
strategy = kdist.MultiWorkerMirroredStrategy()
"""


def run(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """Runs `kdist`, and returns its output and exit code."""
    done = run_python("-m", "kdist", *arguments, cwd=folder, code=None, **(env or {}))
    return f"{done.stdout}\n{done.stderr}\nexit code {done.returncode}"


def run_script(folder: Path, source: str, *options: str) -> str:
    """Runs a script with `kdist run`, and returns the output and the exit code."""
    (folder / "train.py").write_text(source, encoding="utf-8")
    return run(folder, "run", *(options or ("-n", "2")), "train.py")


def workers(
    backend: str, addresses: list[str], *indices: int, seconds: int = 60, **more: str
) -> list[dict[str, str]]:
    """Returns the environments of workers with this join timeout."""
    base = {"KERAS_BACKEND": backend, "KDIST_JOIN_TIMEOUT": str(seconds)} | more
    return [base | {"TF_CONFIG": tf_config(addresses, index)} for index in indices]


def said_by(begun: list[Script]) -> str:
    for script in begun:
        script.wait()
    return "\n".join(script.stdout() + script.stderr() for script in begun)


def error_of(function: Callable[[], object]) -> str:
    with pytest.raises(kdist.errors.KdistError) as info:
        function()
    return f"kdist.errors.{info.type.__name__}: {info.value}"


# Before the workers have joined ------------------------------------------------------------------------------


def a_worker_is_missing(folder: Path, backend: str) -> str:
    with started(folder, JOIN, workers(backend, local_addresses(2), 0, seconds=6)) as begun:
        return said_by(begun)


@contextlib.contextmanager
def silent_address() -> Iterator[str]:
    """Yields an address that does not answer, as behind a firewall: the queue of its listener is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as waiting:
        for _ in range(4):
            waiting.enter_context(client := socket.socket()).setblocking(False)
            client.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


def port_that_is_closed(folder: Path, backend: str) -> str:
    with silent_address() as chief:
        (env,) = workers("torch", [chief, *local_addresses(1)], 1, seconds=6)
        cluster = discover(environ=env)
        line = examination.missing_line(cluster, rendezvous.missing_error(cluster, 115, [0]))
        with started(folder, JOIN, [env]) as begun:
            return "\n".join([line.text(), line.says, said_by(begun)])


def further_ports_that_are_closed(folder: Path, backend: str) -> str:
    source = "import torch.distributed as dist\nopen_store = dist.TCPStore\n"
    source += "dist.TCPStore = lambda host, port, is_master, **more: open_store(\n"
    source += "    host, port if is_master else 1, is_master=is_master, **more)\n" + JOIN
    with started(folder, source, workers("torch", local_addresses(2), 0, 1, seconds=6)) as (_, other):
        return said_by([other])


def another_token(folder: Path, backend: str) -> str:
    service = Service(address := local_addresses(1)[0], {}.get, "one")
    peer = Peer(f"worker 0 ({address})", address, "another")
    try:
        return error_of(lambda: peer.call("compute"))
    finally:
        peer.close()
        service.stop()


def nobody_described_a_cluster(folder: Path, backend: str) -> str:
    return run(folder, "info", env={"KERAS_BACKEND": backend})


def port_in_use(folder: Path, backend: str) -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (folder / "train.py").write_text(ENDS, encoding="utf-8")
        return run(folder, "run", "--hosts", f"127.0.0.1:{port}", "--host-index", "0", "train.py")


def host_without_an_address(folder: Path, backend: str) -> str:
    (folder / "train.py").write_text(ENDS, encoding="utf-8")
    return run(folder, "run", "--hosts", "no-such-host.invalid:5000", "--host-index", "0", "train.py")


def host_of_somebody_else(folder: Path, backend: str) -> str:
    (folder / "train.py").write_text(ENDS, encoding="utf-8")
    return run(folder, "run", "--hosts", "192.0.2.1:5000", "--host-index", "0", "train.py")


def two_of_one_index(folder: Path, backend: str) -> str:
    addresses = local_addresses(3)
    with started(folder, JOIN, workers("torch", addresses, 0, 1, 1, seconds=2)) as begun:
        return said_by(begun)


def wrong_tf_config(folder: Path, backend: str) -> str:
    return error_of(lambda: discover(environ={"TF_CONFIG": tf_config(["host0:2222", "host1"], 0)}))


def joined_too_late(folder: Path, backend: str) -> str:
    source = "import keras\nkeras.ops.sum(keras.ops.ones(3))\n" + JOIN
    with started(folder, source, workers("jax", local_addresses(2), 0, 1, seconds=5)) as begun:
        return said_by(begun)


def different_devices(folder: Path, backend: str) -> str:
    source = "import os, kdist\nnames = ['cpu:0', 'cpu:1'][: 1 + int(os.environ['WHO'])]\n"
    source += "kdist.MultiWorkerMirroredStrategy(devices=names)\n"
    envs = [
        env | {"WHO": str(who)}
        for who, env in enumerate(workers("jax", local_addresses(2), 0, 1, seconds=20))
    ]
    with started(folder, source, envs) as begun:
        return said_by(begun)


def backend_that_is_unknown(folder: Path, backend: str) -> str:
    with started(folder, "import kdist\nkdist.MirroredStrategy()\n", [{"KERAS_BACKEND": "pytorch"}]) as begun:
        return said_by(begun)


def no_such_script(folder: Path, backend: str) -> str:
    return run(folder, "run", "trian.py")


def python_as_the_script(folder: Path, backend: str) -> str:
    return run(folder, "run", "python", "train.py")


# After the workers have joined -------------------------------------------------------------------------------


def a_worker_is_killed(folder: Path, backend: str) -> str:
    with started(folder, TRAINS, workers(backend, local_addresses(2), 0, 1)) as begun:
        for script in begun:
            script.wait_for("TRAINS")
        begun[1].process.kill()
        return said_by(begun)


def a_worker_hangs(folder: Path, backend: str) -> str:
    limits = {
        "KDIST_HANG_TIMEOUT": "2",
        "KDIST_HEARTBEAT_TIMEOUT": "1",
        "KDIST_INJECT": "hang:worker=1,step=3",
    }
    with started(folder, TRAINS, workers(backend, local_addresses(2), 0, 1, **limits)) as begun:
        said = said_by(begun)
        assert begun[1].exit_code == timeouts.STALLED == 70
        return said


def exit_1(folder: Path, backend: str) -> str:
    return run_script(
        folder, ENDS + "if os.environ['RANK'] == '1':\n    raise ValueError('no labels')\ntime.sleep(60)\n"
    )


def exit_70(folder: Path, backend: str) -> str:
    return run_script(folder, ENDS + "sys.exit(70)\n")


def exit_75(folder: Path, backend: str) -> str:
    return run_script(folder, ENDS + "sys.exit(75)\n")


def exit_137(folder: Path, backend: str) -> str:
    return run_script(
        folder, ENDS + "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    )


def interrupted(folder: Path, backend: str, number: int = signal.SIGINT) -> str:
    command = (*RUN, "-n", "2")
    with Script(folder, "train", ENDS + "print('READY', flush=True)\ntime.sleep(60)\n", {}, command) as job:
        job.wait_for("READY")
        os.kill(job.process.pid, number)
        code = job.wait(30)
    return f"{job.stdout()}\n{job.stderr()}\nexit code {code}"


def exit_130(folder: Path, backend: str) -> str:
    return interrupted(folder, backend)


def exit_143(folder: Path, backend: str) -> str:
    return interrupted(folder, backend, signal.SIGTERM)


def launched_function_fails(folder: Path, backend: str) -> str:
    def train() -> None:
        raise ValueError("no labels")

    return error_of(lambda: kdist.launch(train, num_workers=2))


def launched_function_does_not_end(folder: Path, backend: str) -> str:
    def train() -> None:
        time.sleep(60)

    return error_of(lambda: kdist.launch(train, num_workers=2, timeout=2))


_HELPERS = ("run", "run_script", "workers", "said_by", "error_of", "interrupted", "silent_address")
CASES: dict[str, Callable[[Path, str], str]] = {
    name: value
    for name, value in list(globals().items())
    if getattr(value, "__module__", "") == __name__ and name[0].islower() and name not in _HELPERS
}
