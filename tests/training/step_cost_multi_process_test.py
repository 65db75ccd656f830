"""Limits the Python calls of kdist per step of `fit`, because more calls would slow down small models.

The test counts calls instead of time, so that the result does not depend on the machine.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

import numpy as np
import pytest

import kdist
from tests.helpers.processes import each_backend, run

ROWS, BATCH = 4, 2
# Slightly more than today's calls per step. Lower the numbers when you make a step cheaper.
# Some of them replace calls of `keras.tree`, which are not counted and take 5 to 50 times as long.
MOST_CALLS = {"jax": 46, "tensorflow": 63, "torch": 70}


def calls_of_fit(steps: int) -> int:
    """Returns the number of calls of kdist's functions in an epoch with this number of steps."""
    import keras

    with kdist.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(2)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.ones((steps * BATCH, 3), "float32"), np.zeros(steps * BATCH, "int32")
    model.fit(x, y, batch_size=BATCH, verbose=0)
    folder = os.path.dirname(kdist.__file__) + os.sep
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(folder)

    sys.setprofile(count)
    try:
        model.fit(x, y, batch_size=BATCH, verbose=0)
    finally:
        sys.setprofile(None)
    return calls


def in_worker_calls_per_step() -> float:
    return (calls_of_fit(30) - calls_of_fit(10)) / 20


@pytest.mark.kills(jax_single_device_as_mesh="[jax]")
@each_backend
def test_a_step_calls_few_functions_of_kdist(backend: str) -> None:
    (calls,) = run(backend, 1, in_worker_calls_per_step)
    assert calls <= MOST_CALLS[backend], f"{calls:.1f} calls per step"
