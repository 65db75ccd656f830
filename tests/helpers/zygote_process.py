"""Runs the processes that fork others: they have imported many modules, but have not computed anything.

`zygote.py` starts the first process, which has imported the frameworks, and sends it orders. A forked process
is a worker, a script, or another zygote that imports more: Keras with one backend, and then modules of kdist.
A zygote is single-threaded, and a child leaves its loop at once. The child's code therefore runs in the main
thread, as in a new process.
"""

from __future__ import annotations

import atexit
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
import threading
import time
import types
from pathlib import Path
from typing import Any, NoReturn

_MOST = 1 << 18  # bytes of an order
_FILES = 8
# Lets a forked process write the stacks of its threads to stderr; kdist and its users have other signals.
STACKS = signal.SIGRTMIN + 7


def serve(orders: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks a child for each order until the orders end. Returns only in the children."""
    children: dict[int, int] = {}  # the pidfd of a child -> its process id
    zygotes: set[int] = set()
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
                # Zygotes end by themselves, because their orders also end, and they must end their own
                # children.
                _end({pid for pid in children.values() if pid not in zygotes})
            order = json.loads(data)
            if pid := os.fork():
                children[os.pidfd_open(pid)] = pid
                if order["is_zygote"]:
                    zygotes.add(pid)
                for file in files:
                    os.close(file)
                orders.send(json.dumps(["started", pid]).encode())
            else:
                orders.close()
                for pidfd in children:
                    os.close(pidfd)
                return order, files


def _end(children: set[int]) -> None:
    for pid in children:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    os._exit(0)


def become(order: dict[str, Any], files: list[int]) -> None:
    """Gives a child its own session, environment, working directory, output and random numbers."""
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
    """Waits for orders; in a child, runs the ordered script as `__main__`."""
    number, imports = int(sys.argv[1]), sys.argv[2:]
    faulthandler.enable()
    is_zygote = True
    while is_zygote:
        orders = socket.socket(fileno=number)
        for name in imports:
            importlib.import_module(name)
        if "keras" in sys.modules:
            assert sys.modules["keras"].config.backend() == os.environ["KERAS_BACKEND"]
        gc.collect()
        gc.freeze()  # keeps imported objects out of the children's garbage collections, which would copy them
        order, files = serve(orders)
        become(order, files)
        number, imports, is_zygote = files[-1], order["imports"], order["is_zygote"]
    if order["script"] is None:
        importlib.import_module("kdist.testing.pool_worker").main([str(files[2])])
        return
    faulthandler.register(STACKS)
    try:
        run(order["script"])
    except Exception:
        if not order["is_quick"]:
            raise
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # as the interpreter does
        sys.excepthook(*sys.exc_info())
        end(1)
    except SystemExit as ending:
        if not order["is_quick"] or not isinstance(ending.code, int | None):
            raise
        end(ending.code or 0)
    if order["is_quick"]:
        end(0)


def run(path: str) -> None:
    """Runs a script as `__main__`."""
    sys.argv[:] = [path]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = path
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), module.__dict__)


def end(code: int) -> NoReturn:
    """Ends the process as Python does, but does not delete the modules, which takes a second of CPU time."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
