"""The worker's side of `WorkerPool`: reads, runs and answers calls until the test closes the connection."""

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
    """Answers the calls of the pool. `argv` contains the file descriptor of the connection to the test."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Only the test handles Ctrl-C in its terminal, and terminates the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv = ["kdist.testing"]
    connection = socket.socket(fileno=int(argv[0]))
    os.set_inheritable(connection.fileno(), False)
    calls = connection.makefile("rb")
    num_modules = 0
    while True:
        call = _read(calls)
        if call is None:
            # Not a normal exit, because there frameworks would wait for peers.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        answer = pickle.dumps(shipping.perform(call))
        sys.stdout.flush()
        connection.sendall(_HEADER.pack(len(answer)) + answer)
        if len(sys.modules) != num_modules:
            # `clear_session` collects garbage, which takes 0.25 s unless frameworks' objects are frozen.
            num_modules = len(sys.modules)
            gc.collect()
            gc.freeze()


def _read(calls: IO[bytes]) -> bytes | None:
    """Returns the next call, or `None` if the test closed the connection, even in the middle of a call."""
    with contextlib.suppress(ConnectionResetError, struct.error):
        (size,) = _HEADER.unpack(calls.read(_HEADER.size))
        call = calls.read(size)
        return call if len(call) == size else None
    return None
