"""`kdist bench` measures a user's model on two workers, and writes the right results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import run, strategy
from tests.helpers.scripts import Script

MODEL = """
import time
import keras

class Slow(keras.layers.Layer):
    def call(self, x):
        time.sleep(0.02)
        return x

def make_model():
    inputs = {"text": keras.Input((None,), dtype="int32", name="text"), "x": keras.Input((3,), name="x")}
    text = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(5, 4)(inputs["text"]))
    both = Slow()(keras.layers.Concatenate()([text, inputs["x"]]))
    model = keras.Model(list(inputs.values()), keras.layers.Dense(7)(both))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


@pytest.mark.kills("bench_ten_times_the_rows", "bench_warm_up_counts", "bench_first_epoch_of_keras_counts")
@pytest.mark.in_turn(4)
def test_it_measures_a_model_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    arguments = ["bench", "--backend", "torch", "--num-workers", "1,2", "--steps", "3", "--batch-size", "20"]
    arguments += ["--model", "mine:make_model", "--json", "bench.json", "--plot", "bench.html"]
    arguments += ["--compare", "keras", "--rounds", "2"]
    source = f"import sys\nfrom kdist.command_line import main\nsys.exit(main({arguments!r}))\n"
    script = Script(tmp_path, "bench", source, {}).finish(170)
    written = json.loads((tmp_path / "bench.json").read_text())
    alone, result = written["results"]
    (plain,) = written["contenders"]
    assert len(plain["seconds"]) == 2 and min(plain["seconds"]) > 3 * 0.02
    for measured in (alone, result):
        assert measured["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        seconds = [max(worker["elapsed"] for worker in workers) for workers in measured["rounds"]]
        expected = [ours / theirs for ours, theirs in zip(seconds, plain["seconds"], strict=True)]
        assert measured["over"] == {"keras": pytest.approx(expected)}
    assert [(round[0]["steps"], round[1]["rows"]) for round in result["rounds"]] == [(3, 60)] * 2
    assert (alone["num_workers"], result["num_workers"], result["backend"]) == (1, 2, "torch")
    for measured in (alone, result):  # a step has 20 rows over both workers, and takes at least 0.02 s
        assert 0 < measured["rows_per_second"] < 20 / 0.02
        assert measured["rows_per_second"] == pytest.approx(20 * measured["steps_per_second"])
    assert alone["efficiency"] == 1.0
    assert result["efficiency"] == pytest.approx(result["rows_per_second"] / alone["rows_per_second"] / 2)
    shares = result["shares"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["exchange"] > 0 and shares["compute"] > 0
    lines = script.stdout().splitlines()
    (row,) = [line.split() for line in lines if line.strip().startswith("2 ")][:1]
    assert row[0] == "2" and row[3] == f"{result['efficiency']:.0%}" and "-" not in row
    assert (tmp_path / "bench.html").read_text().count("<svg ") == 2


def in_worker_made_up() -> list[str]:
    import keras

    from kdist.errors import InvalidArgumentError
    from kdist.measuring import bench_worker

    model = bench_worker.make_model()
    x, y = bench_worker.made_up(model, 6)
    assert x.shape == (6, 28, 28, 1) and y.shape == (6,) and 0 <= y.min() <= y.max() < 10
    with pytest.raises(InvalidArgumentError) as caught:
        bench_worker.made_up(keras.Sequential([keras.layers.Dense(1)]), 6)
    with pytest.raises(InvalidArgumentError) as pair:
        bench_worker.measure(strategy(), f"{__name__}:make_pair", 2, 1, 1)
    return [x.dtype.name, str(caught.value), str(pair.value)]


def make_pair() -> Any:
    """Returns a wrong pair: a user might return this to get generated targets."""
    from kdist.measuring import bench_worker

    return bench_worker.make_model(), 0


def test_data_are_made_up_from_what_the_model_takes() -> None:
    dtype, said, pair = run("torch", 1, in_worker_made_up)[0]
    assert dtype == "float32" and "return (model, x, y)" in said
    assert "neither a compiled model nor (model, x, y)." in pair and "returned=('Sequential', 'int')" in pair
