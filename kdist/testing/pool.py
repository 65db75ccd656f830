"""`WorkerPool`: worker processes for tests, which run one function after another."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from kdist.cluster.keras_backends import check_backend
from kdist.errors import InvalidArgumentError, LaunchError, WorkerTimeoutError
from kdist.launch import linux, report, shipping
from kdist.launch.plan import plan_job
from kdist.launch.worker_process import start_command

_HEADER = struct.Struct("!Q")
_AFTER_FAILURE = 5.0  # seconds to wait for the other workers after a failure, because they may hang
_TAIL = 20_000
_THREADS = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


class WorkerFailure(LaunchError):
    """A function failed in a worker of a `WorkerPool`; `__cause__` is its exception if it can be pickled."""


class PoolTimeoutError(WorkerTimeoutError):
    """A worker of a `WorkerPool` did not answer in time; the message shows the stacks of such workers."""


class _Member:
    """The test's side of one worker."""

    def __init__(
        self, name: str, environ: Mapping[str, str], start: Callable[..., subprocess.Popen[bytes]]
    ) -> None:
        self.name = name
        self.errors: IO[bytes] = tempfile.TemporaryFile(prefix="kdist-")  # noqa: SIM115  # closed with the worker
        self.connection, theirs = socket.socketpair()
        try:
            self.process = start(environ, self.errors, theirs.fileno())
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
        self.received = b""

    def send(self, call: bytes, deadline: float) -> None:
        """Sends a call. If the worker has died, reading its answer fails."""
        self.connection.settimeout(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            self.connection.sendall(_HEADER.pack(len(call)) + call)
        self.connection.settimeout(None)

    def take(self) -> shipping.Result | None:
        """Reads available data, and returns the answer when it is complete.

        Raises:
            EOFError: If the worker has died.
        """
        try:
            data = self.connection.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        self.received += data
        if len(self.received) < _HEADER.size:
            return None
        size = _HEADER.unpack_from(self.received)[0] + _HEADER.size
        if len(self.received) < size:
            return None
        answer, self.received = self.received[_HEADER.size : size], self.received[size:]
        return pickle.loads(answer)

    def output(self) -> list[str]:
        """Returns the last lines that the worker printed."""
        size = os.fstat(self.errors.fileno()).st_size
        data = os.pread(self.errors.fileno(), _TAIL, max(0, size - _TAIL))
        return data.decode("utf-8", "replace").splitlines()

    def exit_text(self) -> str:
        """Returns a description of how the worker ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return report.describe_exit(self.process.wait(timeout=2.0))
        return "closed its connection"

    def close(self) -> None:
        self.connection.close()
        self.errors.close()


class WorkerPool:
    """Worker processes that start once and run one function after another.

    `TF_CONFIG` and torchrun's variables are set as under `kdist run`. Each worker computes on one thread, so
    that several workers can run on a small machine. The pool is a context manager.

    Args:
        num_workers: The number of workers.
        backend: The Keras backend of the workers; by default the backend in `KERAS_BACKEND`.
        env: Additional environment variables.
        timeout: The default timeout of `run`, in seconds. It includes the start of the workers.

    Raises:
        BackendError: If the backend is unknown or not installed.

    Example:

    ```python
    with WorkerPool(2, backend="jax") as pool:
        pool.run(lambda: os.environ["RANK"])  # ["0", "1"]
    ```
    """

    def __init__(
        self,
        num_workers: int = 2,
        backend: str | None = None,
        env: Mapping[str, object] | None = None,
        timeout: float = 120.0,
    ) -> None:
        if num_workers < 1:
            raise InvalidArgumentError(
                "`num_workers` is less than 1.",
                received={"num_workers": num_workers},
                hint="Pass at least one worker, for example: num_workers=2",
            )
        check_backend(backend)
        self.num_workers = num_workers
        self.backend = backend
        self.broken = False
        self.has_failed = False  # whether a function has failed in any worker
        self._timeout = timeout
        extra = {**_THREADS, **{name: str(value) for name, value in (env or {}).items()}}
        plan = plan_job(num_workers, backend=backend, extra=extra, creates_secret=False)
        self._job_id = plan.job_id
        self._members: list[_Member] = []
        plan.release_ports()
        try:
            for worker in plan.workers:
                self._members.append(_Member(worker.name, worker.environ, self._start))
        except BaseException:
            self.close()
            raise

    def _start(
        self, environ: Mapping[str, str], output: IO[bytes], connection: int
    ) -> subprocess.Popen[bytes]:
        """Starts a worker that reads calls from a connection. kdist's own tests override this method."""
        command = shipping.worker_command("kdist.testing.pool_worker", str(connection))
        return subprocess.Popen(
            start_command(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[connection],
            start_new_session=True,
        )

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Runs a function in all workers at once and waits for all of them.

        Args:
            fn: The function, which is sent with `cloudpickle`.
            *args: The positional arguments of the function, the same for all workers.
            timeout: Seconds to wait for all workers; by default the timeout of the pool.
            **kwargs: The keyword arguments of the function, the same for all workers.

        Returns:
            A list with one result per worker, in the order of the workers.

        Raises:
            WorkerFailure: If the function fails in a worker. The message contains the traceback of each
                failed worker. You can use the pool again if all workers have answered.
            PoolTimeoutError: If a worker does not answer in time. All workers of the pool are terminated.
        """
        if self.broken:
            raise InvalidArgumentError(
                "This WorkerPool is closed, or has lost a worker.", hint="Create a new WorkerPool."
            )
        timeout = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        call = shipping.pack_call(fn, args, kwargs, sys.path)
        # In the order of arrival; `None` if the worker has died.
        answers: dict[int, shipping.Result | None] = {}
        with selectors.DefaultSelector() as selector:
            for index, member in enumerate(self._members):
                member.send(call, deadline)
                selector.register(member.connection, selectors.EVENT_READ, index)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    try:
                        answer = self._members[key.data].take()
                        if answer is None:
                            continue
                    except EOFError:
                        answer = None
                    selector.unregister(key.fileobj)
                    answers[key.data] = answer
                    if answer is None or not answer.ok:
                        deadline = min(deadline, time.monotonic() + _AFTER_FAILURE)
                if time.monotonic() >= deadline:
                    break
        self._raise_if_bad(answers, timeout)
        return [answers[index].value() for index in range(self.num_workers)]  # type: ignore[union-attr]

    def _raise_if_bad(self, answers: Mapping[int, shipping.Result | None], timeout: float) -> None:
        failed = [index for index, answer in answers.items() if answer is None or not answer.ok]
        silent = [index for index in range(self.num_workers) if index not in answers]
        if not failed and not silent:
            return
        self.has_failed = True
        stacks = self._stacks(silent)
        reports = "\n".join([*(self._describe(index, answers[index]) for index in failed), *stacks])
        if silent or None in answers.values():
            self.close()
        if not failed:
            names = ", ".join(f"worker {index}" for index in silent)
            raise PoolTimeoutError(
                f"Some workers did not respond within {timeout:g} s: {names}.",
                hint=f"Read their stacks, or pass a larger timeout:\n{reports}",
            )
        error = WorkerFailure(
            f"worker {failed[0]} failed first.", hint=f"Read the tracebacks of the workers:\n{reports}"
        )
        error.worker_index = failed[0]  # type: ignore[attr-defined]
        first = answers[failed[0]]
        raise error from (None if first is None else first.exception())

    def _describe(self, index: int, result: shipping.Result | None) -> str:
        if result is not None:
            return f"──── worker {index} ────\n{result.traceback}"
        member = self._members[index]
        lines = report.last_traceback(member.output(), report.MOST_LINES)
        return "\n".join([f"──── worker {index} {member.exit_text()} ────", *lines])

    def _stacks(self, silent: list[int]) -> list[str]:
        """Makes the workers that have not answered print their stacks, and returns the stacks."""
        for index in silent:
            linux.send(self._members[index].process.pid, signal.SIGUSR1)
        if silent:
            time.sleep(0.5)
        return [
            "\n".join([f"──── stack of worker {i} ────", *shipping.last_stacks(self._members[i].output())])
            for i in silent
        ]

    @property
    def pids(self) -> list[int]:
        """The process IDs of the workers, in their order."""
        return [member.process.pid for member in self._members]

    def close(self) -> None:
        """Terminates the workers and all processes that they have started. You can call it twice."""
        self.broken = True
        for member in self._members:
            member.connection.close()  # an idle worker then exits by itself
        deadline = time.monotonic() + 3.0
        for signum, patience in ((None, 0.3), (signal.SIGTERM, 0.3), (signal.SIGKILL, 2.0)):
            until = min(deadline, time.monotonic() + patience)
            while (left := self._left()) and time.monotonic() < until:
                if signum is not None:
                    for pid in left:
                        linux.send(pid, signum)
                time.sleep(0.02)
        for member in self._members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(timeout=1.0)
            member.close()

    def _left(self) -> set[int]:
        alive = [member.process.pid for member in self._members if member.process.poll() is None]
        return {*alive, *linux.descendants(alive), *linux.members_of_job(self._job_id)}

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "broken", True):
            self.close()
