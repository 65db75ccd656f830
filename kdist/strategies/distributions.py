"""Conversion of strategies to `keras.distribution`, and the check of an active distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdist import gaps
from kdist.backends import get_backend
from kdist.backends.contract import Runtime
from kdist.errors import StrategyScopeError
from kdist.strategies.layouts import LayoutRules, read_layouts
from kdist.topology import Central, Sharded

if TYPE_CHECKING:
    import keras

    from kdist.context import StrategyLike


def distribution_of(runtime: Runtime) -> keras.distribution.Distribution:
    """Returns the equivalent distribution of a runtime; see `Strategy.keras_distribution`."""
    import keras

    library: Any = keras.distribution
    storage = runtime.topology.storage
    kind = "CentralStorageStrategy" if isinstance(storage, Central) else "Strategy"
    gaps.require(kind, get_backend().name, "distribution")
    if not isinstance(storage, Sharded):
        return library.DataParallel(devices=runtime.all_devices, auto_shard_dataset=False)
    lengths = _lengths(runtime, storage)
    mesh = library.DeviceMesh(tuple(lengths.values()), list(lengths), runtime.all_devices)
    strategy_layout = storage.layout

    class Divided(library.ModelParallel):
        """Uses the layout of the strategy, because Keras's layout map does not receive a variable's shape."""

        layout = staticmethod(strategy_layout)

        def get_variable_layout(self, variable: keras.Variable) -> keras.distribution.TensorLayout:
            if getattr(variable, "_layout", None) is not None:
                return variable._layout
            axes = strategy_layout(variable.path, tuple(variable.shape), lengths)
            fitting = zip(axes, variable.shape, strict=True)  # Keras does not pad
            return library.TensorLayout([a if a and n % lengths[a] == 0 else None for a, n in fitting], mesh)

    layout_map = library.LayoutMap(mesh)
    for pattern, axes in getattr(strategy_layout, "rules", {}).items():
        layout_map[pattern] = axes
    return Divided(layout_map=layout_map, batch_dim_name=storage.batch_axis, auto_shard_dataset=False)


def check_current(strategy: StrategyLike) -> None:
    """Raises a `StrategyScopeError` if the active `keras.distribution` is not equivalent to the strategy."""
    import keras

    current = keras.distribution.distribution()
    if current is None:
        return
    runtime = strategy.runtime
    storage = runtime.topology.storage
    own: tuple[object, ...] = (runtime.all_devices, None, None, None)
    if isinstance(storage, Sharded):
        own = (runtime.all_devices, _lengths(runtime, storage), storage.batch_axis, storage.layout)
    if isinstance(storage, Central) or _comparable(facts_of(current)) != _comparable(own):
        raise StrategyScopeError(
            "The active keras.distribution conflicts with the strategy.",
            received={"distribution": current, "its_devices": facts_of(current)[0], "strategy": strategy},
            hint="Remove the call of keras.distribution.set_distribution, or use "
            "kdist.KerasDistributionStrategy(distribution).",
        )


def _lengths(runtime: Runtime, storage: Sharded) -> dict[str, int]:
    return dict(zip(storage.axes, storage.mesh_shape(len(runtime.all_devices)), strict=True))


def facts_of(
    distribution: keras.distribution.Distribution,
) -> tuple[list[str], dict[str, int] | None, Any, Any]:
    """Returns devices, axes, batch axis and layout of a distribution; without sharding, only devices."""
    mesh = distribution.device_mesh
    names = [str(name) for name in mesh.devices.flatten()]
    axes = dict(zip(mesh.axis_names, map(int, mesh.shape), strict=True))
    layout_map = getattr(distribution, "_layout_map", None)
    if layout_map is None and len(axes) == 1:
        return names, None, None, None
    layout = getattr(distribution, "layout", None)  # set if `distribution_of` created the distribution
    if layout is None:
        layout = LayoutRules({}) if layout_map is None else read_layouts(layout_map, None)[1]
    return names, axes, distribution.batch_dim_name, layout


def _comparable(facts: tuple[object, ...]) -> tuple[object, ...]:
    """Replaces a layout with its rules, which are equal if their contents are equal."""
    *others, layout = facts
    return *others, getattr(layout, "rules", layout)
