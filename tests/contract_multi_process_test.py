"""The global-batch contract: after `fit`, every number equals the one that a single device gives.

Backend × strategy × case. Each cell trains the same small model twice: with plain Keras on one device, and under
the strategy, in worker processes that are started once for each backend and strategy. The result is printed as a
matrix at the end (see conftest.py), and the README's support table is made from it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist.testing import WorkerPool
from kdist.testing.conformance import CONFIGURATIONS, compare, make_strategy, run_case
from tests.contract_cells import BACKENDS, CELLS, Cell

# A first step may have to compile on a busy machine; a hang is cut off here, with every worker's stack printed.
TIMEOUT = 180


class Pools:
    """The worker processes of one backend and configuration, kept until another one is asked for."""

    def __init__(self) -> None:
        self._key: tuple[str, str] | None = None
        self._pool: WorkerPool | None = None

    def get(self, backend: str, configuration: str) -> WorkerPool:
        if self._key != (backend, configuration):
            self.close()
            self._key = (backend, configuration)
            self._pool = WorkerPool(CONFIGURATIONS[configuration].num_workers, backend, timeout=TIMEOUT)
        assert self._pool is not None
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._key = self._pool = None


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def oracle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers of one device, shared by the processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "one-device"
    folder.mkdir(exist_ok=True)
    return folder


def _plain(name: str) -> Any:
    return run_case(name)


def _under_strategy(name: str, configuration: str) -> Any:
    return run_case(name, make_strategy(configuration))


def _prepare(configuration: str) -> None:
    """Creates the strategy before anything is computed, as a user's script does."""
    make_strategy(configuration)


def _oracle(pool: WorkerPool, backend: str, case: str, folder: Path) -> Any:
    path = folder / f"{backend}-{case}"
    if not path.exists():
        # Every worker runs it; what counts is that no strategy does.
        numbers = pool.run(_plain, case, timeout=TIMEOUT)[0]
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_bytes(pickle.dumps(numbers))
        part.rename(path)
    return pickle.loads(path.read_bytes())


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(c, id=str(c), marks=pytest.mark.xdist_group(f"{c.backend}-{c.configuration}"))
        for c in CELLS
    ],
)
def test_numbers_are_those_of_one_device(cell: Cell, pools: Pools, oracle_folder: Path) -> None:
    pool = pools.get(cell.backend, cell.configuration)
    try:
        pool.run(_prepare, cell.configuration, timeout=TIMEOUT)
        expected = _oracle(pool, cell.backend, cell.case, oracle_folder)
        actual = pool.run(_under_strategy, cell.case, cell.configuration, timeout=TIMEOUT)
    except BaseException:
        pools.close()  # workers that failed at different places must not run the next case together
        raise
    for numbers in actual:
        compare(cell.case, expected, numbers)


def test_every_backend_and_strategy_is_in_the_matrix() -> None:
    covered = {(cell.backend, cell.configuration) for cell in CELLS}
    assert covered == {(b, c.name) for c in CONFIGURATIONS.values() for b in c.backends}
    assert {b for b, _ in covered} == set(BACKENDS)
