"""Provides the fixtures `distributions` (wheel and sdist) and `installed` (an environment with the wheel)."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.environment import ROOT, clean_environment
from tests.mutants.run import copy_of

# Otherwise each process of pytest-xdist would build them.
GROUP = pytest.mark.xdist_group("release")


@dataclass(frozen=True)
class Distributions:
    """The files that `make dist` builds."""

    wheel: Path
    sdist: Path


def call(command: list[str], folder: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs a command outside the checkout; the caller checks the exit code."""
    environ = clean_environment()
    del environ["PYTHONPATH"]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout, check=False
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(GROUP)


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Builds the sdist in a copy of the tree, and the wheel from the sdist, with the installed setuptools."""
    folder = tmp_path_factory.mktemp("dist")
    with copy_of(ROOT) as copy:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(copy)]
        done = call(command, copy)
        assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Distributions(wheel, sdist)


@pytest.fixture(scope="session")
def installed(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of an environment with kdist from the wheel, and all other packages from here."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps"]
    done = call([*command, str(distributions.wheel)], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    # Python ignores path files in a directory that a path file names, so a kdist in development is not found.
    others = folder / "lib" / version / "site-packages" / "others.pth"
    others.write_text(os.path.dirname(os.path.dirname(pytest.__file__)) + "\n", encoding="utf-8")
    return python
