"""Many short jobs of several workers, without paying for the import of a framework each time.

A process imports Keras and its backend once, and forks a worker whenever it is told to. Each worker then runs as a
script of its own does: it joins the others, trains, and ends with its own exit code, and nobody looks after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.processes import ROOT, clean_environment

_START = """
import faulthandler, gc, json, os, select, signal, sys
faulthandler.enable()
import numpy, keras, kdist
{imports}
gc.collect()
gc.freeze()  # or each collection in a child would look at, and copy, all that was imported
children = {{}}
order = None
orders = open(0, "rb", buffering=0, closefd=False)  # or a line could hide in a buffer from `select`
while order is None:
    ready, _, _ = select.select([orders], [], [], 0.02)
    line = orders.readline() if ready else None
    if line == b"":
        os._exit(0)
    if line:
        order = json.loads(line)
        if pid := os.fork():
            children[pid], order = order["name"], None
            print(json.dumps([children[pid], "started", pid]), flush=True)
        continue
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            print(json.dumps([children.pop(pid), "ended", os.waitstatus_to_exitcode(status)]), flush=True)
os.setsid()
os.environ.update(order["env"])
for number, path in ((1, order["out"]), (2, order["err"])):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, number)
    os.close(file)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
# From here on it is the worker.
"""


class Worker:
    """A forked worker."""

    def __init__(self, folder: Path, name: str) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        self.pid = 0
        self.exit_code: int | None = None
        self.ended_at = 0.0

    def stdout(self) -> str:
        """What it has printed so far."""
        return self.out.read_text(encoding="utf-8", errors="replace") if self.out.exists() else ""

    def stderr(self) -> str:
        """What it has written to stderr so far."""
        return self.err.read_text(encoding="utf-8", errors="replace") if self.err.exists() else ""


class Zygote:
    """The process that forks workers of one backend.

    Args:
        folder: Where the workers' output goes.
        backend: The Keras backend.
        script: What each worker runs; Keras, NumPy and kdist are imported.
    """

    def __init__(self, folder: Path, backend: str, script: str) -> None:
        self.folder = folder
        self._workers: dict[str, Worker] = {}
        path = folder / "zygote.py"
        imports = {"torch": "import torch._dynamo", "jax": "import jax", "tensorflow": "import tensorflow"}
        path.write_text(_START.format(imports=imports[backend]) + script, encoding="utf-8")
        self._errors = open(folder / "zygote.err", "wb")  # noqa: SIM115  # closed with the process
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=clean_environment() | {"KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT)},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, name: str, env: Mapping[str, str]) -> Worker:
        """Forks a worker.

        Args:
            name: Of its output files.
            env: What its environment has besides.
        """
        worker = self._workers[name] = Worker(self.folder, name)
        order: dict[str, Any] = {
            "name": name,
            "env": dict(env),
            "out": str(worker.out),
            "err": str(worker.err),
        }
        assert self._process.stdin is not None
        assert self._process.poll() is None, f"The zygote has ended with {self._process.returncode}."
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return worker

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            name, what, number = json.loads(line)
            worker = self._workers[name]
            if what == "started":
                worker.pid = number
            else:
                worker.ended_at, worker.exit_code = time.monotonic(), number

    def close(self) -> None:
        """Ends the process and all of its workers."""
        for worker in self._workers.values():
            if worker.exit_code is None and worker.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait(10)
        self._errors.close()
