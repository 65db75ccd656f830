"""Makes each tutorial a page of the site, and an overview of all: a hook of MkDocs.

The notebooks are beside `docs/`. On the site, they are in a directory of it. Links between pages and notebooks have
the form that works in the repository, and this hook changes them for the site.
"""

from __future__ import annotations

import base64
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

OVERVIEW = """# Tutorials

Notebooks with their outputs. Each runs unchanged on TensorFlow, JAX and PyTorch, offline, on a CPU.

| | What you learn |
| --- | --- |
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs calls this with the files that it has found."""
    overview = OVERVIEW
    for path in sorted(Path(__file__).parent.glob("*.ipynb")):
        source = path.read_bytes()
        notebook = json.loads(source)
        page, figures = convert(notebook, path.stem)
        heading, opening, rest = page.split("\n\n", 2)  # the opening is also the description of the page
        download = f"[Download this notebook]({path.name}){{ download }}"
        page = "\n\n".join((heading, opening, download, rest))
        files.append(File.generated(config, f"tutorials/{path.name}", content=source))
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=page))
        for name, figure in figures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=figure))
        overview += row(notebook, path.stem, cover(notebook, list(figures)))
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path != Path(__file__):  # complete examples, to which tutorials link
            files.append(File.generated(config, f"tutorials/{path.name}", content=path.read_bytes()))
    files.append(File.generated(config, "tutorials/index.md", content=overview))
    return files


def on_page_markdown(markdown: str, **others: object) -> str:
    """MkDocs calls this with the text of each page."""
    markdown = re.sub(r"\.\./(tutorials/\d\d-[\w-]+)\.ipynb", r"\1.md", markdown)
    return re.sub(r"\.\./tutorials/(?=\))", "tutorials/index.md", markdown)


def row(notebook: dict[str, Any], name: str, figure: str) -> str:
    """Returns a notebook's row in the overview: a figure, the heading, and its opening."""
    heading, opening, *_ = "".join(notebook["cells"][0]["source"]).removeprefix("# ").split("\n\n")
    number = int(name.split("-")[0])
    picture = f'[![]({figure}){{ style="min-width: 12rem" }}]({name}.md)'
    return f"| {picture} | **[{number}. {heading}]({name}.md)**<br>{opening} |\n"


def cover(notebook: dict[str, Any], figures: list[str]) -> str:
    """Returns the figure of a cell tagged `cover`; where there is none, the last one."""
    tags = [
        cell["metadata"].get("tags", ())
        for cell in notebook["cells"]
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", ())
    ]
    return next((name for name, given in zip(figures, tags, strict=True) if "cover" in given), figures[-1])


def convert(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Returns a notebook's page in Markdown, and the figures of the page.

    Args:
        notebook: As it is stored.
        name: How the names of the figures begin.
    """
    parts: list[str] = []
    figures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = re.sub(r"(?<=\]\()(\d\d-[\w-]+)\.ipynb", r"\1.md", source)
            parts.append(source.replace("](../docs/", "](../"))
            continue
        code = f"```python\n{source}\n```"
        if "fold" in cell["metadata"].get("tags", ()):
            code = '??? quote "Show the code"\n\n' + textwrap.indent(code, "    ")
        parts.append(code)
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                figure = f"{name}-{len(figures) + 1}.png"
                figures[figure] = base64.b64decode(data["image/png"])
                shown = f"![{cell['metadata'].get('alt', '')}]({figure}){{ .figure }}"
                parts.append(f"[{shown}]({figure})")
            elif "text/markdown" in data:
                parts.append("".join(data["text/markdown"]))
            elif "text/html" in data:
                parts.append("<div>" + "".join(data["text/html"]) + "</div>")
            else:
                said = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"``` {{ .text .no-copy }}\n{said.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", figures
