"""Forks processes quickly from a process that has imported Keras and its backend, and computed nothing.

The import of a backend takes 2.5 to 5.5 seconds of CPU time, more than most tests. The import of all
frameworks, which datasets and Keras's seeds need on any backend, takes more than ten. A forked process has
its own session, environment, output and exit code.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.helpers.environment import ROOT, clean_environment

# Each child would otherwise import these at its first use.
_FRAMEWORKS = (
    "tests.helpers.rewriting",
    "numpy",
    "cloudpickle",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "jax",
)
# TensorFlow imports Keras, which imports its backend. No module of kdist that changes Keras: some children
# must behave like a process without kdist.
_KERAS = ("keras", "tensorflow", "kdist", "kdist.testing.pool_worker")
_KDIST = (
    "kdist.strategies.multi_worker_mirrored",
    "kdist.strategies.new_variables",
    "kdist.training.methods",
    "kdist.checkpoint.manager",
    "kdist.callbacks",
    "kdist.data.distribute",
    "kdist.data.prefetch",
)
# Whether forked processes skip two steps that take longer than most tests: TensorFlow's optimization of
# functions, and the deletion of all modules when a script ends. Only `--no-forks` includes both.
is_quick = False
# The address of the process that lends zygotes to the processes of pytest-xdist; see `lend`.
lender = ""
_MOST = 1 << 18
_LENT = b"lent"
_START = 120.0  # seconds for the imports, on a busy machine


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote = zygote
        self.pid = pid
        self.returncode: int | None = None
        self.ended_at = 0.0  # by `time.monotonic()`

    def poll(self) -> int | None:
        """Returns the exit code, or `None` while the process runs."""
        self._zygote.read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, and returns the exit code."""
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal unless the process has ended."""
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


_Process = subprocess.Popen[bytes] | Forked


class Zygote:
    """The process that forks other processes, as the tests see it.

    Args:
        start: Starts the process. It gets the file for the output, and the child's end of the connection.
    """

    def __init__(self, start: Callable[[IO[bytes], socket.socket], _Process | None]) -> None:
        self._children: dict[int, Forked] = {}
        self._lock = threading.Lock()
        self._errors: IO[bytes] = tempfile.TemporaryFile(prefix="kdist-zygote-")  # noqa: SIM115  # kept open
        # A datagram delivers an order together with its files.
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = start(self._errors, theirs)
        theirs.close()
        atexit.register(self.close)

    def fork(
        self, env: Mapping[str, str], out: IO[bytes], err: IO[bytes], script: Path | None, *files: int
    ) -> Forked:
        """Forks a process.

        Args:
            env: The whole environment.
            out: The file for stdout.
            err: The file for stderr.
            script: The script to run, or `None` for the worker of a `WorkerPool`.
            *files: More file descriptors for the process.
        """
        if script is None:
            return self.order({"env": dict(env)}, out, err, *files)
        folder = str(script.parent)
        order = {
            "env": dict(env),
            "cwd": folder,
            "folder": folder,
            "script": str(script),
            "is_quick": is_quick,
        }
        return self.order(order, out, err)

    def order(self, order: Mapping[str, Any], *files: IO[bytes] | socket.socket | int) -> Forked:
        """Forks a process that follows an order. The files are its stdout, its stderr, and more."""
        usual = {"cwd": os.getcwd(), "folder": str(ROOT), "script": None, "imports": (), "is_zygote": False}
        with self._lock:
            data = json.dumps(usual | dict(order)).encode()
            numbers = [file if isinstance(file, int) else file.fileno() for file in files]
            socket.send_fds(self._orders, [data], numbers)
            deadline = time.monotonic() + _START
            while True:
                self._orders.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    answer = self._orders.recv(_MOST)
                except (TimeoutError, ConnectionError):  # the zygote has ended; its output shows the cause
                    answer = b""
                if not answer:
                    self._errors.seek(0)
                    raise RuntimeError(f"The zygote does not answer:\n{self._errors.read().decode()[-5000:]}")
                if (started := self._note(answer)) is not None:
                    child = self._children[started] = Forked(self, started)
                    return child

    def _note(self, answer: bytes) -> int | None:
        what, pid, *ended = json.loads(answer)
        if what == "started":
            return int(pid)
        child = self._children.pop(pid)
        child.returncode, child.ended_at = ended
        return None

    def read(self) -> None:
        """Records the processes that have ended."""
        with self._lock:
            if self._orders.fileno() < 0:
                return
            self._orders.settimeout(0.0)
            try:
                while answer := self._orders.recv(_MOST):
                    self._note(answer)
            except BlockingIOError:
                pass

    def close(self) -> None:
        """Ends the zygote and all of its children."""
        with self._lock:
            self._orders.close()
        for child in self._children.values():
            child.returncode = -signal.SIGKILL
        if self._process is not None:
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(5)
        self._errors.close()
        atexit.unregister(self.close)


@functools.cache
def zygote(backend: str, plain: bool) -> Zygote:
    """Returns a backend's zygote, which the tests keep. In a plain zygote, kdist does not change Keras."""
    return Zygote(functools.partial(_borrow, lender, backend, plain)) if lender else _own(backend, plain)


