"""Scripts from the Keras tutorials of `tf.distribute` work on every backend after a search and replace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.processes import each_backend, each_backend_in_twelve_turns
from tests.helpers.scripts import Script, environments_of, finished

PAGE = Path(__file__).with_name("tutorials.md").read_text(encoding="utf-8")
# Ten classes that a network can distinguish: each has a different bright row.
BEFORE = """
import numpy as np

import keras
import kdist

keras.utils.set_random_seed(1)
draw = np.random.RandomState(0)


def images(count):
    labels = draw.randint(10, size=count)
    pixels = draw.randint(100, size=(count, 28, 28, 1))
    pixels[np.arange(count), 2 * labels + 3] = 255
    return pixels.astype("uint8"), labels


train_images, train_labels = images(500)
test_images, test_labels = images(100)
rates = []
"""
AFTER = {
    "keras": """
import json
found = [eval_loss, unreplicated_loss, replicated_loss], [eval_acc, unreplicated_acc, replicated_acc], rates
print("FOUND", json.dumps([[float(v) for v in values] for values in found]))
""",
    "multi_worker_with_keras": """
model = multi_worker_model
found = [strategy.num_replicas_in_sync], model.history.history["loss"]
if task_id == 0:
    found = *found, loaded_model.history.history["loss"]
print("FOUND", json.dumps([[float(v) for v in values] for values in found]))
""",
}


def script(title: str) -> str:
    """Returns a tutorial of TensorFlow as a script for kdist."""
    (code,) = re.findall(rf"^## {title}\n+```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for old, new in (("tf.distribute", "kdist"), ("tf.keras", "keras")):
        assert old in code
        code = code.replace(old, new)
    return BEFORE + code + AFTER[title]


@pytest.mark.timeout(400)
@each_backend
def test_keras(backend: str, tmp_path: Path) -> None:
    done = Script(tmp_path, "train", script("keras"), {"KERAS_BACKEND": backend}).finish()
    losses, accuracies, rates = done.told("FOUND ")
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4) and losses[0] < 2.2
    assert accuracies == pytest.approx([accuracies[0]] * 3) and accuracies[0] > 0.2
    assert rates == pytest.approx([1e-3, 1e-3, 1e-3, 1e-4])
    assert len(list((tmp_path / "training_checkpoints").iterdir())) == 4
    assert (tmp_path / "logs" / "train").is_dir()


@pytest.mark.timeout(400)
@each_backend_in_twelve_turns
def test_multi_worker_with_keras(backend: str, tmp_path: Path) -> None:
    workers = finished(tmp_path, script("multi_worker_with_keras"), environments_of(backend))
    found = [worker.told("FOUND ") for worker in workers]
    (replicas,), losses, loaded = found[0]
    assert found[1] == found[0][:2]
    assert replicas == 2
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert len(loaded) == 2 and loaded[0] == pytest.approx(losses[0], abs=1.0)
    assert (tmp_path / "keras-model.keras").is_file()
