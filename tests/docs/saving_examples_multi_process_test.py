"""Runs the examples of the pages on saving, checkpoints, resuming and the evaluator."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.docs.examples import Run, each_example, run_example, runs
from tests.docs.things import assert_same, dataset, model_with_and_without_kdist, new_model, rows
from tests.helpers.compare import assert_equal
from tests.helpers.processes import strategy


def checkpoints_0(example: Run) -> None:
    first = example()
    assert first["checkpoint"].epoch == 10 and len(first["manager"].checkpoints) == 3
    again = example()  # a restart of the job, with all epochs already done
    assert_same(first["model"], again["model"])


@runs(replaced=("s3://", "shelf://"))
def checkpoints_1(example: Run) -> None:
    import kdist
    from tests.helpers.object_store import register

    register("store")
    model = new_model()
    checkpoint = kdist.Checkpoint(model=model)
    saved = checkpoint.save("shelf://bucket/run", asynchronous=False)
    kdist.barrier()
    names = example(kdist=kdist, checkpoint=checkpoint, model=model, **rows())
    assert names["path"] == saved and names["manager"].checkpoints == [saved]


def checkpoints_2(example: Run) -> None:
    import kdist

    model = new_model()
    checkpoint = kdist.Checkpoint(model=model)
    checkpoint.save("checkpoints", asynchronous=False)
    saved = [w + 0 for w in model.get_weights()]
    model.set_weights([w + 1 for w in saved])
    example(checkpoint=checkpoint, kdist=kdist)
    assert_equal(model.get_weights(), saved)


def evaluator_0(example: Run) -> None:
    import kdist

    model, (x, y) = new_model(), rows().values()
    kdist.Checkpoint(model=model).save("checkpoints", asynchronous=False)
    kdist.SidecarEvaluator.announce_end("checkpoints")
    names = example(kdist=kdist, model=new_model(plain=True), x_test=x, y_test=y)
    assert len(names["evaluations"]) == 1 and os.path.exists("best.keras")


def evaluator_1(example: Run) -> None:
    import keras

    import kdist

    class Batches(keras.utils.PyDataset):
        def __init__(self, x, y, size):
            super().__init__()
            self.parts = [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)] * 60

        def __len__(self):
            return len(self.parts)

        def __getitem__(self, index):
            return self.parts[index]

    names = example(kdist=kdist, Batches=Batches, make_model=lambda: new_model(plain=True), **rows())
    assert names["logs"] is None  # as on TensorFlow, a job with several workers returns no logs
    assert kdist.latest_checkpoint("checkpoints").endswith("50")


def resuming_0(example: Run) -> None:
    assert_same(*model_with_and_without_kdist(example))


def resuming_1(example: Run) -> None:
    import kdist

    config = example(kdist=kdist, maintenance_is_near=lambda: False)["config"]
    assert config.grace_period == 300 and config.termination_watcher_fn() is False


@runs(replaced=("10_000", "200"))
def resuming_2(example: Run) -> None:
    import keras

    import kdist

    taken: list[int] = []

    def train_step(iterator: Any) -> None:
        mine = strategy().experimental_local_results(next(iterator))[0]
        taken.append(int(keras.ops.convert_to_numpy(mine)[0]))
        if taken == [0, 1, 2]:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.02)

    def start() -> Any:
        batches = [np.full(2, number) for number in range(200)]
        given = {"dataset": strategy().experimental_distribute_dataset(batches), "train_step": train_step}
        model = new_model()
        return example(kdist=kdist, model=model, optimizer=model.optimizer, **given)

    with pytest.raises(SystemExit):
        start()
    assert 3 <= len(taken) < 200
    left = start()
    left["handler"].close()
    assert taken == list(range(200)) and left["checkpoint"].step == 200, "no batch is lost or repeated"


def resuming_3(example: Run) -> None:
    from kdist import faults

    assert example()["faults"] is faults  # no fault is injected, so the point does nothing


def saving_0(example: Run) -> None:
    import keras

    given = {"dataset": dataset(), "validation": dataset(shuffles=False), "strategy": strategy()}
    model = example(keras=keras, make_model=new_model, **given)["model"]
    assert_same(model, keras.models.load_model("model.keras"))
    assert Path("best.keras").is_file() and any(Path("board").rglob("events*"))
    assert len(Path("log.csv").read_text(encoding="utf-8").splitlines()) == 1 + 10


def saving_1(example: Run) -> None:
    import keras

    model = new_model()
    model.save("model.keras")
    model.save_weights("best.weights.h5")
    left = example(keras=keras, strategy=strategy(), model=model)
    for loaded in (left["model"], left["plain"]):
        assert_same(new_model(), loaded)


@pytest.mark.kills(handler_saves_after_the_step="-resuming_2]")
@each_example(globals())
def test_example(backend: str, name: str, tmp_path: Path) -> None:
    run_example(globals(), backend, name, tmp_path)
