"""What a script writes into docs/: the pictures, and the pages that repeat what the code says.

`python -m tests.pages` writes all of them anew, in a second; a test compares them with what is committed. The names of
`tf.distribute` have a script of their own (`tests/names_page.py`), since TensorFlow must be there.
"""

from __future__ import annotations

from collections.abc import Callable

from tests import layers_picture, versions
from tests.environment import ROOT
from tests.pages import backend, benchmarks, command_line, errors, pictures, variables

__all__ = ["PAGES", "ROOT"]

PAGES: dict[str, Callable[[], str]] = {
    "docs/versions.md": versions.page,
    "docs/layers.svg": layers_picture.draw,
    "docs/overview.svg": pictures.overview,
    "docs/step.svg": pictures.step,
    "docs/batch.svg": pictures.batch,
    "docs/holders.svg": pictures.holders,
    "docs/choice.svg": pictures.choice,
    "docs/contribute/a-backend.md": backend.write,
    "docs/reference/benchmarks.md": benchmarks.write,
    "docs/reference/command-line.md": command_line.write,
    "docs/reference/environment.md": variables.write,
    "docs/reference/errors.md": errors.write,
}
"""The files, below the root of the repository, and what writes each."""
