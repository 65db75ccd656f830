"""Runs the Python examples of the *How-to* pages."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from tests.docs.examples import Run, each_example, example, run_example, runs
from tests.docs.things import assert_same, new_model, rows
from tests.helpers.scripts import Script


def how_to_slurm_0(example: Run) -> None:
    model, folder = new_model(), Path("saved").absolute()
    with mock.patch.dict(os.environ, {"CHECKPOINT_DIR": str(folder)}):
        example(model=model, **rows())
    plain = new_model(plain=True)
    plain.fit(*rows().values(), batch_size=128, epochs=10, verbose=0)
    assert_same(plain, model)


@runs(on="jax")
def how_to_tpu_0(example: Run) -> None:
    import kdist

    told = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}  # no query of the metadata server
    with mock.patch.dict(os.environ, told), pytest.raises(kdist.errors.DeviceError, match="found no TPU"):
        example(kdist=kdist)


def how_to_notebooks_0(example: Run) -> None:
    assert example()["strategy"].num_replicas_in_sync == 2


@runs(replaced=("gpu:", "cpu:"))
def how_to_gpus_0(example: Run) -> None:
    import kdist

    assert example(kdist=kdist)["strategy"].num_replicas_in_sync == 2


@each_example(globals())
def test_example(backend: str, name: str, tmp_path: Path) -> None:
    run_example(globals(), backend, name, tmp_path)


@pytest.mark.in_turn(6)
def test_the_notebook_s_workers(tmp_path: Path) -> None:
    told = "\nimport json\nprint('WEIGHTS', json.dumps(weights))\n"
    script = Script(tmp_path, "launching", example("how_to_notebooks_1") + told, {}).finish()
    one, two = script.told("WEIGHTS ")
    assert one == two and len(one) == 2
