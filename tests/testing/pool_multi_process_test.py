"""`WorkerPool` and the leak checks. Every wait has a timeout."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from kdist.errors import BackendError, InvalidArgumentError
from kdist.launch.linux import process_table
from kdist.testing import (
    PoolTimeoutError,
    WorkerFailure,
    WorkerPool,
    Workers,
    check,
    free_ports,
    no_leaks,
    snapshot,
)
from tests.helpers.scripts import wait_until

TIMEOUT = 30.0


def rank():
    return int(os.environ["RANK"])


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2, env={"KDIST_TEST": "x"}, timeout=TIMEOUT) as workers:
        yield workers


def test_results_in_order_and_state_is_kept(pool):
    assert pool.run(lambda a, b=0: (rank(), a, b), 1, b=2) == [(0, 1, 2), (1, 1, 2)]

    def remember():
        os.environ["KDIST_STATE"] = str(os.getpid())

    pool.run(remember)
    assert all(same for same in pool.run(lambda: os.environ["KDIST_STATE"] == str(os.getpid())))


def test_threads_are_few_and_variables_set(pool):
    names = [
        "OMP_NUM_THREADS",
        "TF_NUM_INTRAOP_THREADS",
        "TF_NUM_INTEROP_THREADS",
        "KDIST_TEST",
        "WORLD_SIZE",
    ]
    assert pool.run(lambda: [os.environ[name] for name in names]) == [["1", "1", "2", "x", "2"]] * 2


def test_large_values_travel(pool):
    assert [len(value) for value in pool.run(lambda data: data * 2, b"x" * 3_000_000)] == [6_000_000] * 2


def test_workers_run_at_the_same_time(pool):
    port = free_ports(1)[0]

    def meet():
        if rank() == 0:
            with socket.create_server(("127.0.0.1", port)) as server:
                server.settimeout(10)
                return server.accept()[0].recv(2)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(b"hi")
                    break
            except OSError:
                time.sleep(0.02)
        return None

    assert pool.run(meet) == [b"hi", None]


def test_failures_of_all_workers_are_listed(pool):
    def fail():
        time.sleep(0.2 * (1 - rank()))
        raise KeyError(f"in {rank()}")

    with pytest.raises(WorkerFailure, match="worker 1 failed first") as info:
        pool.run(fail)
    assert "KeyError: 'in 0'" in str(info.value) and "KeyError: 'in 1'" in str(info.value)
    assert info.value.__cause__.args == ("in 1",) and info.value.worker_index == 1
    assert pool.run(rank) == [0, 1]  # the pool still works


def test_sys_exit_is_a_failure(pool):
    with pytest.raises(WorkerFailure, match="SystemExit"):
        pool.run(lambda: sys.exit(0))
    assert pool.run(rank) == [0, 1]


def test_timeout_shows_every_workers_stack():
    def stuck_here():
        if rank() == 1:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
            time.sleep(100)

    with no_leaks(), WorkerPool(2, timeout=TIMEOUT) as workers:
        workers.run(rank)  # excludes the startup from the measured time
        start = time.monotonic()
        with pytest.raises(PoolTimeoutError, match="did not respond within .* s: worker 1") as info:
            workers.run(stuck_here, timeout=1.0)
        assert time.monotonic() - start < 8
        assert "in stuck_here" in str(info.value)
        with pytest.raises(InvalidArgumentError, match="closed"):
            workers.run(rank)


def is_running(pid):
    # The process that adopts an orphan may take some time to collect its exit code. Until then it is a
    # zombie.
    return process_table().get(pid, (0, "Z"))[1] != "Z"


def wait_for_the_end_of(pids):
    pids = list(pids)
    wait_until(lambda: not any(map(is_running, pids)), 20)


def test_orphans_are_ended_too():
    def leave_an_orphan():
        sleeper = "[sys.executable, '-c', 'import time; time.sleep(60)']"
        quiet = "stdout=-3, stderr=-3, start_new_session=True"
        code = f"import subprocess, sys; print(subprocess.Popen({sleeper}, {quiet}).pid)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return int(done.stdout)

    with WorkerPool(1, timeout=TIMEOUT) as workers:
        (orphan,) = workers.run(leave_an_orphan)
        assert is_running(orphan)
    wait_for_the_end_of([orphan])


def test_a_worker_that_dies(monkeypatch, tmp_path):
    monkeypatch.setattr("kdist.testing.pool._AFTER_FAILURE", 0.5)
    reached = tmp_path / "reached"

    def die():
        if rank() == 1:
            reached.touch()
        else:
            while not reached.exists():
                time.sleep(0.01)
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 9)
        time.sleep(100)

    with no_leaks(), WorkerPool(2, timeout=TIMEOUT) as workers:
        with pytest.raises(WorkerFailure, match="worker 0 failed first") as info:
            workers.run(die)
    for part in ("SIGKILL", "last words", "stack of worker 1", "in die"):
        assert part in str(info.value)


def test_workers_end_with_the_test_process():
    code = (
        "import os, sys; from kdist.testing import WorkerPool\n"
        "pool = WorkerPool(2); print(*pool.run(os.getpid), flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    pids = done.stdout.split()
    assert len(pids) == 2, done.stderr
    wait_for_the_end_of(map(int, pids))


def test_kept_workers_are_those_of_the_backend_of_now(monkeypatch):
    with Workers() as workers:
        for backend in ("jax", "torch", "jax"):
            monkeypatch.setenv("KERAS_BACKEND", backend)
            assert workers(1).run(os.getenv, "KERAS_BACKEND") == [backend]
        assert workers(1) is workers(1, "JAX") and len(workers.pids) == 2


def test_wrong_arguments():
    with pytest.raises(BackendError):
        WorkerPool(1, backend="nosuch")
    with pytest.raises(InvalidArgumentError):
        WorkerPool(0)


def test_leaks_are_listed(monkeypatch):
    before = snapshot()
    stop = threading.Event()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    thread = threading.Thread(target=stop.wait, args=(60,), name="forgotten")
    thread.start()
    monkeypatch.setenv("KDIST_FORGOTTEN", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            with pytest.raises(AssertionError) as info:
                check(before, settle=0.2)
        finally:
            process.kill()
            process.wait(10)
            stop.set()
            thread.join(10)
        port = server.getsockname()[1]
    for part in (
        f"process {process.pid}",
        "time.sleep(60)",
        "'forgotten'",
        f"port {port}",
        "KDIST_FORGOTTEN",
    ):
        assert part in str(info.value)
    monkeypatch.delenv("KDIST_FORGOTTEN")
    check(before)
