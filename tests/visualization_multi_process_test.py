"""`kdist.visualize` returns the rows and the parts of variables on each device, compared with values by hand."""

from __future__ import annotations

import pickle
from typing import Any
from xml.etree import ElementTree

import pytest

from kdist.errors import InvalidArgumentError
from kdist.strategies.visualization import Visualization, _place
from tests.helpers.processes import each_backend, run, strategy

WHOLE = {
    "small/up/kernel": ((0, 8), (0, 16)),
    "small/up/bias": ((0, 16),),
    "small/down/kernel": ((0, 16), (0, 6)),
    "small/down/bias": ((0, 6),),
}


def model_of(one: Any) -> Any:
    import keras

    with one.scope():
        layers = [keras.layers.Dense(16, name="up"), keras.layers.Dense(6, name="down")]
        return keras.Sequential([keras.Input((8,)), *layers], name="small")


def seen(kind: str) -> tuple[Any, str]:
    import kdist

    made = {
        "mirrored": lambda: strategy(2),
        "central": lambda: strategy(3),
        "sharded": lambda: kdist.FullyShardedStrategy(min_size=2),
        "parallel": lambda: kdist.ModelParallelStrategy(
            {".*up/kernel": (None, "model")}, mesh={"batch": 1, "model": 2}
        ),
    }[kind]()
    shown = kdist.visualize(made, model_of(made), 9 if kind == "central" else 8)
    return pickle.loads(pickle.dumps(shown)), shown._repr_html_()


@each_backend
def test_mirrored_devices_share_the_rows_and_hold_everything(backend):
    ((shown, _),) = run(backend, 1, seen, "mirrored")
    assert list(shown.devices) == ["worker 0, cpu:0", "worker 0, cpu:1"]
    assert shown.rows == {"worker 0, cpu:0": (0, 4), "worker 0, cpu:1": (4, 8)}
    assert shown.parts == dict.fromkeys(shown.devices, WHOLE)
    assert str(shown).splitlines()[0] == "worker 0, cpu:0: 4 of 8 rows, 100% of the weights"


@each_backend
def test_workers_are_devices_too(backend):
    shown = [one for one, _ in run(backend, 2, seen, "mirrored")]
    assert shown[0] == shown[1]
    assert shown[0].rows == {"worker 0, cpu:0": (0, 4), "worker 1, cpu:0": (4, 8)}


@each_backend
def test_the_device_of_a_central_storage_holds_everything(backend):
    ((shown, _),) = run(backend, 1, seen, "central")
    held = {device: shown.share(device) for device in shown.devices}
    assert held == {"worker 0, cpu:0": 0, "worker 0, cpu:1": 1, "worker 0, cpu:2": 0}
    assert shown.parts["worker 0, cpu:1"] == WHOLE
    assert sum(stop - start for start, stop in shown.rows.values()) == 9


@pytest.mark.parametrize("backend", ["jax", "torch"], scope="module")
@pytest.mark.parametrize("kind", ["sharded", "parallel"])
def test_parts_of_variables_are_where_the_strategy_puts_them(backend, kind):
    (shown, picture), (other, _) = run(backend, 2, seen, kind)
    assert shown == other
    first, second = (shown.parts[device] for device in shown.devices)
    if kind == "parallel":
        assert first["small/up/kernel"] == ((0, 8), (0, 8)) and second["small/up/kernel"] == ((0, 8), (8, 16))
        assert first["small/down/kernel"] == WHOLE["small/down/kernel"] == second["small/down/kernel"]
        # On JAX, all devices along the axis "model" compute the same rows.
        assert shown.rows["worker 1, cpu:0"] == ((0, 8) if backend == "jax" else (4, 8))
    else:
        assert first["small/down/kernel"] == ((0, 8), (0, 6)) and second["small/down/kernel"] == (
            (8, 16),
            (0, 6),
        )
        assert shown.share(shown.devices[0]) == 0.5
    pictures = ElementTree.fromstring(f"<div>{picture}</div>")
    assert [one.get("aria-label").split(":")[0] for one in pictures] == ["worker 0, cpu", "worker 1, cpu"]


def test_the_picture_is_wide_enough_for_its_variables():
    large = {f"layer_{number}/kernel": (1000, 1000) for number in range(5)}
    picture = Visualization(["cpu:0"], 8, {}, large, {"cpu:0": {}})._repr_html_()
    root = ElementTree.fromstring(picture)
    boxes = [(float(one.get("x")), float(one.get("width"))) for one in root.iter("rect")]
    assert len(boxes) == 8 + 4
    assert max(left + width for left, width in boxes) < float(root.get("width"))


def refused() -> None:
    import keras

    import kdist

    with strategy().scope():
        model = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(InvalidArgumentError, match="not built"):
        kdist.visualize(strategy(), model)


@each_backend
def test_a_model_without_variables_is_refused(backend):
    run(backend, 1, refused)


@pytest.mark.kills("visualize_mixes_mesh_axes")
def test_the_last_axis_of_a_mesh_is_the_fastest():
    mesh = {"batch": 2, "model": 3}
    assert [_place(number, mesh) for number in (0, 1, 3, 5)] == [
        {"batch": 0, "model": 0},
        {"batch": 0, "model": 1},
        {"batch": 1, "model": 0},
        {"batch": 1, "model": 2},
    ]
