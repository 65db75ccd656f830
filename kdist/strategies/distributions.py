"""Conversion of strategies to `keras.distribution`, and the check of an active distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdist import unsupported
from kdist.backends import get_backend
from kdist.backends.contract import Runtime
from kdist.errors import StrategyScopeError
from kdist.strategies.layouts import LayoutRules, read_layouts

if TYPE_CHECKING:
    import keras

    from kdist.context import StrategyLike


def distribution_of(runtime: Runtime) -> keras.distribution.Distribution:
    """Returns the equivalent distribution of a runtime; see `Strategy.keras_distribution`."""
    import keras

    library: Any = keras.distribution
    sharded = runtime.topology.sharded
    kind = "CentralStorageStrategy" if runtime.topology.is_central else "Strategy"
    unsupported.check(kind, get_backend().name, "distribution")
    if sharded is None:
        return library.DataParallel(devices=runtime.all_devices, auto_shard_dataset=False)
    lengths = sharded.lengths(len(runtime.all_devices))
    mesh = library.DeviceMesh(tuple(lengths.values()), list(lengths), runtime.all_devices)
    strategy_layout = sharded.layout

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
    return Divided(layout_map=layout_map, batch_dim_name=sharded.batch_axis, auto_shard_dataset=False)


def check_current(strategy: StrategyLike) -> None:
    """Raises a `StrategyScopeError` if the active `keras.distribution` is not equivalent to the strategy."""
    import keras

    current = keras.distribution.distribution()
    if current is None:
        return
    runtime = strategy.runtime
    devices = runtime.all_devices
    own: tuple[object, ...] = (devices, None, None, None)
    if sharded := runtime.topology.sharded:
        own = (devices, sharded.lengths(len(devices)), sharded.batch_axis, sharded.layout)
    if runtime.topology.is_central or _comparable(facts_of(current)) != _comparable(own):
        raise StrategyScopeError(
            "The active keras.distribution conflicts with the strategy.",
            received={"distribution": current, "its_devices": facts_of(current)[0], "strategy": strategy},
            hint="Remove the call of keras.distribution.set_distribution, or use "
            "kdist.KerasDistributionStrategy(distribution).",
        )


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
