"""`keras.distribution` and strategies convert into each other, and conflicts between them raise errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdist.testing import free_ports
from tests.helpers.compare import assert_close
from tests.helpers.models import state_of
from tests.helpers.processes import run, run_plain, strategy
from tests.helpers.scripts import Script, environments_of, finished
from tests.sharding import jobs


def _trained(model: Any, rows: int = 21) -> list[np.ndarray]:
    model.fit(*jobs.rows(rows), batch_size=8, shuffle=False, verbose=0)
    return state_of(model)


def plain() -> tuple[list[np.ndarray], list[np.ndarray]]:
    return _trained(jobs.small()), _trained(jobs.small(), 16)


def as_strategies() -> tuple[list[Any], list[str], list[str]]:
    """Trains under strategies from each distribution, set or not; returns the results, facts and errors."""
    import keras

    import kdist

    library = keras.distribution
    names = ["cpu:0", "cpu:1"]
    parallel = library.DataParallel(devices=names)
    layout_map = library.LayoutMap(library.DeviceMesh((1, 2), ["batch", "model"], names))
    layout_map[".*/up/kernel"] = (None, "model")
    model_parallel = library.ModelParallel(layout_map=layout_map)
    values, facts, refused = [], [], []
    for distribution in (parallel, model_parallel):
        for is_set in (False, True):
            library.set_distribution(distribution if is_set else None)
            ours = kdist.KerasDistributionStrategy(distribution)
            with ours.scope():
                assert library.distribution() is None
                model = jobs.small()
            values.append(_trained(model))
            assert library.distribution() is (distribution if is_set else None)
            library.set_distribution(ours.keras_distribution)
            with ours.scope():
                facts.append(str(ours.keras_distribution.get_variable_layout(model.layers[0].kernel).axes))
            library.set_distribution(None)
    mirrored = strategy()
    library.set_distribution(mirrored.keras_distribution)
    with mirrored.scope():
        values.append(_trained(jobs.small()))
    outside = jobs.small()  # made only by Keras, so kdist leaves it unchanged
    facts.append(str(tuple(outside.layers[0].kernel.value.sharding.spec)))
    values.append(_trained(outside, 16))  # Keras needs batches that the devices can split evenly
    library.set_distribution(None)
    library.set_distribution(kdist.FullyShardedStrategy(names, min_size=2).keras_distribution)
    for shape in ((6, 3), (7, 3)):  # Keras does not shard an axis unevenly
        facts.append(str(tuple(keras.Variable(np.ones(shape, "float32")).value.sharding.spec)))
    library.set_distribution(None)
    tries = [
        (model_parallel, lambda: kdist.MirroredStrategy(names)),
        (model_parallel, lambda: mirrored.scope().__enter__()),
        (parallel, lambda: kdist.FullyShardedStrategy(names)),
        (parallel, lambda: kdist.KerasDistributionStrategy(model_parallel)),
        (None, lambda: kdist.KerasDistributionStrategy("data")),
        (None, lambda: kdist.experimental.CentralStorageStrategy(names, "cpu:0").keras_distribution),
    ]
    for current, function in tries:
        library.set_distribution(current)
        try:
            function()
            refused.append("nothing")
        except kdist.errors.KdistError as error:
            refused.append(f"{type(error).__name__}: {error}")
        finally:
            library.set_distribution(None)
    return values, facts, refused


@pytest.mark.kills("keras_distribution_ignored")
def test_distributions_are_strategies_and_the_other_way_round() -> None:
    uneven, even = run_plain("jax", plain)
    ((values, facts, refused),) = run("jax", 1, as_strategies)
    for actual, expected in zip(values, [uneven] * 5 + [even], strict=True):
        assert_close(actual, expected, atol=5e-6)
    of_fully = ["('replica', None)", "(None, None)"]
    assert facts == ["(None, None)"] * 2 + ["(None, 'model')"] * 2 + ["(None, None)", *of_fully]
    for said, kind in zip(refused, ["StrategyScopeError"] * 4, strict=False):
        assert said.startswith(kind), said
        assert "device_mesh" in said
        assert "Strategy" in said
    assert refused[4].startswith("InvalidArgumentError: `distribution` is not a")
    assert refused[5].startswith("UnsupportedError")


def plain_without_normalization() -> list[np.ndarray]:
    return _trained(jobs.small(False))


def as_strategies_of_workers() -> tuple[list[Any], list[Any], str]:
    """Does the same on PyTorch, whose workers have one device each; DataParallel allows several devices."""
    import keras

    import kdist

    library = keras.distribution
    names = ["cpu:0", "cpu:1"]
    layout_map = library.LayoutMap(library.DeviceMesh((1, 2), ["batch", "model"], names))
    layout_map[".*/up/kernel"] = (None, "model")
    parallel, model_parallel = (
        library.DataParallel(devices=names),
        library.ModelParallel(layout_map=layout_map),
    )
    values, facts, refused = [], [], ""
    divides = int(os.environ["WORLD_SIZE"]) > 1
    for distribution in (parallel, model_parallel)[: 1 + divides]:
        library.set_distribution(distribution)
        ours = kdist.KerasDistributionStrategy(distribution)
        with ours.scope():
            model = jobs.small(False)  # without BatchNormalization, which is per replica there
        library.set_distribution(None)
        values.append(_trained(model))
        own = ours.keras_distribution
        facts.append([type(own).__name__, [str(n) for n in own.device_mesh.devices.flatten()]])
        facts[-1].append(jobs.held(model) < 0.9 * sum(v.nbytes for v in values[-1]))
    library.set_distribution(model_parallel)
    try:
        kdist.KerasDistributionStrategy(parallel)
    except kdist.errors.StrategyScopeError as error:
        refused = str(error)
    library.set_distribution(None)
    return values, facts, refused


@pytest.mark.kills(keras_distribution_workers_named_alike="[2]")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_distributions_are_strategies_on_pytorch(num_workers: int) -> None:
    expected = run_plain("torch", plain_without_normalization)
    for values, facts, refused in run("torch", num_workers, as_strategies_of_workers):
        for actual in values:
            assert_close(actual, expected, atol=5e-6)
        assert [(names, is_less) for _, names, is_less in facts] == [
            (["cpu:0", "cpu:1"], False),
            (["cpu:0", "cpu:1"], True),
        ][:num_workers]
        assert "conflicts with the strategy" in refused


def without() -> list[str]:
    import keras

    import kdist

    said = []
    for function in (
        lambda: strategy().keras_distribution,
        lambda: kdist.KerasDistributionStrategy(keras.distribution),
        lambda: kdist.FullyShardedStrategy(["cpu:0", "cpu:1"]),
    ):
        try:
            function()
            said.append("nothing")
        except kdist.errors.UnsupportedError as error:
            said.append(str(error))
    return said


def test_an_error_reports_that_tensorflow_ignores_keras_distribution() -> None:
    ((amounts, strategy_of, sharded),) = run("tensorflow", 1, without)
    assert "ignores keras.distribution" in amounts
    assert "ignores keras.distribution" in strategy_of
    assert "cannot shard" in sharded


FRESH = """
import jax, keras, kdist
{first}
strategy = kdist.KerasDistributionStrategy(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
print("REPLICAS", strategy.num_replicas_in_sync)
"""


@pytest.mark.kills("keras_distribution_devices_not_made")
def test_keras_starts_jax_so_that_devices_must_be_there_before(tmp_path: Path) -> None:
    first = 'jax.config.update("jax_num_cpu_devices", 2)'
    env = {"KERAS_BACKEND": "jax"}
    late = Script(tmp_path, "late", FRESH.format(first=""), env)
    assert late.wait() != 0
    assert "DeviceError: Cannot create logical CPU devices" in late.stderr()
    assert first in late.stderr()
    in_time = Script(tmp_path, "in_time", FRESH.format(first=first), env).finish()
    assert "REPLICAS 2" in in_time.stdout()


SESSION = """
import os
import jax
rank = int(os.environ["RANK_HERE"])
jax.distributed.initialize("127.0.0.1:{port}", 2, rank)
import keras, kdist, numpy as np
if {refused}:
    try:
        kdist.FullyShardedStrategy()
    except kdist.errors.StrategyScopeError as error:
        print("REFUSED", error, flush=True)
else:
    strategy = kdist.KerasDistributionStrategy(keras.distribution.DataParallel())
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((5, 3)), np.ones(5), verbose=0)
    print("TRAINED", strategy.num_replicas_in_sync, strategy.keras_distribution.device_mesh.shape, flush=True)
"""


@pytest.mark.kills(jax_session_of_another_cluster="[refused]")
@pytest.mark.parametrize("is_refused", [False, True], ids=["adopted", "refused"])
def test_a_session_of_jax_distributed_is_adopted_if_it_is_the_cluster_s(
    is_refused: bool, tmp_path: Path
) -> None:
    ports = free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    source = SESSION.format(port=ports[0], refused=is_refused)
    environments = environments_of("jax", addresses)
    if is_refused:  # the cluster of the environment has the workers in reverse order
        environments = [env | {"RANK_HERE": str(1 - rank)} for rank, env in enumerate(environments)]
    wanted = "REFUSED The existing session of jax.distributed" if is_refused else "TRAINED 2 (2,)"
    for script in finished(tmp_path, source, environments, 120):
        assert wanted in script.stdout(), script.output()
