"""The Ray actor of `kdist.launch`, which starts one worker on a machine of a Ray cluster.

The worker is a separate process. Therefore its environment is set before Keras is imported, regardless of
Ray's process, and the worker can be terminated.
"""

from __future__ import annotations

import io
import os
import queue
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.cluster import hold_free_ports
from kdist.launch import linux
from kdist.launch.local_workers import run_plan
from kdist.launch.output import Sink
from kdist.launch.plan import JobPlan, Place, WorkerPlan, environ_of, worker_variables
from kdist.launch.shipping import Ended, Ending

_WAIT = 1.0  # seconds that `news` waits for output
_GATHER = 0.02  # seconds in which it collects more output
_TERM_TO_KILL = 0.3


class _Passed(io.RawIOBase):
    """A stream that puts all bytes into a queue."""

    def __init__(self, name: str, put: Callable[[Any], None]) -> None:
        self._name, self._put = name, put
        self.buffer = self

    def write(self, data: Any) -> int:
        self._put((self._name, bytes(data)))
        return len(data)


class WorkerActor:
    """Starts a worker, and reports its output and its end."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self._news: queue.SimpleQueue[tuple[str, bytes] | Ending] = queue.SimpleQueue()
        self._job_id = uuid.uuid4().hex

    def hold_port(self, host: str) -> int:
        """Reserves a port of this machine for the worker, and returns its number."""
        self._held = hold_free_ports(1, host)
        return self._held[0].getsockname()[1]

    def run(
        self,
        payload: bytes,
        addresses: Sequence[str],
        place: Place,
        backend: str | None,
        env: Mapping[str, str],
        timeout: float | None,
    ) -> None:
        """Runs the worker to its end. `news` returns its output and result."""
        try:
            # The worker gets this import path, so that it also finds kdist and the modules that Ray provides.
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            told = environ_of(self._job_id, worker_variables(addresses, place), backend, environ, env)
            worker = WorkerPlan(place.index, addresses[place.index], told)
            job = JobPlan(self._job_id, len(addresses), [worker], self._held)
            out, err = (Sink(_Passed(name, self._news.put)) for name in ("out", "err"))
            ending = run_plan(job, payload, out, err, timeout=timeout, prefixed=False)
        except BaseException:  # otherwise all would wait for its end
            failed = Ended(place.index, 1, traceback.format_exc().splitlines(), None)
            ending = Ending([failed], failed)
        self._news.put(ending)

    def news(self) -> list[tuple[str, bytes] | Ending]:
        """Returns the output since the last call, and finally the end of the worker. Waits about a second."""
        found = []
        try:
            found.append(self._news.get(timeout=_WAIT))
            if not isinstance(found[0], Ending):
                time.sleep(_GATHER)
            while True:
                found.append(self._news.get_nowait())
        except queue.Empty:
            return found

    def end(self) -> None:
        """Terminates the worker and its descendants, so that `run` returns."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for pid in linux.members_of_job(self._job_id):
                linux.send(pid, signum)
            time.sleep(_TERM_TO_KILL)
