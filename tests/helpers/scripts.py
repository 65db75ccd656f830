"""Runs scripts in separate processes, for one or several workers.

A script that runs a backend is forked from a process that has already imported it (`zygote.py`). To run
functions in kept workers, see `processes.py`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdist.testing import free_ports
from tests.helpers.environment import clean_environment
from tests.helpers.processes import BACKENDS, TIMEOUT
from tests.helpers.zygote import Forked, zygote
from tests.helpers.zygote_process import STACKS

# The command of a job: `Script(folder, name, source, env, (*RUN, "-n", "2"))`.
RUN = (sys.executable, "-m", "kdist", "run")
# Trains for minutes on all workers; each prints "TRAINS INDEX PID ". `STEP_SECONDS` makes steps longer.
TRAINS = """
import os, time
import numpy as np
import kdist, keras

class Note(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            print(f"TRAINS {strategy.runtime.worker_index} {os.getpid()} ", flush=True)
            # and then
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))

strategy = kdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.RandomState(0).rand(4000, 3)
model.fit(x, x[:, :1], batch_size=4, epochs=1000, verbose=0, callbacks=[Note()])
print("FINISHED", flush=True)
"""


class Script:
    """A process that runs a Python script, with its output in files.

    Args:
        folder: The directory of the script and its output, and its working directory.
        name: The name of the files.
        source: The script.
        env: Environment variables in addition to a clean shell. If they contain `KERAS_BACKEND`, and there is
            no `command`, the script runs in a fork of a process that has already imported this backend.
        command: The command that runs the script; by default this Python.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        source: str,
        env: Mapping[str, str],
        command: Sequence[str] = (),
    ) -> None:
        path = folder / f"{name}.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        environment = clean_environment() | env
        self.process: subprocess.Popen[bytes] | Forked
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            if not command and (backend := env.get("KERAS_BACKEND")) in (*BACKENDS, "numpy"):
                forks_from = zygote(backend, plain="kdist" not in source or backend not in BACKENDS)
                self.process = forks_from.fork(environment, out, err, path)
            else:
                self.process = subprocess.Popen(
                    [*(command or [sys.executable]), str(path)],
                    stdout=out,
                    stderr=err,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    cwd=folder,
                )

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Waits for the end, and returns the exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            if isinstance(self.process, Forked):
                self.process.send_signal(STACKS)
                time.sleep(2)  # time to write the stacks
            raise AssertionError(
                f"Not finished within {timeout:g} s:\n{self.stdout()}\n{self.stderr()}"
            ) from None

    def finish(self, timeout: float = TIMEOUT, code: int = 0) -> Script:
        """Waits for the end, checks the exit code, and returns the ended script."""
        with self:
            found = self.wait(timeout)
        assert found == code, f"exit code {found}, expected {code}\n{self.output()}"
        return self

    def told(self, after: str = "") -> Any:
        """Returns the JSON in the last line of the output, or after a text that one line contains."""
        lines = self.stdout().splitlines()
        if after:
            (line,) = [line.partition(after)[2] for line in lines if after in line]
        else:
            line = lines[-1]
        return json.loads(line)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def wait_for(self, text: str, timeout: float = TIMEOUT) -> None:
        """Waits until the script has printed a text."""
        deadline = time.monotonic() + timeout
        while text not in self.stdout():
            assert self.process.poll() is None, self.stdout() + self.stderr()
            assert time.monotonic() < deadline, self.stdout() + self.stderr()
            time.sleep(0.02)

    @property
    def exit_code(self) -> int | None:
        """The exit code, or `None` while the script runs."""
        return self.process.poll()

    @property
    def ended_at(self) -> float:
        """The time when a forked process ended, by `time.monotonic()`."""
        assert isinstance(self.process, Forked)
        return self.process.ended_at

    def stdout(self) -> str:
        """Returns the stdout so far."""
        return self._out.read_text(encoding="utf-8", errors="replace")

    def stderr(self) -> str:
        """Returns the stderr so far."""
        return self._err.read_text(encoding="utf-8", errors="replace")

    def output(self) -> str:
        """Returns the stdout and stderr so far."""
        return self.stdout() + self.stderr()

    def kill(self) -> None:
        """Kills the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def run_python(
    *command: str, cwd: Path | None = None, timeout: float = 120, code: int | None = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a new Python with these arguments in a clean environment, and returns the ended process.

    Args:
        *command: The arguments of Python.
        cwd: The working directory.
        timeout: In seconds.
        code: The expected exit code, or `None` for any.
        **env: Environment variables in addition to a clean shell.
    """
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=clean_environment() | env, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def wait_until(is_true: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for a condition, and fails after some seconds."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)


def tf_config(addresses: Sequence[str], index: int, **task: Any) -> str:
    """Returns the value of `TF_CONFIG` for one worker."""
    return json.dumps(
        {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index} | task}
    )


def local_addresses(number: int) -> list[str]:
    """Returns addresses of this machine with free ports."""
    return [f"127.0.0.1:{port}" for port in free_ports(number)]


def environments_of(backend: str, addresses: Sequence[str] | int = 2, **env: str) -> list[dict[str, str]]:
    """Returns the environment of each worker of a cluster on this machine. `RANK_HERE` is the worker's index.

    Args:
        backend: The backend of all workers.
        addresses: The addresses of the workers, or the number of workers.
        **env: More environment variables.
    """
    if isinstance(addresses, int):
        addresses = local_addresses(addresses)
    return [
        {"KERAS_BACKEND": backend, "TF_CONFIG": tf_config(addresses, index), "RANK_HERE": str(index), **env}
        for index in range(len(addresses))
    ]


@contextlib.contextmanager
def started(
    folder: Path, source: str, environments: Iterable[Mapping[str, str]], command: Sequence[str] = ()
) -> Iterator[list[Script]]:
    """Runs a script in each environment, as "worker0", "worker1" and so on, and kills them at the end."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Script(folder, f"worker{index}", source, env, command))
            for index, env in enumerate(environments)
        ]


def finished(
    folder: Path, source: str, environments: Iterable[Mapping[str, str]], timeout: float = TIMEOUT
) -> list[Script]:
    """Runs a script in all environments at once, and returns the scripts after all have ended with 0."""
    with started(folder, source, environments) as scripts:
        return [script.finish(timeout) for script in scripts]
