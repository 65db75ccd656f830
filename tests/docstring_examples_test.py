"""The examples in the docstrings of `kdist.cluster`, `kdist.launch` and `kdist.testing` run."""

import doctest
import importlib
import pkgutil

import pytest

import kdist.cluster
import kdist.launch
import kdist.testing

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (kdist.cluster, kdist.launch, kdist.testing)
    for module in pkgutil.iter_modules(package.__path__)
    if not module.ispkg and not module.name.startswith("_")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0
    assert module.__doc__


@pytest.mark.parametrize("name", [name for name in MODULES if "testing" not in name])
def test_public_functions_are_documented(name):
    module = importlib.import_module(name)
    for public, value in vars(module).items():
        if not public.startswith("_") and getattr(value, "__module__", None) == name and callable(value):
            assert value.__doc__, f"{name}.{public}"
