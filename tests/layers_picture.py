"""Draws the packages of kdist from their imports: `python -m tests.layers_picture` writes docs/layers.svg.

A package is one layer above the highest package that it imports. Lines lead only to the next lower layer, because
lines to lower layers would cross the others.
"""

from __future__ import annotations

import functools
from xml.sax.saxutils import escape

from tests.helpers.layers import ORDER, ROOT, edges, package_of_module
from tests.pages.drawing import COLORS

PICTURE = ROOT / "docs" / "layers.svg"
WORDS = {
    "errors": "every public error",
    "names": "omitted tf.distribute names",
    "version": "version of kdist",
    "handlers": "callbacks for Keras hooks",
    "values": "DistributedValues, ReduceOp",
    "whole_files": "atomic file writes",
    "named": "module:function",
    "cluster": "workers and addresses",
    "tracing": "KDIST_TRACE",
    "unsupported": "unsupported features",
    "topology": "replicas, variable storage",
    "arrays": "rows, structures",
    "communication": "options of collectives",
    "context": "current strategy, replica",
    "keras_hooks": "all changes inside Keras",
    "control": "messages, lost workers",
    "backends": "contract, replicas, steps",
    "faults": "fault injection",
    "data": "datasets, sharding, prefetch",
    "engines": "tensorflow, jax, torch",
    "strategies": "choice of devices",
    "nn": "losses of custom loops",
    "functions": "function, value_and_grad",
    "collectives": "barrier, broadcast",
    "synchrony": "check_in_sync",
    "checkpoint": "save and restore",
    "training": "fit, evaluate, predict",
    "coordinator": "parameter servers, evaluator",
    "estimator": "train_and_evaluate",
    "callbacks": "public names",
    "cluster_resolver": "public names",
    "experimental": "public names",
    "launch": "starts workers",
    "contents": "kdist/__init__.py",
    "parity": "compares with one device",
    "testing": "pools, fixtures, parity",
    "demo": "kdist demo",
    "measuring": "kdist bench, plot",
    "doctor": "kdist doctor, kdist test",
    "command_line": "kdist run, info, …",
}
BOX, GAP, HEIGHT, LAYER = 184, 24, 40, 66


def imported_packages() -> dict[str, set[str]]:
    """Returns the other packages that each package imports."""
    packages: dict[str, set[str]] = {package: set() for package in ORDER}
    for here, there, _ in edges():
        packages[package_of_module(here)].add(package_of_module(there))
    return {package: there - {package} for package, there in packages.items() if package in WORDS}


def _colors(number: int) -> str:
    c = {name: both[number] for name, both in COLORS.items()}
    return (
        f"text{{fill:{c['soft']}}}.name{{fill:{c['ink']}}}path{{stroke:{c['line']}}}"
        f"rect{{fill:{c['box']};stroke:{c['line']}}}.ground{{fill:{c['ground']};stroke:none}}"
    )


def draw() -> str:
    """Returns the picture, as SVG."""
    packages = imported_packages()

    @functools.cache
    def layer(package: str) -> int:
        return 1 + max((layer(below) for below in packages[package]), default=-1)

    top = max(map(layer, packages))
    layers = [[package for package in packages if layer(package) == number] for number in range(top + 1)]
    width = max(map(len, layers)) * (BOX + GAP) + GAP
    place: dict[str, tuple[float, float]] = {}
    for number, there in enumerate(layers):
        for index, package in enumerate(there):
            x = width / 2 + (index - (len(there) - 1) / 2) * (BOX + GAP)
            place[package] = (x, 10 + (top - number) * LAYER)
    lines, boxes = [], []
    for package, (x, y) in place.items():
        for below in sorted(packages[package]):
            if layer(below) == layer(package) - 1:
                bx, by = place[below]
                middle = (y + HEIGHT + by) / 2
                lines.append(
                    f'<path d="M{x:g} {y + HEIGHT:g}C{x:g} {middle:g} {bx:g} {middle:g} {bx:g} {by:g}"/>'
                )
        boxes.append(
            f'<rect x="{x - BOX / 2:g}" y="{y:g}" width="{BOX}" height="{HEIGHT}" rx="5"/>'
            f'<text x="{x:g}" y="{y + 17:g}" class="name">{escape(package)}</text>'
            f'<text x="{x:g}" y="{y + 32:g}">{escape(WORDS[package])}</text>'
        )
    height = 20 + top * LAYER + HEIGHT
    light, dark = (_colors(number) for number in (0, 1))
    style = (
        "text{font:11px sans-serif;text-anchor:middle}.name{font:bold 13px monospace}path{fill:none;stroke-width:1.2}"
        f"{light}@media (prefers-color-scheme: dark){{{dark}}}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>The packages of kdist: each imports only from lower layers</title>",
        f"<style>{style}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
        *lines,
        *boxes,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
