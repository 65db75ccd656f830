"""Layouts of variables, from rules for their paths or from a user's function, checked against the mesh."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from kdist.errors import InvalidArgumentError
from kdist.topology import Layout

_EXAMPLE = (
    "Pass layouts and a mesh, for example:\n"
    'kdist.ModelParallelStrategy({".*dense.*/kernel": (None, "model")}, mesh={"batch": 2, "model": 2})'
)


class LayoutRules:
    """Finds the layout of a variable by its path, and records which rules were used."""

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        self.rules = dict(layouts)
        self._patterns = [re.compile(pattern) for pattern in layouts]
        self.unused = set(layouts)

    def __call__(self, path: str, shape: tuple[int, ...], lengths: Mapping[str, int]) -> Layout:
        """Returns the layout of a variable. Raises an `InvalidArgumentError` if it does not fit the variable."""
        pattern = self._find(path)
        if pattern is None:
            return (None,) * len(shape)
        return _checked(self.rules[pattern], path, shape, lengths, f'"{pattern}"')

    def of_output(self, path: str) -> Layout | None:
        """Returns the layout of a layer's output, by its path with "/output"; `None` if no rule matches."""
        pattern = self._find(path)
        return None if pattern is None else self.rules[pattern]

    def _find(self, path: str) -> str | None:
        if path in self.rules:
            found = [path]
        else:
            found = [p.pattern for p in self._patterns if p.fullmatch(path)]
        if len(found) > 1:
            raise InvalidArgumentError(
                f"Several layouts match the path {path!r}.",
                received={"layouts": found},
                hint="Change the patterns so that only one matches, or add the path as a key.",
            )
        self.unused.difference_update(found)
        return found[0] if found else None


class LayoutFunction:
    """Gets the layout of a variable from a user's function."""

    def __init__(self, function: Callable[[str, tuple[int, ...]], Layout]) -> None:
        self._function = function

    def __call__(self, path: str, shape: tuple[int, ...], lengths: Mapping[str, int]) -> Layout:
        """Returns the layout of a variable. Raises an `InvalidArgumentError` if it does not fit the variable."""
        return _checked(tuple(self._function(path, shape)), path, shape, lengths, f'".*{path}"')


def _checked(
    layout: Layout, path: str, shape: tuple[int, ...], lengths: Mapping[str, int], pattern: str
) -> Layout:
    names = [name for name in layout if name is not None]
    fits = len(layout) == len(shape) and all(
        name is None or (name in lengths and length % lengths[name] == 0)
        for name, length in zip(layout, shape, strict=True)
    )
    if not fits or len(set(names)) != len(names):
        raise InvalidArgumentError(
            f"The layout does not fit the variable {path!r}.",
            received={"shape": shape, "layout": layout, "mesh": dict(lengths)},
            hint="Give one entry per axis: None, or a mesh axis whose length divides it. Use no mesh axis twice.\n"
            f"For example, without sharding: {{{pattern}: {(None,) * len(shape)}}}",
        )
    return layout


def read_layouts(
    layout_map: Any, mesh: Mapping[str, int] | None
) -> tuple[dict[str, int], LayoutRules | LayoutFunction]:
    """Returns the axes of the mesh and the layouts, given Keras's objects or plain ones."""
    device_mesh = getattr(layout_map, "device_mesh", None)
    if device_mesh is not None and mesh is None:
        mesh = dict(zip(device_mesh.axis_names, device_mesh.shape, strict=True))
    is_function = callable(layout_map)
    if not (isinstance(layout_map, Mapping) or is_function) or not isinstance(mesh, Mapping) or not mesh:
        raise InvalidArgumentError(
            "`layout_map` is not a keras.distribution.LayoutMap with a device mesh, nor a mapping or function "
            "together with a `mesh`.",
            received={"layout_map": layout_map, "mesh": mesh},
            hint=_EXAMPLE,
        )
    for name, length in mesh.items():
        if not isinstance(name, str) or not isinstance(length, int) or length < 1:
            raise InvalidArgumentError(
                "An axis of `mesh` has a name that is not a string, or a length that is not a positive integer.",
                received={"mesh": dict(mesh)},
                hint=_EXAMPLE,
            )
    if is_function:
        return dict(mesh), LayoutFunction(layout_map)
    layouts: dict[str, Layout] = {
        pattern: tuple(getattr(layout, "axes", None) or layout) for pattern, layout in layout_map.items()
    }
    for name in {name: None for layout in layouts.values() for name in layout if name is not None}:
        check_axis(name, mesh)
    return dict(mesh), LayoutRules(layouts)


def check_axis(name: str, mesh: Mapping[str, int]) -> None:
    """Raises an `InvalidArgumentError` if a mesh does not have an axis."""
    if name not in mesh:
        raise InvalidArgumentError(
            f"The mesh has no axis {name!r}, but `batch_dim_name` or a layout uses it.",
            received={"mesh": dict(mesh)},
            hint=_EXAMPLE,
        )
