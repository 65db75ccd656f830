"""Worker processes that the test modules share, and scripts in processes of their own.

The pytest process imports no framework: a module that needs one runs functions in a `WorkerPool`. A pool is
kept for the next test of the same backend and number of workers, since importing a framework takes seconds.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kdist.testing import WorkerPool, free_ports

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = ("tensorflow", "jax", "torch")
# A first step may have to compile on a busy machine; a hang is cut off here, with all stacks printed.
TIMEOUT = 180.0

# In the order of the backends, so that a pool is started once a module; with pytest-xdist, in one process.
each_backend = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.xdist_group(f"pool-{name}")) for name in BACKENDS],
    scope="module",
)

_pools: dict[tuple[str, int], WorkerPool] = {}
_MOST_POOLS = 2


def run(
    backend: str, num_workers: int, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT
) -> list[Any]:
    """Runs a function in all workers of the pool of a backend; returns one result a worker.

    The workers have their strategies already: with one worker, a `MirroredStrategy` on two CPU devices and one
    on three, else a `MultiWorkerMirroredStrategy`; see `strategy`. After a failure the pool is thrown away.
    """
    key = (backend, num_workers)
    try:
        if key not in _pools:
            while len(_pools) >= _MOST_POOLS:
                _pools.pop(next(iter(_pools))).close()
            _pools[key] = WorkerPool(num_workers, backend, timeout=TIMEOUT)
            _pools[key].run(_prepare, timeout=TIMEOUT)
        return _pools[key].run(_fresh, fn, *args, timeout=timeout)
    except BaseException:
        if key in _pools:
            _pools.pop(key).close()
        raise


def _fresh(fn: Callable[..., Any], *args: Any) -> Any:
    import keras

    keras.utils.clear_session(free_memory=False)  # to collect garbage takes longer than many a test
    return fn(*args)


_in_worker: dict[int, Any] = {}


def strategy(num_replicas: int = 2) -> Any:
    """In a worker of a pool: its strategy, made at the first call, before anything is computed.

    Args:
        num_replicas: 2 or 3; with several workers there is one strategy only.
    """
    import kdist

    if not _in_worker:
        if int(os.environ["WORLD_SIZE"]) == 1:
            for number in (3, 2):  # devices cannot be added later
                _in_worker[number] = kdist.MirroredStrategy([f"cpu:{i}" for i in range(number)])
        else:
            joined = kdist.MultiWorkerMirroredStrategy()
            _in_worker[joined.num_replicas_in_sync] = joined
    return _in_worker[num_replicas] if num_replicas in _in_worker else next(iter(_in_worker.values()))


def _prepare() -> None:
    strategy()  # not returned: a strategy cannot be pickled
    gc.collect()
    gc.freeze()  # the frameworks' own objects stay; else each collection would look at all of them


atexit.register(lambda: [pool.close() for pool in _pools.values()])


class Script:
    """A Python process that runs a script, with its output in files.

    Args:
        folder: Where the script and its output are written.
        name: Of the files.
        source: The script.
        env: Environment variables beyond those of a clean shell.
        command: What runs the script; by default this Python.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        source: str,
        env: Mapping[str, str],
        command: Sequence[str] = (sys.executable,),
    ) -> None:
        path = folder / f"{name}.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(
                [*command, str(path)],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=clean_environment() | env,
                cwd=folder,
            )

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Waits for the end; returns the exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"Not finished within {timeout:g} s:\n{self.stdout()}\n{self.stderr()}"
            ) from None

    def wait_for(self, text: str, timeout: float = TIMEOUT) -> None:
        """Waits until the script has printed something."""
        deadline = time.monotonic() + timeout
        while text not in self.stdout():
            assert self.process.poll() is None, self.stdout() + self.stderr()
            assert time.monotonic() < deadline, self.stdout() + self.stderr()
            time.sleep(0.02)

    def stdout(self) -> str:
        """What it has printed so far."""
        return self._out.read_text(encoding="utf-8", errors="replace")

    def stderr(self) -> str:
        """What it has written to stderr so far."""
        return self._err.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Ends the process if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def clean_environment() -> dict[str, str]:
    """This process's environment without what describes a backend or a cluster, on few threads."""
    described = (
        "KERAS_",
        "TF_CONFIG",
        "SLURM_",
        "OMPI_",
        "PMI_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "KDIST_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(described)}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONUNBUFFERED": "1",
    }


def tf_config(addresses: Sequence[str], index: int, **task: Any) -> str:
    """The value of `TF_CONFIG` for one worker."""
    return json.dumps(
        {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index} | task}
    )


def local_addresses(number: int) -> list[str]:
    """Addresses of this machine whose ports are free."""
    return [f"127.0.0.1:{port}" for port in free_ports(number)]
