"""Each worker saves the parts of sharded variables that it holds, and no worker gathers them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdist.checkpoint.checked_reading import read_index, read_tensors, verify
from kdist.checkpoint.index import Index
from tests.helpers.compare import assert_equal
from tests.sharding import jobs
from tests.sharding.sharded_multi_process_test import TORCH_WORKERS, TWO_WORKERS, Pools, pools

__all__ = ["pools"]

TWICE_TWO_DEVICES = ("jax", 2, 2)
FOUR_TORCH_WORKERS = ("torch", 4, 1)


def save(name: str, folder: str, is_shared: bool) -> tuple[str, dict[str, np.ndarray], list[str]]:
    """Trains and saves a model. Returns the path, the values, and the sharded variables that were gathered."""
    import kdist

    strategy = jobs.strategy(name)
    runtime, gathered = strategy.runtime, []
    with strategy.scope():
        model = jobs.small()
    model.fit(*jobs.rows(), batch_size=8, shuffle=False, verbose=0)
    checkpoint, kept_whole = kdist.Checkpoint(model=model), runtime.kept_whole

    def note(variables: Any) -> Any:
        gathered.extend(variable.path for variable in variables if "kernel" in variable.path)
        return kept_whole(variables)

    runtime.kept_whole = note
    try:
        place = folder if is_shared else os.path.join(folder, str(runtime.worker_index))
        path = checkpoint.save(place)
    finally:
        runtime.kept_whole = kept_whole
    checkpoint.wait()
    return path, {_name(v.path): np.asarray(v) for v in model.variables}, gathered


def _name(path: str) -> str:
    """Returns the name in a checkpoint: without the model, and without numbers that Keras adds."""
    return re.sub(r"_[0-9]+(?=/)", "", path).partition("/")[2]


@pytest.mark.kills(
    sharded_variables_gathered_to_save="[jax-2]",
    saved_parts_of_all_copies_jax="[jax-2x2-mesh]",
    saved_parts_of_all_copies_torch="[torch-4-mesh]",
    sharded_variable_stored_in_version_1="[jax-2]",
)
@pytest.mark.parametrize(
    ("place", "name", "writers"),
    [
        pytest.param(TWO_WORKERS, "fully", [0, 1], id="jax-2"),
        pytest.param(TORCH_WORKERS, "fully", [0, 1], id="torch-2"),
        # Two workers hold copies of each part and take turns.
        pytest.param(TWICE_TWO_DEVICES, "model", [0, 1], id="jax-2x2-mesh"),
        pytest.param(FOUR_TORCH_WORKERS, "model", [0, 3], id="torch-4-mesh"),
    ],
)
@pytest.mark.in_turn(4)
def test_workers_save_their_parts_without_gathering(
    place: Any, name: str, writers: list[int], pools: Pools, tmp_path: Path
) -> None:
    everyone = pools.run(place, save, name, str(tmp_path), True)
    path, values, _ = everyone[0]
    assert [gathered for *_, gathered in everyone] == [[]] * place[1]
    index = read_index(path)
    found = {tensor.name.split("/", 2)[2]: tensor for tensor in index.tensors if tensor.name[:6] == "model/"}
    up = found["up/kernel"]  # its second axis is sharded
    assert (up.shape, up.axis) == ((6, 8), 1)
    assert [(piece.file, piece.first, piece.last) for piece in up.pieces] == [
        (writers[0], 0, 24),
        (writers[1], 24, 48),
    ]
    with open(os.path.join(path, index.files[writers[1]].name), "rb") as file:
        file.seek(up.pieces[1].offset)
        stored = np.frombuffer(file.read(24 * 4), "float32")
    assert_equal(stored.reshape(4, 6), values["up/kernel"].T[4:])
    assert first_line(path).startswith(b'{"format": "kdist.checkpoint", "version": 2')
    check_values(path, index, values)


@pytest.mark.kills("sharded_parts_saved_without_the_others")
@pytest.mark.in_turn(4)
def test_workers_without_a_shared_directory_save_all_parts(pools: Pools, tmp_path: Path) -> None:
    for path, values, _ in pools.run(TWO_WORKERS, save, "fully", str(tmp_path), False):
        check_values(path, verify(path), values)
        assert first_line(path).startswith(b'{"format": "kdist.checkpoint", "version": 1')


def restore(
    name: str, path: str
) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, list[tuple[int, int]]]]:
    """Returns the values after a restore, the values of its file, and the stored elements that this worker read."""
    import kdist
    from kdist.checkpoint import sharded

    with jobs.strategy(name).scope():
        model = jobs.small()
    found: dict[str, list[tuple[int, int]]] = {}
    read_ranges = sharded.read_ranges

    def note(path: str, index: Index, ranges: Any, *shown: Any) -> Any:
        for tensor, first, last in ranges:
            found.setdefault(tensor.name.split("/", 2)[2], []).append((first, last))
        return read_ranges(path, index, ranges, *shown)

    sharded.read_ranges = note
    try:
        kdist.Checkpoint(model=model).restore(path)
    finally:
        sharded.read_ranges = read_ranges
    index = read_index(path)
    saved = read_tensors(path, index, [tensor for tensor in index.tensors if tensor.name[:6] == "model/"])
    return [np.asarray(v) for v in model.variables], list(saved.values()), found


@pytest.mark.kills(
    sharded_variables_read_whole="[jax]",
    pieces_cut_at_their_start="[torch]",
    pieces_read_once_per_device="[jax-2x2-mesh]",
)
@pytest.mark.parametrize(
    ("place", "name", "other", "parts"),
    [
        (TWO_WORKERS, "fully", TWO_WORKERS, [[(0, 24)], [(24, 48)]]),
        # Each of four workers needs half of a piece.
        (TORCH_WORKERS, "fully", FOUR_TORCH_WORKERS, [[(0, 12)], [(12, 24)], [(24, 36)], [(36, 48)]]),
        (TWICE_TWO_DEVICES, "model", TWICE_TWO_DEVICES, [[(0, 48)]] * 2),
    ],
    ids=["jax", "torch", "jax-2x2-mesh"],
)
@pytest.mark.in_turn(3)
def test_workers_read_their_parts_only(
    place: Any, name: str, other: Any, parts: Any, pools: Pools, tmp_path: Path
) -> None:
    path, values, _ = pools.run(place, save, name, str(tmp_path), True)[0]
    everyone = pools.run(other, restore, name, path)
    for restored, saved, _ in everyone:
        assert_equal(restored, saved)
        assert_equal(restored[0], values["up/kernel"])
    assert [read["up/kernel"] for *_, read in everyone] == parts


def save_and_restore(
    name: str, shapes: dict[str, tuple[tuple[int, ...], str]], folder: str, spoils: bool
) -> str:
    """Saves weights of a layer with the name "up", and restores them into other values. Returns the path."""
    import keras

    import kdist

    class Layer(keras.layers.Layer):
        def build(self, input_shape: Any) -> None:
            for weight, (shape, dtype) in shapes.items():
                self.add_weight(shape=shape, name=weight, dtype=dtype, initializer="glorot_uniform")
            if keras.backend.backend() == "torch":
                import torch

                self.module = keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(4))
                self.module.module.running_mean.fill_(seed)

    layers = []
    for seed in (1, 2):
        keras.utils.set_random_seed(seed)
        with jobs.strategy(name).scope():
            layers.append(Layer(name="up"))
            layers[-1].build((None, 4))
    saved, restored = layers
    checkpoint = kdist.Checkpoint(layer=saved)
    checkpoint.save(folder)  # in the background
    path = checkpoint.save(folder, asynchronous=False)
    if spoils:  # as a failed step does
        for variable in restored.weights:
            if "kernel" in variable.path:
                variable._value.delete()
    kdist.Checkpoint(layer=restored).restore(path)
    for old, new in zip(saved.weights, restored.weights, strict=True):
        values = [keras.ops.convert_to_numpy(v).astype("float32") for v in (old, new)]
        np.testing.assert_array_equal(*values, old.path)
    if hasattr(restored, "module"):
        assert (restored.module.module.running_mean == 1).all()
    return path


@pytest.mark.kills(
    buffers_as_sharded_variables="[torch]",
    float64_in_parts_of_float32="[jax]",
    parts_without_elements="[jax]",
    parts_of_lost_values="[lost]",
)
@pytest.mark.parametrize(
    ("place", "spoils"),
    [(TWICE_TWO_DEVICES, False), (TWICE_TWO_DEVICES, True), (TORCH_WORKERS, False)],
    ids=["jax", "lost", "torch"],
)
@pytest.mark.in_turn(3)
def test_weights_of_any_dtype_and_shape(place: Any, spoils: bool, pools: Pools, tmp_path: Path) -> None:
    shapes = {
        "kernel": ((3, 4), "bfloat16"),
        "half": ((5, 3), "float16"),
        "double": ((6, 4), "float64"),
        "nothing": ((0, 4), "float32"),
        "scalar": ((), "float32"),
    }
    for name in ("fully", "model"):
        folder = str(tmp_path / name)
        verify(pools.run(place, save_and_restore, name, shapes, folder, spoils)[0])
        # Only the layout of `ModelParallelStrategy` shards arrays without elements.
        empty = {"kernel": ((0, 4), "float32")}
        verify(pools.run(place, save_and_restore, name, empty, folder, False)[0])


def first_line(path: str) -> bytes:
    with open(os.path.join(path, "index.json"), "rb") as file:
        return file.readline()


def check_values(path: str, index: Index, values: dict[str, np.ndarray]) -> None:
    found = {name.split("/", 2)[2]: array for name, array in read_tensors(path, index, index.tensors).items()}
    assert values.keys() <= found.keys()
    for name, value in values.items():
        assert_equal(found[name], value)
