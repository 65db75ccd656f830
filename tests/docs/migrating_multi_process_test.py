"""On the *Migrating* pages, the old scripts compile, and the new scripts train as one device does."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.environment import ROOT
from tests.helpers.processes import run
from tests.helpers.scripts import Script, environments_of

PAGES = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "migrating").glob("*.md"))
}
# TensorFlow refuses workers that join after it has made a dataset. The script of DDP sets its own backend.
BACKENDS = {"accelerate-and-ddp": "torch", "horovod": "jax", "tf-distribute": "tensorflow"}
TELLS = """
import json
print("LEARNED", json.dumps([float(v) for v in model.get_weights()[0].ravel()]))
"""
NO_STRATEGY = """
import contextlib, types
strategy = types.SimpleNamespace(scope=contextlib.nullcontext)
"""
SEED = "import keras\nkeras.utils.set_random_seed(7)\n"


def script(page: str, side: str) -> str:
    """Returns the script before ("-") or after ("+") the change."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line or line[0] in f" {side}")


def test_each_page_has_a_script() -> None:
    assert {*PAGES} == {*BACKENDS}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("side", ["-", "+"])
def test_both_compile(page: str, side: str) -> None:
    compile(script(page, side), page, "exec")
    assert ("kdist" in script(page, side)) == (side == "+")


def plain(page: str) -> str:
    """Returns the new script without kdist, as it runs on one device."""
    code = script(page, "+")
    if page == "tf-distribute":  # its custom loop, with the same steps by `train_on_batch`
        code = """
import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(250, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")
for _ in range(5):
    for i in range(0, 250, 64):
        weights = np.full(len(x[i : i + 64]), len(x[i : i + 64]) / 64)  # the page divides by the whole batch
        model.train_on_batch(x[i : i + 64], y[i : i + 64], sample_weight=weights)
"""
    return code.replace("import kdist\n", "").replace(
        "strategy = kdist.MultiWorkerMirroredStrategy()", NO_STRATEGY
    )


@pytest.mark.kills(gradients_halved="[accelerate-and-ddp-torch]")
@pytest.mark.parametrize(("page", "backend"), BACKENDS.items())
@pytest.mark.in_turn(3)
def test_two_workers_learn_what_one_device_learns(page: str, backend: str, tmp_path: Path) -> None:
    first, second = environments_of(backend)
    scripts = {
        "worker0": (script(page, "+"), first),
        "worker1": (script(page, "+"), second),
        "plain": (plain(page), {"KERAS_BACKEND": backend}),
    }
    with contextlib.ExitStack() as cleanup:
        started = []
        for name, (code, env) in scripts.items():
            (tmp_path / name).mkdir()
            # kdist shuffles a DataLoader by its own seed.
            code = SEED + code.replace("shuffle=True", "shuffle=False") + TELLS
            started.append(cleanup.enter_context(Script(tmp_path / name, name, code, env)))
        kernels = [np.array(one.finish().told("LEARNED ")) for one in started]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    np.testing.assert_allclose(kernels[0], kernels[2], rtol=1e-5, atol=1e-6)
    assert page == "tf-distribute" or (tmp_path / "worker0" / "model.keras").is_file()


def in_worker_missing(names: list[str]) -> list[str]:
    missing = []
    for name in names:
        value = importlib.import_module("kdist")
        for part in name.split(".")[1:]:
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{value.__name__}.{part}")
            value = getattr(value, part, None)
        missing += [name] * (value is None)
    return missing


@pytest.mark.kills("migrating_to_a_name_that_is_gone")
def test_names_of_kdist_are_there() -> None:
    names = sorted(set(re.findall(r"\bkdist(?:\.[A-Za-z_]\w*)+", "".join(PAGES.values()))))
    assert len(names) > 15
    assert run("torch", 1, in_worker_missing, names) == [[]]