@functools.cache
def _own(backend: str, plain: bool) -> Zygote:
    env = {"KERAS_BACKEND": backend}
    if plain:
        grappler = ("tests.helpers.without_grappler",) if is_quick and backend == "tensorflow" else ()
        return Zygote(functools.partial(_fork, _frameworks(), (*_installed(_KERAS), *grappler), env))
    modules = (*_KDIST, f"kdist.backends.{backend}.backend")
    return Zygote(functools.partial(_fork, _own(backend, True), modules, env))


@functools.cache
def _frameworks() -> Zygote:
    return Zygote(_start)


def _start(errors: IO[bytes], theirs: socket.socket) -> _Process:
    script = str(ROOT / "tests" / "helpers" / "zygote_process.py")
    return subprocess.Popen(
        [sys.executable, script, str(theirs.fileno()), *_installed(_FRAMEWORKS)],
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=[theirs.fileno()],
        env=clean_environment(),
    )


def _fork(
    parent: Zygote,
    imports: Sequence[str],
    env: Mapping[str, str],
    errors: IO[bytes] | int,
    theirs: socket.socket | int,
) -> _Process:
    order = {"env": clean_environment() | env, "imports": imports, "is_zygote": True}
    return parent.order(order, errors, errors, theirs)


def _borrow(path: str, backend: str, plain: bool, errors: IO[bytes], theirs: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(3 * _START)
        connection.connect(path)
        request = json.dumps([backend, plain]).encode()
        socket.send_fds(connection, [request], [errors.fileno(), theirs.fileno()])
        if (answer := connection.recv(_MOST)) != _LENT:
            raise RuntimeError(answer.decode())


def lend() -> str:
    """Lets processes of pytest-xdist fork their zygotes from the zygotes of this process.

    The frameworks are then imported once instead of once per process.

    Returns:
        The value of `lender` for these processes.
    """
    folder = tempfile.mkdtemp(prefix="kdist-zygotes-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, "lender")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    threading.Thread(target=_lend, args=(listener,), name="lender of zygotes", daemon=True).start()
    return path


def _lend(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            data, files, _, _ = socket.recv_fds(connection, _MOST, 2)
            backend, plain = json.loads(data)
            answer = _LENT
            try:
                _fork(_own(backend, plain), (), {"KERAS_BACKEND": backend}, *files)
            except RuntimeError as error:
                answer = str(error).encode()[-_MOST:]
            for file in files:
                os.close(file)
            connection.send(answer)


def _installed(modules: Sequence[str]) -> tuple[str, ...]:
    """Returns the modules of installed packages: an environment may have only one backend."""
    return tuple(name for name in modules if importlib.util.find_spec(name.partition(".")[0]))
