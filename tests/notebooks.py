"""Executes tutorials, and stores them with what they say and draw.

    python -m tests.notebooks [--backend jax] [--to FOLDER] tutorials/06-*.ipynb

A notebook runs in a folder of its own, on its backend of `make test` unless another is named, and is stored in its
place or in another folder. What differs from run to run, or from machine to machine, is left out, so that a change
shows what changed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbclient
import nbformat

from tests.helpers.environment import ROOT, clean_environment
from tests.helpers.processes import BACKENDS

TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))
CELL_TIMEOUT = 240  # seconds, of a busy machine
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# What has nothing to do with the tutorial: a remark of TensorFlow's, and one of the debugger of ipykernel.
QUIET = {"TF_ENABLE_ONEDNN_OPTS": "0", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
# What TensorFlow remarks in notebooks, from Python and from C++; workers do, too.
CHATTER = re.compile(
    r"^(?:\[worker \d+\] )?"
    r"(?:(?:INFO|WARNING):tensorflow:|WARNING: All log messages before absl|[IWE]\d{4} \S+ .*\.cc:\d+\]).*\n",
    re.MULTILINE,
)
# Of what a cell shows, the first of these that is there is kept, beside its text.
RICH = ("image/png", "text/markdown", "text/html")
# What people wrote about a cell: the others are the front end's.
OF_A_CELL = ("tags", "alt")


def backend_of(tutorial: Path) -> str:
    """The backend on which `make test` executes a tutorial: they take turns."""
    return BACKENDS[int(tutorial.name.split("-")[0]) % len(BACKENDS)]


def execute(tutorial: Path, backend: str, folder: Path) -> Any:
    """Returns a notebook, executed on a backend, with its outputs.

    Args:
        tutorial: The file.
        backend: The value of `KERAS_BACKEND`.
        folder: Where it runs.
    """
    notebook = nbformat.read(tutorial, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=clean_environment() | QUIET | {"KERAS_BACKEND": backend})
    return normalized(notebook)


def normalized(notebook: Any) -> Any:
    """Returns the notebook without what differs from run to run."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = {name: cell.metadata[name] for name in OF_A_CELL if name in cell.metadata}
        for output in cell.get("outputs", ()):
            if "text" in output:
                output.text = CHATTER.sub("", output.text)
            if "data" in output:
                rich = next((kind for kind in RICH if kind in output.data), None)
                output.data = {
                    kind: text for kind, text in output.data.items() if kind in (rich, "text/plain")
                }
                output.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("text") != ""]
    return notebook


def text_of(cell: Any) -> str:
    """What a code cell has printed, and the text of its values and of its tables."""
    return "".join(
        output["text"] if "text" in output else _text_in(output.get("data", {})) for output in cell["outputs"]
    )


def _text_in(data: Any) -> str:
    return "" if "image/png" in data else data.get("text/markdown", data.get("text/plain", ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Executes the tutorials that are named; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.notebooks", description=__doc__)
    parser.add_argument("tutorials", nargs="+", type=Path, metavar="NOTEBOOK")
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="where to store them; else in their places")
    options = parser.parse_args(arguments)
    for tutorial in options.tutorials:
        with tempfile.TemporaryDirectory() as folder:
            # Jupyter, IPython and matplotlib must not read or write what belongs to the user.
            for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
                os.environ[name] = str(Path(folder, name.lower()))
            os.environ["MPLCONFIGDIR"] = str(ROOT / ".pytest_cache" / "matplotlib")
            import matplotlib.font_manager  # noqa: F401 - looks for fonts, once, which a notebook would report

            work = Path(folder, "work")
            work.mkdir()
            executed = execute(tutorial, options.backend or backend_of(tutorial), work)
        nbformat.write(executed, (options.to or tutorial.parent) / tutorial.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
