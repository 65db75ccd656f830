"""The worker's side of `WorkerPool`: reads a call, carries it out, answers, until nobody calls any more."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from typing import IO

from kdist.launch import shipping

_HEADER = struct.Struct("!Q")


def main(argv: Sequence[str]) -> None:
    """Serves the pool.

    Args:
        argv: The file descriptor of the connection to the test.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Ctrl-C at the test's terminal is the test's business: it ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv = ["kdist.testing"]
    connection = socket.socket(fileno=int(argv[0]))
    os.set_inheritable(connection.fileno(), False)
    calls = connection.makefile("rb")
    num_modules = 0
    while True:
        call = _read(calls)
        if call is None:
            # Not an ordinary exit: frameworks would wait for peers there, and the test does not care.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        answer = pickle.dumps(shipping.perform(call))
        sys.stdout.flush()
        connection.sendall(_HEADER.pack(len(answer)) + answer)
        if len(sys.modules) != num_modules:
            # Keras collects garbage in `clear_session`: a quarter of a second for what frameworks bring along.
            num_modules = len(sys.modules)
            gc.collect()
            gc.freeze()


def _read(calls: IO[bytes]) -> bytes | None:
    """Returns the next call; `None` once the test has gone, in the middle of one too."""
    with contextlib.suppress(ConnectionResetError, struct.error):
        (size,) = _HEADER.unpack(calls.read(_HEADER.size))
        call = calls.read(size)
        return call if len(call) == size else None
    return None
