"""Runs the examples of the pages on measuring and on mixed precision."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from unittest import mock

from tests.docs.examples import Run, each_example, run_example
from tests.docs.things import assert_same, new_model, rows


def measuring_0(example: Run) -> None:
    import kdist

    history = example(kdist=kdist, model=new_model(), **rows())["model"].history.history
    assert len(history["rows_per_second"]) == len(history["slowest_worker"]) == 3


def measuring_1(example: Run) -> None:
    import kdist
    from kdist.measuring.records import read_run

    example(kdist=kdist, model=new_model(), **rows())
    mine = read_run("runs/first").workers[int(os.environ["RANK"])]
    assert mine.totals.steps == 3 * 3 - 1


def measuring_2(example: Run) -> None:
    import keras

    import kdist
    from tests.helpers.processes import strategy

    runs: list[str] = []

    class WandbMetricsLogger(keras.callbacks.Callback):
        pass

    def init(project: str, mode: str) -> None:
        runs.append(mode)

    names = {"WandbMetricsLogger": WandbMetricsLogger, "init": init}
    wandb = types.SimpleNamespace(**names)
    modules = dict.fromkeys(("wandb", "wandb.integration", "wandb.integration.keras"), wandb)
    with mock.patch.dict(sys.modules, modules):
        example(strategy=strategy(), model=new_model(), **rows())
        example(strategy=kdist.OneDeviceStrategy("cpu:0"), model=new_model(), **rows())  # has no resolver
    assert runs == ["online" if os.environ["RANK"] == "0" else "disabled", "online"]
    assert os.path.isdir("logs")


def measuring_3(example: Run) -> None:
    logged: list[int] = []

    class MLflow:
        @staticmethod
        def log_metrics(logs: dict[str, float], step: int) -> None:
            assert logs["loss"] > 0
            logged.append(step)

    chief = os.environ["RANK"] == "0"
    with mock.patch.dict(sys.modules, mlflow=MLflow):
        example(model=new_model(), chief=chief, **rows())
    assert logged == ([0, 1, 2] if chief else [])


def mixed_precision_0(example: Run) -> None:
    import keras

    from tests.helpers.processes import strategy

    try:
        model = example(keras=keras, strategy=strategy(), **rows())["model"]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert model.layers[0].compute_dtype == "bfloat16" and model.layers[0].kernel.dtype == "float32"
    losses = model.history.history["loss"]
    assert losses[-1] < losses[0]


def mixed_precision_1(example: Run) -> None:
    import kdist

    made = example(kdist=kdist)["strategy"]
    assert made.runtime.num_workers == 2 and made.runtime.compression == "bfloat16"


def mixed_precision_2(example: Run) -> None:
    import kdist

    low_rank = example(kdist=kdist)["strategy"].runtime.low_rank
    assert low_rank is not None and low_rank.rank == 2


def mixed_precision_3(example: Run) -> None:
    import keras

    given = rows()
    model = example(keras=keras, model=new_model(), **given)["model"]
    plain = new_model(plain=True)
    plain.compile(keras.optimizers.Adam(gradient_accumulation_steps=4), "mse")
    plain.fit(**given, batch_size=32, epochs=3, verbose=0)
    assert_same(plain, model)
    assert int(model.optimizer.iterations) == 3 * 10 // 4


@each_example(globals())
def test_example(backend: str, name: str, tmp_path: Path) -> None:
    run_example(globals(), backend, name, tmp_path)
