"""Runs the demo and the launcher's tests against the kdist of an environment: `make test-dist`.

    PYTHON tests/release/outside.py [BACKEND]

runs them with PYTHON from a copy of the tests in an empty directory, so that Python cannot import the
checkout. This file needs only the standard library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The files that the tests of the launcher need from the tree.
COPIED = ("tests", "pyproject.toml")
WHERE = "import kdist; print(kdist.__file__)"


def run(python: str, folder: Path, backend: str) -> None:
    """Runs the demo and the tests; their output goes to this process's output.

    Args:
        python: The Python of the environment.
        folder: An empty directory outside the checkout.
        backend: The backend of the environment.

    Raises:
        SystemExit: Python imports kdist from the checkout, or something failed.
    """
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}

    def call(*command: str) -> str:
        print("$", *command, flush=True)
        done = subprocess.run(
            [*command], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=False
        )
        print(done.stdout, flush=True)
        if done.returncode:
            raise SystemExit(f"It ended with {done.returncode}: {' '.join(command)}")
        return done.stdout

    if Path(call(python, "-c", WHERE).strip()).is_relative_to(ROOT / "kdist"):
        raise SystemExit(f"The kdist of this Python is that of the checkout: {python}")
    call(str(Path(python).with_name("kdist")), "demo", "--backend", backend, "--num-workers", "2")
    call(
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/launch",
        "-k",
        backend_of_tests(backend),
    )


def backend_of_tests(backend: str) -> str:
    """Returns an expression for pytest's `-k` that selects the tests without another backend."""
    return " and ".join(f"not [{other}" for other in ("tensorflow", "jax", "torch") if other != backend)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="kdist-outside-") as place:
        run(sys.executable, Path(place), sys.argv[1] if sys.argv[1:] else "jax")
