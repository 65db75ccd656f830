"""`make matrix` runs a part of the contract with the oldest and the newest versions, each in a new environment.

`nox --list` lists the environments. `nox -s contract-newest -- --full` runs every cell. nox skips Python versions that
it cannot find, unless you pass `--error-on-missing-interpreters`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from tests.versions import ENVIRONMENTS, Environment  # noqa: E402

# Otherwise, pyenv offers only one of its versions.
os.environ.setdefault("PYENV_VERSION", "3.11:3.12:3.13")
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
TESTING = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
CONTRACT = "tests/contract_multi_process_test.py"


def declare(environment: Environment) -> None:
    """Creates the nox session of an environment."""

    @nox.session(name="contract-" + environment.name.replace(" ", "-"), python=environment.python)
    def contract(session: nox.Session) -> None:
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        kept = [pin for pin in pins if environment.pinned or pin.startswith(("torch", "pytest"))]
        folder = Path(session.virtualenv.location)  # `create_tmp` would send all temporary files there
        constraints = folder / "constraints.txt"
        constraints.write_text(
            "\n".join(pin for pin in kept if not (environment.alone and pin.startswith("keras")))
        )
        session.install("-c", str(constraints), *environment.packages, *TESTING)
        if environment.alone:
            # The nightly version has a different package name, and TensorFlow has also installed `keras`.
            session.run("python", "-m", "pip", "uninstall", "--yes", "keras")
            session.install("--force-reinstall", "--no-deps", "--pre", environment.alone)
        results = str(folder / "results.json")
        chosen = " or ".join(environment.backends)
        command = ("-m", "pytest", "-n", "2", "--dist", "loadgroup", CONTRACT, "-k", chosen)
        notes = not session.posargs  # runs with other options are not recorded on the page
        # Older versions of XLA do not support the flags that make the tests faster.
        session.run(
            "python", *command, "--contract-results", results, *session.posargs,
            env={"XLA_FLAGS": ""}, success_codes=[0, 1] if notes else [0],
        )  # fmt: skip
        if notes:
            session.run("python", "-m", "tests.versions", environment.name, results)


for one in ENVIRONMENTS:
    declare(one)
