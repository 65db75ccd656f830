"""The scripts of *Migrating*: what stands there before compiles, and what comes out trains as one device does."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from tests.environment import ROOT
from tests.processes import Script, local_addresses, run, tf_config

PAGES = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "migrating").glob("*.md"))
}
# TensorFlow refuses workers that join after it has made a dataset; the script of DDP says itself that it is PyTorch's.
BACKENDS = {"accelerate-and-ddp": "torch", "horovod": "jax", "tf-distribute": "tensorflow"}
TELLS = """
import json
print("LEARNED", json.dumps([float(v) for v in model.get_weights()[0].ravel()]), strategy.num_replicas_in_sync)
"""


def script(page: str, side: str) -> str:
    """The script before ("-") or after ("+") the change."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line or line[0] in f" {side}")


def test_each_page_has_a_script() -> None:
    assert {*PAGES} == {*BACKENDS}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("side", ["-", "+"])
def test_both_compile(page: str, side: str) -> None:
    compile(script(page, side), page, "exec")
    assert ("kdist" in script(page, side)) == (side == "+")


@pytest.mark.parametrize(("page", "backend"), BACKENDS.items())
def test_two_workers_learn_the_sum(page: str, backend: str, tmp_path: Path) -> None:
    addresses = local_addresses(2)
    started: list[Script] = []
    try:
        for index in (0, 1):
            env = {"KERAS_BACKEND": backend, "TF_CONFIG": tf_config(addresses, index)}
            started.append(Script(tmp_path, f"worker{index}", script(page, "+") + TELLS, env))
        for one in started:
            assert one.wait() == 0, one.stderr()
    finally:
        for one in started:
            one.kill()
    found = [re.findall(r"LEARNED (\[.*\]) 2$", one.stdout(), re.MULTILINE)[0] for one in started]
    assert found[0] == found[1]
    # y is the sum of eight columns: after 5 epochs of 4 steps at 0.1, each weight is nearly 1.
    np.testing.assert_allclose(np.array(eval(found[0])), 1.0, atol=0.35)
    assert page == "tf-distribute" or (tmp_path / "model.keras").is_file()


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


def test_names_of_kdist_are_there() -> None:
    names = sorted(set(re.findall(r"\bkdist(?:\.[A-Za-z_]\w*)+", "".join(PAGES.values()))))
    assert len(names) > 15
    assert run("torch", 1, in_worker_missing, names) == [[]]
