"""Runs modules of kdist's own commands on several workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kdist.errors import LaunchError


def run_module(
    module: str, backend: str | None, num_workers: int, result: Path, *arguments: str
) -> dict[str, Any]:
    """Runs a module with `kdist run`, and returns the JSON content that it wrote to the file `result`.

    With 0 workers, runs it in a single process without the variables of a cluster.

    Raises:
        LaunchError: If the module fails. Its output has already been printed.
    """
    command, environment = [sys.executable], dict(os.environ)
    if num_workers:
        command += ["-m", "kdist", "run", "--num-workers", str(num_workers)]
        command += ["--backend", backend] if backend else []
    elif backend:
        environment["KERAS_BACKEND"] = backend
    command += ["-m", module, "--result", str(result), *arguments]
    code = subprocess.run(command, check=False, env=environment).returncode
    if code != 0:
        raise LaunchError(
            "The training run failed.",
            received={"exit_code": code},
            hint="Read the error of the worker above.",
        )
    return json.loads(result.read_text())
