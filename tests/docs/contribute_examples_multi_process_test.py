"""Runs the example of the page on writing a strategy, and checks the pages on strategies and backends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kdist import unsupported
from tests.contract_cells import CELLS
from tests.docs.examples import Run, each_example, run_example, runs
from tests.docs.things import assert_same, new_model, rows
from tests.helpers.environment import ROOT
from tests.helpers.processes import run
from tests.pages import backend
from tests.pages.pictures import HOLDERS


@runs(on="jax")
def contribute_a_strategy_0(example: Run) -> None:
    from kdist.errors import InvalidArgumentError

    made = example(make_model=lambda: new_model(plain=True), **rows())
    plain = new_model(plain=True)
    plain.fit(*rows().values(), batch_size=128, epochs=5, verbose=0)
    assert_same(plain, made["model"])
    kernel = made["model"].layers[0].kernel.value
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(8, 2)}, "half of the columns each"
    with pytest.raises(InvalidArgumentError):
        made["ColumnStrategy"](min_columns=0)


@each_example(globals())
def test_example(backend: str, name: str, tmp_path: Path) -> None:
    run_example(globals(), backend, name, tmp_path)


def test_every_abstract_class_of_the_backends_is_on_the_page() -> None:
    assert set(backend.CLASSES) == set(backend.abstract_classes())
    named = re.findall(r"one_device\[([a-z0-9_-]+)\]", backend.PAGE.read_text(encoding="utf-8"))
    assert named and set(named) <= set(map(str, CELLS))


def storages() -> dict[str, str]:
    """Returns the class that stores the variables of each strategy in the picture. Call it in a worker."""
    from tests.contract.support import STRATEGIES, make_strategy

    names = {name.rpartition(".")[2]: name for name in STRATEGIES}
    return {
        short: type(make_strategy(names[short]).runtime.topology.storage).__name__
        for short in HOLDERS
        if short in names
    }


@pytest.mark.xdist_group("pool-jax")
def test_the_picture_says_who_holds_the_variables() -> None:
    (found,) = run("jax", 1, storages)
    assert len(found) == len(HOLDERS) - 1, "all but parameter servers"
    for strategy, storage in found.items():
        _, devices = HOLDERS[strategy]
        computing = [parts for _, _, rows, parts in devices if rows]
        if storage == "Mirrored":
            assert all(len(parts) == 4 for parts in computing), strategy
        elif storage == "Central":
            assert not any(computing) and len(devices[-1][3]) == 4, strategy
        else:
            assert all(len(parts) == 2 for parts in computing), strategy


def test_the_tree_of_questions_knows_the_gaps() -> None:
    shown = (ROOT / "docs" / "choice.svg").read_text(encoding="utf-8")
    assert "or ModelParallelStrategy; JAX, PyTorch" in shown and "Is it JAX on TPUs?" in shown
    for strategy, able in (
        ("FullyShardedStrategy", {"jax", "torch"}),
        ("ModelParallelStrategy", {"jax", "torch"}),
        ("TPUStrategy", {"jax"}),
    ):
        assert {
            b for b in ("tensorflow", "jax", "torch") if unsupported.find(strategy, b, "create") is None
        } == able
