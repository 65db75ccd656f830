"""The comparison of a cell's outputs with the stored outputs ignores rounding and finds other differences."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_output

from tests.docs.outputs import BACKEND, SAME, VARIES, difference_of


def printed(text: str) -> Any:
    return new_output("stream", name="stdout", text=text)


def shown(kind: str, data: str, text: str) -> Any:
    return new_output("display_data", {kind: data, "text/plain": text})


def figure(num_colored: int, ink: float = 0.0, text: str = "<Figure size 800x140 with 8 Axes>") -> Any:
    pixels = np.ones((10, 10, 3))
    pixels[0] = ink
    pixels.reshape(-1, 3)[50 : 50 + num_colored] = (0, 0, 1)
    file = io.BytesIO()
    matplotlib.image.imsave(file, pixels, format="png")
    return shown("image/png", base64.b64encode(file.getvalue()).decode(), text)


EQUAL = {
    "the backend's name": ([], "Keras on jax, 2 replicas\n", "Keras on torch, 2 replicas\n"),
    "rounding": ([], "loss 0.513, accuracy 97.3%\n", "loss 0.543, accuracy 96.0%\n"),
    "a padded number": ([], "[8.318  7.5  ]\n", "[8.3177 7.5191]\n"),
    "the order of workers": ([], "[worker 0] jax\n[worker 1] jax\n", "[worker 1] jax\n[worker 0] jax\n"),
    "numbers that vary": ([VARIES], "rows [[4, 5], [20]] of 9\n", "rows [[1], [2, 3, 4]] of 8\n"),
    "ports": ([VARIES], '"127.0.0.1:42727"\n', '"127.0.0.1:1727"\n'),
    "a figure with another font": ([], figure(20), figure(17)),
    "a gray figure": ([], figure(0, 0.1), figure(0, 0.2)),
}
DIFFERENT = {
    "no output": ([], "Keras on jax\n", None, r"outputs \[\], not \['stream stdout'\]"),
    "no figure": ([], figure(20), "Keras on jax\n", "not .'image/png'"),
    "an output of another kind": ([], shown("text/html", "1", "1"), shown("text/markdown", "1", "1"), "html"),
    "an exact text": ([SAME], "loss 0.51\n", "loss 0.52\n", r"-loss 0.51\n\+loss 0.52"),
    "words": ([], "2 runs agree\n", "2 runs differ\n", r"-2 runs agree\n\+2 runs differ"),
    "a whole number": ([], "2 replicas\n", "3 replicas\n", r"\+3 replicas"),
    "a decimal": ([], "loss 0.51\n", "loss 0.31\n", r"\+loss 0.31"),
    "a lost line": ([], "[worker 0] jax\n[worker 1] jax\n", "[worker 0] jax\n", r"-\[worker 1\] BACKEND"),
    "words among numbers that vary": ([VARIES], "steps 1 to 22\n", "steps 1 of 22\n", r"\+steps 1 of 22"),
    "an HTML table": ([], shown("text/html", "", "rows=(0, 4)"), shown("text/html", "", "rows=(0, 8)"), "8"),
    "fewer axes": ([], figure(20), figure(20, text="<Figure size 800x140 with 1 Axes>"), "1 Axes"),
    "empty axes": ([], figure(20), figure(0), "0.00% have color, not 20.00%"),
    "a line that is lost": ([], figure(20), figure(9), "9.00% have color"),
    "an empty gray figure": ([], figure(0, 0.1), figure(0, 1.0), "0.00% have gray, not 10.00%"),
}


def cell(output: Any, tags: list[str]) -> Any:
    outputs = [] if output is None else [printed(output) if isinstance(output, str) else output]
    return new_code_cell(outputs=outputs, metadata={"tags": tags})


@pytest.mark.parametrize(("tags", "stored", "executed"), EQUAL.values(), ids=EQUAL)
def test_outputs_of_another_run_agree(tags: list[str], stored: Any, executed: Any) -> None:
    assert difference_of(cell(stored, tags), cell(executed, tags)) is None


def test_outputs_of_a_backend_are_compared_on_that_backend() -> None:
    cells = cell("JAX has TPUs\n", [BACKEND]), cell("PyTorch has GPUs\n", [BACKEND])
    assert difference_of(*cells, on_another_backend=True) is None
    assert difference_of(*cells) is not None


@pytest.mark.kills("tutorial_numbers_not_compared")
@pytest.mark.parametrize(("tags", "stored", "executed", "found"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_difference_is_found(tags: list[str], stored: Any, executed: Any, found: str) -> None:
    difference = difference_of(cell(stored, tags), cell(executed, tags))
    assert difference is not None
    assert re.search(found, difference)
