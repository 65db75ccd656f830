"""Executes tutorials, and saves them with their output and pictures.

    python -m tests.notebooks [--backend jax] [--to DIRECTORY] tutorials/06-*.ipynb

A notebook runs in a temporary directory. Without `--backend`, it uses the backend on which `make test` runs it. The
result overwrites the notebook or goes to another directory. Values that differ between runs or machines are removed,
so that a diff shows only real changes.
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
CELL_TIMEOUT = 240  # seconds, on a busy machine
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# Disables messages of TensorFlow and of ipykernel's debugger, which are unrelated to the tutorial.
QUIET = {"TF_ENABLE_ONEDNN_OPTS": "0", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
# Log lines of TensorFlow in notebooks and workers, from Python and from C++.
CHATTER = re.compile(
    r"^(?:\[worker \d+\] )?"
    r"(?:(?:INFO|WARNING):tensorflow:|WARNING: All log messages before absl|[IWE]\d{4} \S+ .*\.cc:\d+\]).*\n",
    re.MULTILINE,
)
# For each output of a cell, only the first available type of these is kept, in addition to plain text.
RICH = ("image/png", "text/markdown", "text/html")
# Metadata that authors write. The front end of the notebook writes all other metadata.
OF_A_CELL = ("tags", "alt")


def backend_of(tutorial: Path) -> str:
    """Returns the backend on which `make test` executes a tutorial. The backends rotate."""
    return BACKENDS[int(tutorial.name.split("-")[0]) % len(BACKENDS)]


def execute(tutorial: Path, backend: str, folder: Path) -> Any:
    """Returns a notebook, executed on a backend, with its outputs.

    Args:
        tutorial: The file.
        backend: The value of `KERAS_BACKEND`.
        folder: The working directory.
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
    """Returns the notebook without values that differ between runs."""
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
    """Returns the printed output of a code cell, and the text of its values and tables."""
    return "".join(
        output["text"] if "text" in output else _text_in(output.get("data", {})) for output in cell["outputs"]
    )


def _text_in(data: Any) -> str:
    return "" if "image/png" in data else data.get("text/markdown", data.get("text/plain", ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Executes the given tutorials; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.notebooks", description=__doc__)
    parser.add_argument("tutorials", nargs="+", type=Path, metavar="NOTEBOOK")
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument(
        "--to", type=Path, metavar="DIRECTORY", help="where to store them; else in their places"
    )
    options = parser.parse_args(arguments)
    for tutorial in options.tutorials:
        with tempfile.TemporaryDirectory() as folder:
            # Jupyter, IPython and matplotlib must not read or write the user's files.
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
