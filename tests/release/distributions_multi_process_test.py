"""The wheel and the sdist have the right contents, and the wheel works without a checkout."""

from __future__ import annotations

import email.message
import email.parser
import json
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kdist
from tests.helpers.environment import ROOT
from tests.mutants.run import files_of
from tests.release.conftest import Distributions, call

# The installation takes longer than the tests.
pytestmark = pytest.mark.in_turn(4)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _metadata(wheel: Path) -> tuple[email.message.Message, dict[str, str]]:
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            name.partition(".dist-info/")[2]: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    return email.parser.Parser().parsestr(texts["METADATA"]), texts


def test_the_wheel_has_the_package_and_nothing_else(distributions: Distributions) -> None:
    with zipfile.ZipFile(distributions.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {name.as_posix() for name in files_of(ROOT) if name.parts[0] == "kdist"}
    assert names == package
    assert "kdist/py.typed" in names


def test_the_sdist_has_what_the_wheel_is_built_from(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"pyproject.toml", "README.md", "LICENSE", "kdist/py.typed"}
    assert not {name for name in names if name.startswith(("tests", "docs", "tutorials", "."))}


def test_the_metadata_are_those_of_the_project(distributions: Distributions) -> None:
    metadata, texts = _metadata(distributions.wheel)
    assert metadata["Name"] == "kdist"
    assert metadata["Version"] == kdist.__version__
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert texts["licenses/LICENSE"] == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    needed = {one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one}
    assert {re.match(r"[\w-]+", one)[0] for one in needed} == {
        re.match(r"[\w-]+", one)[0] for one in PROJECT["dependencies"]
    }
    assert "kdist = kdist.command_line:main" in texts["entry_points.txt"]
    assert distributions.wheel.name == f"kdist-{kdist.__version__}-py3-none-any.whl"


WHERE = """
import json, sys, kdist, kdist.command_line
print(json.dumps([kdist.__file__, kdist.__version__, sorted({"keras", "numpy"} & {*sys.modules})]))
"""


@pytest.mark.kills("command_line_imports_numpy")
def test_the_wheel_is_what_an_environment_without_the_checkout_imports(
    installed: Path, tmp_path: Path
) -> None:
    done = call([str(installed), "-c", WHERE], tmp_path)
    assert done.returncode == 0, done.stderr
    file, version, imported = json.loads(done.stdout)
    assert Path(file).is_relative_to(installed.parents[1])
    assert version == kdist.__version__
    assert imported == [], "the command line is light"


SCRIPT = """
import os, kdist
print("worker", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.path.dirname(kdist.__file__))
"""


def test_the_installed_command_starts_workers(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = call([str(installed.with_name("kdist")), "run", "-n", "2", "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"worker (\d) of 2 (.*)", done.stdout))
    assert set(found) == {"0", "1"}
    assert all(Path(folder).is_relative_to(installed.parents[1]) for folder in found.values())


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_demo_and_the_tests_of_the_launcher_pass_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    from tests.release import outside

    outside.run(str(installed), tmp_path, "jax")
