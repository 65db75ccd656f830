"""All doctest examples in kdist's docstrings run, and almost every module of `kdist.cluster` has examples."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import kdist.cluster
import kdist.launch
import kdist.testing
from tests.helpers.environment import ROOT
from tests.helpers.processes import run

# The number of example lines in the source of each module.
EXAMPLES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): number
    for path in sorted((ROOT / "kdist").rglob("*.py"))
    if (number := sum(line.lstrip().startswith(">>> ") for line in path.read_text("utf-8").splitlines()))
}
# Modules that import Keras. This process must not import Keras.
NEED_KERAS = ("kdist.collectives", "kdist.data.numpy_dataset", "kdist.strategies.visualization")
MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (kdist.cluster, kdist.launch, kdist.testing)
    for module in pkgutil.iter_modules(package.__path__)
    if not module.ispkg and not module.name.startswith("_")
]


def results_of(name):
    found = doctest.testmod(importlib.import_module(name))
    return found.failed, found.attempted


@pytest.mark.kills(
    example_says_something_else="[kdist.launch.report]", example_without_an_example="[kdist.launch.report]"
)
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in NEED_KERAS])
def test_examples(name):
    assert results_of(name) == (0, EXAMPLES[name]), "failed and run, against the lines that are written"


def test_examples_that_need_keras():
    found = run("torch", 1, lambda names: [results_of(name) for name in names], NEED_KERAS)[0]
    assert found == [(0, EXAMPLES[name]) for name in NEED_KERAS]


def test_the_package_explains_itself_with_examples():
    # Docstrings show examples for helpers, such as parsers of addresses; the pages show examples for strategies.
    assert len(EXAMPLES) >= 30 and sum(EXAMPLES.values()) >= 130
    # Modules that contain only errors, protocols, connections or the network interfaces of the machine.
    silent = {"errors", "sources", "handshake", "interfaces"}
    in_cluster = {name.rpartition(".")[2] for name in MODULES if name.startswith("kdist.cluster.")}
    assert in_cluster - silent == {
        name.rpartition(".")[2] for name in EXAMPLES if name.startswith("kdist.cluster.")
    }


@pytest.mark.parametrize("name", MODULES)
def test_modules_say_what_they_are(name):
    assert importlib.import_module(name).__doc__


@pytest.mark.parametrize("name", [name for name in MODULES if "testing" not in name])
def test_public_functions_are_documented(name):
    module = importlib.import_module(name)
    for public, value in vars(module).items():
        if not public.startswith("_") and getattr(value, "__module__", None) == name and callable(value):
            assert value.__doc__, f"{name}.{public}"
