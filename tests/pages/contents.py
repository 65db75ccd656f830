"""Lists the generated files in docs/: the pictures, and the pages that repeat information from the code.

`python -m tests.pages` writes all of them in a second, and a test compares them with the committed files. The
names of `tf.distribute` have a separate script (`tests/names_page.py`), because it needs TensorFlow.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

from tests import layers_picture, versions
from tests.helpers.environment import ROOT
from tests.pages import backend, benchmarks, command_line, errors, pictures, variables

__all__ = ["PAGES", "ROOT"]


def _resume() -> bytes:
    """Returns the figure of tutorial 8: a job that was killed twice, over a run without a failure."""
    path = ROOT / "tutorials" / "08-resume-training.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    (cell,) = [cell for cell in cells if "cover" in cell["metadata"].get("tags", [])]
    (image,) = [
        output["data"]["image/png"] for output in cell["outputs"] if "image/png" in output.get("data", {})
    ]
    return base64.b64decode(image)


PAGES: dict[str, Callable[[], str | bytes]] = {
    "docs/versions.md": versions.page,
    "docs/layers.svg": layers_picture.draw,
    "docs/overview.svg": pictures.overview,
    "docs/step.svg": pictures.step,
    "docs/batch.svg": pictures.batch,
    "docs/holders.svg": pictures.holders,
    "docs/choice.svg": pictures.choice,
    "docs/scaling.svg": pictures.scaling,
    "docs/resume.png": _resume,
    "docs/contribute/a-backend.md": backend.write,
    "docs/reference/benchmarks.md": benchmarks.write,
    "docs/reference/command-line.md": command_line.write,
    "docs/reference/environment.md": variables.write,
    "docs/reference/errors.md": errors.write,
}
"""The files, below the root of the repository, and what writes each."""


def content(path: str) -> bytes:
    """Returns the generated content of this file."""
    written = PAGES[path]()
    return written if isinstance(written, bytes) else written.encode()
