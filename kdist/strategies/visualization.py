"""`kdist.visualize`: which device computes which rows, and which part of each variable it holds."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kdist.errors import InvalidArgumentError

if TYPE_CHECKING:
    import keras

    from kdist.strategies.strategy import Strategy

Range = tuple[int, int]
_DRAWN = 4  # variables; more do not fit next to each other
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # colorblind-safe, by Okabe and Ito
_WIDTH, _HEIGHT, _MARGIN, _ROWS_WIDTH, _LONGEST, _SHORTEST = 342, 150, 10, 26, 58, 8


@dataclass(frozen=True)
class Visualization:
    """The rows and variables of each device of a strategy, as text when printed or a picture in a notebook.

    Args:
        devices: The names of the devices of all workers, for example `"worker 0, cpu:0"`.
        global_batch_size: The number of rows in the global batch.
        rows: The rows of the global batch that each device computes, as `(start, stop)`.
        shapes: The shape of each variable, by its path.
        parts: The part of each variable that each device holds, as `(start, stop)` per axis.
    """

    devices: Sequence[str]
    global_batch_size: int
    rows: Mapping[str, Range]
    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, Mapping[str, tuple[Range, ...]]]

    def share(self, device: str) -> float:
        """Returns the fraction of the weights that a device holds, from 0 to 1."""
        held = sum(math.prod(stop - start for start, stop in part) for part in self.parts[device].values())
        return held / max(1, sum(map(math.prod, self.shapes.values())))

    def __str__(self) -> str:
        lines = []
        for device in self.devices:
            start, stop = self.rows.get(device, (0, 0))
            lines.append(
                f"{device}: {stop - start} of {self.global_batch_size} rows, {self.share(device):.0%} of the weights"
            )
            for path, shape in self.shapes.items():
                part = self.parts[device].get(path)
                held = "not here" if part is None else f"[{', '.join(f'{a}:{b}' for a, b in part)}]"
                lines.append(f"  {path} {shape}: {held}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return "".join(
            self._frame(device, _COLORS[i % len(_COLORS)]) for i, device in enumerate(self.devices)
        )

    def _frame(self, device: str, color: str) -> str:
        """Returns an SVG image of a device: its rows on the left, then its parts of the largest variables."""
        start, stop = self.rows.get(device, (0, 0))
        size = 80 / max(1, self.global_batch_size)
        boxes = [
            _box(_MARGIN, 30 + size * row, 16, size, color if start <= row < stop else "none")
            for row in range(self.global_batch_size)
        ]
        boxes.append(_label(_MARGIN, 128, "rows"))
        left = float(_MARGIN + _ROWS_WIDTH + _MARGIN)
        for path in sorted(self.shapes, key=lambda path: -math.prod(self.shapes[path]))[:_DRAWN]:
            height, width = _drawn_size(self.shapes[path])
            part = self.parts[device].get(path)
            boxes.append(_box(left, 30, width, height, "none", "2"))
            if part is not None:
                (top, bottom), (begin, end) = _drawn_part(part, self.shapes[path])
                boxes.append(
                    _box(
                        left + begin * width,
                        30 + top * height,
                        (end - begin) * width,
                        (bottom - top) * height,
                        color,
                    )
                )
            boxes.append(_label(left, 128, "/".join(path.split("/")[-2:])[:13]))
            left += max(width, 66) + _MARGIN
        title = f"{device}: {stop - start} rows, {self.share(device):.0%} of the weights"
        return (
            f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{html.escape(title)}" '
            'style="border: 1px solid #999999; margin: 4px; font: 11px sans-serif">'
            f'<text x="{_MARGIN}" y="18" fill="{color}" font-weight="bold">{html.escape(title)}</text>'
            + "".join(boxes)
            + "</svg>"
        )


def visualize(strategy: Strategy, model: keras.Model, global_batch_size: int = 8) -> Visualization:
    """Shows which rows each device computes and which part of each variable it holds.

    The result is text when you print it and a picture in a notebook. The picture shows the largest variables.

    Args:
        strategy: A strategy without parameter servers. Each worker can call this function independently.
        model: A built model that was created in the scope of the strategy.
        global_batch_size: The number of rows in a global batch. On JAX, if the devices cannot divide a batch
            evenly, each device computes all its rows.

    Returns:
        A `Visualization`. You can pickle it, for example to return it from `kdist.launch`.

    Raises:
        InvalidArgumentError: If the model is not built.

    Example:

    >>> import keras, kdist
    >>> strategy = kdist.MirroredStrategy(["cpu:0"])
    >>> with strategy.scope():
    ...     layers = [keras.Input((4,)), keras.layers.Dense(2, name="out")]
    ...     model = keras.Sequential(layers, name="small")
    >>> print(kdist.visualize(strategy, model))
    worker 0, cpu:0: 8 of 8 rows, 100% of the weights
      small/out/kernel (4, 2): [0:4, 0:2]
      small/out/bias (2,): [0:2]
    """
    if not model.built:
        raise InvalidArgumentError(
            f"The model {model.name!r} has no variables yet: it is not built.",
            hint="Call `model.build(input_shape)`, or call the model on a batch.",
        )
    runtime = strategy.runtime
    topology = runtime.topology
    sharded, workers = topology.sharded, range(runtime.num_workers)
    computing = [_named(worker, device) for worker in workers for device in topology.devices]
    holding = [_named(worker, device) for worker in workers for device in topology.parameter_devices]
    devices = list(dict.fromkeys([*holding, *computing] if topology.is_central else computing))
    shapes = {variable.path: tuple(variable.shape) for variable in model.weights}
    rows = dict(zip(computing, runtime.split(global_batch_size), strict=False))
    parts: dict[str, dict[str, tuple[Range, ...]]] = {device: {} for device in devices}
    for number, device in enumerate(holding):
        whole = {path: tuple((0, length) for length in shape) for path, shape in shapes.items()}
        if sharded is not None:
            mesh = sharded.lengths(len(holding))
            place = _place(number, mesh)
            if (
                runtime.sees_all_rows
            ):  # one program for all devices divides the rows over one axis of the mesh
                batch = sharded.batch_axis
                rows[device] = _cut(global_batch_size, place[batch], mesh[batch])
            for path, shape in shapes.items():
                layout = sharded.layout(path, shape, mesh)
                whole[path] = tuple(
                    (0, length) if axis is None else _cut(length, place[axis], mesh[axis])
                    for length, axis in zip(shape, layout, strict=True)
                )
        parts[device] = whole
    return Visualization(devices, global_batch_size, rows, shapes, parts)


def _named(worker: int, device: str) -> str:
    return f"worker {worker}, {device}"


def _place(number: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns the index of a device on each axis of the mesh. The last axis varies fastest."""
    place: dict[str, int] = {}
    for axis, length in reversed(list(mesh.items())):
        number, place[axis] = divmod(number, length)
    return place


def _cut(length: int, index: int, count: int) -> Range:
    """Returns the range of one of `count` equal parts of an axis. Only the last parts can be shorter."""
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


def _drawn_size(shape: Sequence[int]) -> tuple[float, float]:
    """Returns the height and width of a variable in the picture, from the square roots of its lengths."""
    *outer, last = shape or (1,)
    return _pixels(math.prod(outer)), _pixels(last)


def _pixels(length: int) -> float:
    return min(_LONGEST, max(_SHORTEST, 12 * math.sqrt(length)))


def _drawn_part(
    part: Sequence[Range], shape: Sequence[int]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns a part as fractions of the picture's height and width. The leading axes are drawn as one."""
    shares = [(start / length, stop / length) for (start, stop), length in zip(part, shape, strict=True)]
    *outer, last = shares or [(0.0, 1.0)]
    cut = next((share for share in outer if share != (0.0, 1.0)), (0.0, 1.0))
    return cut, last


def _box(x: float, y: float, width: float, height: float, fill: str, dash: str = "") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" '
        f'stroke="#999999" stroke-dasharray="{dash}"/>'
    )


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="9" fill="currentColor">{html.escape(text)}</text>'
