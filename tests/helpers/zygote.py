"""Processes that are there at once: forked from one that has imported Keras and its backend, and has computed nothing.

Such an import takes 2.5 to 5.5 seconds of computing, more than most of what is tested; of all frameworks, which
datasets and Keras's seeds import on any backend, more than ten. A forked process has its own session, environment and
output, ends with its own exit code, and nobody looks after it.
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

# What a first use would import: children would each do so for themselves.
_FRAMEWORKS = (
    "tests.helpers.rewriting",
    "numpy",
    "cloudpickle",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "jax",
)
# TensorFlow imports Keras, which imports its backend. Nothing of kdist's that touches Keras: some children are what a
# process without kdist is.
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
# Whether forked processes leave out what takes longer than most tests: TensorFlow's optimization of functions, and the
# deletion of all modules when a script ends. Only `--no-forks` includes both.
is_quick = False
# The address of the process that lends zygotes to a process of pytest-xdist; see `lend`.
lender = ""
_MOST = 1 << 18
_LENT = b"lent"
_START = 120.0  # seconds for the imports, on a busy machine


class Forked:
    """A forked process, with what is used of `subprocess.Popen`."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote = zygote
        self.pid = pid
        self.returncode: int | None = None
        self.ended_at = 0.0  # by `time.monotonic()`

    def poll(self) -> int | None:
        """The exit code, or `None` while it runs."""
        self._zygote.read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; returns the exit code."""
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal unless it has ended."""
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
    """The process that forks, seen from the tests.

    Args:
        start: Starts the process; called with the file for its output, and its end of the connection.
    """

    def __init__(self, start: Callable[[IO[bytes], socket.socket], _Process | None]) -> None:
        self._children: dict[int, Forked] = {}
        self._lock = threading.Lock()
        self._errors: IO[bytes] = tempfile.TemporaryFile(prefix="kdist-zygote-")  # noqa: SIM115  # kept open
        # Datagrams: an order, and the files that go with it, come as a whole.
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = start(self._errors, theirs)
        theirs.close()
        atexit.register(self.close)

    def fork(
        self, env: Mapping[str, str], out: IO[bytes], err: IO[bytes], script: Path | None, *files: int
    ) -> Forked:
        """Forks a process.

        Args:
            env: Its whole environment.
            out: Its stdout.
            err: Its stderr.
            script: What it runs; `None` for the worker of a `WorkerPool`.
            *files: Descriptors it gets besides.
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
        """Forks a process that does as it is told, with these files: its stdout, its stderr, and others."""
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
                except (TimeoutError, ConnectionError):  # it has ended, and what it printed says why
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
        """Takes note of those that have ended."""
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
        """Ends the process and all of its children."""
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
    """The zygote of a backend, kept until the tests end; in a plain one nothing of kdist touches Keras."""
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

    The frameworks are then imported once, and not once per process.

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
    """Those of packages that are there: an environment may have one backend alone."""
    return tuple(name for name in modules if importlib.util.find_spec(name.partition(".")[0]))
