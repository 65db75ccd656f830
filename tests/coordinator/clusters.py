"""Helpers that run clusters of real processes: workers, parameter servers, and a coordinator's script."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.scripts import Script, local_addresses

_SERVER = """
    import faulthandler, signal
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import kdist

    resolver = kdist.cluster_resolver.TFConfigClusterResolver()
    server = kdist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    print("ready", flush=True)
    server.join()
"""
_COORDINATOR = """
    import faulthandler
    faulthandler.dump_traceback_later({timeout}, exit=True)
    import json, os, signal, sys, time
    import numpy as np
    import kdist, keras

    def tell(**facts):
        print("facts", json.dumps(facts), flush=True)
"""


class Cluster:
    """Runs the tasks of one job on this machine, as processes whose scripts wait in `kdist.Server`.

    Args:
            backend: The Keras backend of the tasks.
            folder: The directory for scripts and output.
            num_workers: The number of workers.
            num_ps: The number of servers.
        server: The script of workers and servers.
    """

    def __init__(
        self, backend: str, folder: Path, num_workers: int = 2, num_ps: int = 2, server: str = _SERVER
    ) -> None:
        self.backend = backend
        self._server = server
        self.folder = folder
        addresses = local_addresses(1 + num_workers + num_ps)
        self.spec = {
            "chief": addresses[:1],
            "worker": addresses[1 : 1 + num_workers],
            "ps": addresses[1 + num_workers :],
        }
        self.tasks: dict[tuple[str, int], Script] = {}
        self._number = 0

    def start(self, *without: tuple[str, int]) -> None:
        """Starts all workers and servers except the given tasks."""
        for job in ("ps", "worker"):
            for index in range(len(self.spec[job])):
                if (job, index) not in without:
                    self.start_task(job, index)

    def start_task(self, job: str, index: int) -> None:
        """Starts or restarts one task."""
        self.tasks[job, index] = self._script(f"{job}{index}", self._server, job, index)

    def coordinate(self, source: str, timeout: float = 120.0) -> Script:
        """Starts the coordinator; its script can use `tell`, NumPy, Keras and kdist without imports."""
        head = textwrap.dedent(_COORDINATOR.format(timeout=timeout))
        return self._script("chief", head + textwrap.dedent(source), "chief", 0)

    def kill(self, job: str, index: int) -> None:
        """Kills a task."""
        self.tasks[job, index].kill()

    def close(self) -> None:
        """Terminates all tasks."""
        for task in self.tasks.values():
            task.kill()

    def _script(self, name: str, source: str, job: str, index: int) -> Script:
        self._number += 1
        config = {"cluster": self.spec, "task": {"type": job, "index": index}}
        env = {
            "KERAS_BACKEND": self.backend,
            "TF_CONFIG": json.dumps(config),
            "KDIST_CLUSTER_TOKEN": "a secret",
        }
        script = Script(self.folder, f"{name}-{self._number}", source, env)
        if job == "chief":
            self.tasks[job, index] = script
        return script


def run_roles(folder: Path, source: str, backend: str) -> dict[str, Script]:
    """Runs a script as chief, worker and evaluator; returns the scripts after all have exited with 0."""
    chief, worker = local_addresses(2)
    spec = {"chief": [chief], "worker": [worker]}
    with contextlib.ExitStack() as cleanup:
        scripts = {}
        for role in ("chief", "worker", "evaluator"):
            task = {"cluster": spec, "task": {"type": role, "index": 0}}
            env = {"KERAS_BACKEND": backend, "TF_CONFIG": json.dumps(task)}
            scripts[role] = cleanup.enter_context(Script(folder, role, source, env))
        return {role: script.finish() for role, script in scripts.items()}


@contextlib.contextmanager
def cluster(backend: str, folder: Path, num_workers: int = 2, num_ps: int = 2) -> Iterator[Cluster]:
    """Starts a cluster, and terminates its tasks at the end of the block."""
    found = Cluster(backend, folder, num_workers, num_ps)
    try:
        found.start()
        yield found
    finally:
        found.close()


def facts(script: Script) -> list[dict[str, object]]:
    """Returns the facts that a coordinator has printed, in order."""
    lines = script.stdout().splitlines()
    return [json.loads(line.removeprefix("facts ")) for line in lines if line.startswith("facts ")]
