"""The process that forks workers: it has imported Keras and its backend, and has computed nothing.

`tests/zygote.py` starts it and talks to it. It is single-threaded itself, and a child leaves its loop at once, so that
what the child runs has the main thread as in a process of its own.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
import types
from pathlib import Path
from typing import Any

# What a first use would import: children would each do so for themselves. Nothing of kdist's that touches Keras: some
# children are what a process without kdist is.
_LATER = {
    "tensorflow": ("tensorflow",),
    "jax": ("jax",),
    "torch": ("torch", "torch._dynamo", "torch.distributed"),
}
_MOST = 1 << 18  # bytes of an order
_FILES = 8


def import_all(frameworks: list[str]) -> None:
    """Imports Keras, frameworks, and of kdist what reads calls."""
    later = [name for framework in frameworks for name in _LATER[framework]]
    for name in ("numpy", "cloudpickle", "keras", *later, "kdist", "kdist.testing.pool_worker"):
        importlib.import_module(name)


def serve(orders: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks a child for each order until nobody orders any more; returns in the children only."""
    children: dict[int, int] = {}  # the pidfd of a child -> its process id
    while True:
        ready, _, _ = select.select([orders, *children], [], [])
        for pidfd in [one for one in ready if one in children]:
            pid = children.pop(pidfd)
            os.close(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            orders.send(json.dumps(["ended", pid, code, time.monotonic()]).encode())
        if orders in ready:
            data, files, _, _ = socket.recv_fds(orders, _MOST, _FILES)
            if not data:
                _end(children)
            if pid := os.fork():
                children[os.pidfd_open(pid)] = pid
                for file in files:
                    os.close(file)
                orders.send(json.dumps(["started", pid]).encode())
            else:
                orders.close()
                for pidfd in children:
                    os.close(pidfd)
                return json.loads(data), files


def _end(children: dict[int, int]) -> None:
    for pid in children.values():
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    os._exit(0)


def become(order: dict[str, Any], files: list[int]) -> None:
    """Makes a child what a new process would be: its own session, environment, folder, output and random numbers."""
    os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, *files[:2])):
        os.dup2(file, number)
        os.close(file)
    for file in files[2:]:
        os.set_inheritable(file, True)
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.path[:] = [order["folder"], *(path for path in sys.path if path != str(Path(__file__).parent))]


def main() -> None:
    """Serves; in a child, runs what was ordered, as `__main__`."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    faulthandler.enable()
    import_all(sys.argv[2:])
    gc.collect()
    gc.freeze()  # or each collection in a child would look at, and copy, all that was imported
    order, files = serve(orders)
    become(order, files)
    if order["script"] is None:
        importlib.import_module("kdist.testing.pool_worker").main([str(files[2])])
        return
    path = order["script"]
    sys.argv[:] = [path]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = path
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), module.__dict__)


if __name__ == "__main__":
    main()
