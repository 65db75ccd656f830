"""The global-batch contract: after `fit`, every number equals the number from a single device.

Each cell is a backend, a strategy and a case. It trains the same small model with plain Keras on one device, and under
the strategy. Plain Keras runs in a process without kdist's changes to Keras. The next cell uses the same workers.
The tests print a matrix of the results at the end, from which the table of docs/contract.md is generated.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdist.testing import WorkerFailure
from tests.contract import CASES, CONFIGURATIONS, compare, make_strategy, run_case
from tests.contract_cells import BACKENDS, CELLS, Cell, missing_cells, missing_pairs
from tests.contract_paths import check_path, path_of_steps
from tests.contract_pools import Pools, without_kdist
from tests.helpers import processes
from tests.helpers.environment import CACHE, ROOT
from tests.helpers.foreign_backward import foreign_backward
from tests.helpers.processes import full_unless

# The packages that determine the results of plain Keras.
_DECIDING = (
    "keras",
    "keras-nightly",
    "numpy",
    "tensorflow",
    "tensorflow-cpu",
    "jax",
    "jaxlib",
    "torch",
    "keras-hub",
)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def oracle_folder() -> Path:
    """The directory of results from one device, which depend on the cases, versions and compiler options."""
    content = hashlib.sha256()
    for path in sorted((ROOT / "tests" / "contract").glob("*.py")):
        content.update(path.read_bytes())
    versions = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    known = {name: versions.get(name) for name in _DECIDING}
    content.update(repr((sys.version, known, processes.forks, os.environ.get("XLA_FLAGS"))).encode())
    folder = CACHE / "oracles" / content.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _under_strategy(name: str, configuration: str, is_foreign: bool = False) -> Any:
    with warnings.catch_warnings(), foreign_backward() if is_foreign else contextlib.nullcontext():
        # The contract holds here, so kdist must not warn about different results.
        warnings.filterwarnings("error", message=".* gives different results with")
        strategy = make_strategy(configuration)
        if strategy is None:
            return None
        with path_of_steps() as path:
            return run_case(name, strategy), path


def _oracle(pools: Pools, backend: str, case: str, folder: Path) -> Any:
    path = folder / f"{backend}-{case}"
    if not path.exists():
        numbers = pools.plain().run(without_kdist, run_case, case)[0]
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_bytes(pickle.dumps(numbers))
        part.rename(path)
    return pickle.loads(path.read_bytes())


def _keras_version() -> tuple[int, ...]:
    """Returns the first two numbers of the version of the installed Keras, which may be a nightly version."""
    names = {"keras", "keras-nightly"}
    (found, *_) = [d.version for d in importlib.metadata.distributions() if d.metadata["Name"] in names]
    return tuple(map(int, found.split(".")[:2]))


# Known failures of the contract: strict, so that the test fails when they pass.
_NOT_YET = pytest.mark.xfail(
    reason="Keras 3.16 on TensorFlow: the reported losses of single outputs are off where batches are uneven",
    strict=True,
)


def _params() -> Iterator[Any]:
    nightly = _keras_version() >= (3, 16)
    for cell in CELLS:
        marks: list[Any] = full_unless(cell.is_pair)
        marks.append(pytest.mark.xdist_group(f"contract-{cell.backend}-{cell.configuration}"))
        if nightly and cell.backend == "tensorflow" and cell.case in ("losses_of_outputs", "attention"):
            marks.append(_NOT_YET)
        needs = CASES[cell.case].needs
        if needs and importlib.util.find_spec(needs) is None:
            marks.append(pytest.mark.skip(reason=f"{needs} is not installed"))
        yield pytest.param(cell, id=str(cell), marks=marks)


@pytest.mark.kills(
    central_torch_statistics_not_written_back="[torch-central-2-regression_metrics]",
    class_weight_ignored_on_one_backend="[torch-mirrored-2-class_weight]",
    clipnorm_before_the_sum="[torch-workers-2-clipnorm]",
    jax_sums_left_to_xla="[jax-workers-2-sgd]",
    jax_rows_lost="[jax-workers-2-uneven_batches]",
    jax_rows_of_the_first_worker="[jax-workers-2-backend_tensors]",
    logs_of_one_replica="[torch-workers-2x2-custom_train_step]",
    masks_of_one_replica="[torch-workers-2x2-masks]",
    masked_weights_not_scaled_in_place="[torch-mirrored-2-masks_with_weights]",
    mean_of_averaged_variables_lost="[torch-workers-2-stateful_layer]",
    metrics_of_one_replica="[torch-workers-2x2-regression_metrics]",
    numbers_of_no_value="[jax-workers-2x2-sgd]",
    one_row_counted_by_all="[torch-workers-2-one_row_left]",
    overflow_of_one_replica_seen_by_it_alone="[torch-mirrored-2-overflow]",
    replicas_do_not_watch_unfrozen_layers="[tensorflow-central-2-fine_tuning]",
    sample_weights_of_one_replica="[torch-workers-2x2-reduction_mean_with_sample_weight]",
    scalar_counts_as_one_row="[torch-mirrored-2-custom_metrics]",
    scalar_loss_in_other_dtypes="[torch-mirrored-3-scalar_loss_with_weights]",
    scalar_loss_times_the_mask_of_one_replica="[torch-workers-2x2-masks]",
    scaled_loss_not_weighted="[torch-mirrored-3-loss_scaling]",
    scaled_loss_weighted_twice_by_several_optimizers="[torch-mirrored-3-several_optimizers]",
    servers_build_several_optimizers_as_one="[torch-servers-in-turn-several_optimizers]",
    servers_ignore_steps_of_several_optimizers="[jax-servers-in-turn-several_optimizers]",
    servers_clip_by_themselves="[torch-servers-in-turn-global_clipnorm]",
    servers_decay_names_that_were_excluded="[torch-servers-in-turn-adamw_with_exclusions]",
    servers_decay_variables_that_were_excluded="[torch-servers-2-adamw_with_exclusions]",
    servers_keep_old_trainable_flags="[jax-servers-2-fine_tuning]",
    servers_mix_up_several_optimizers="[torch-servers-2-several_optimizers]",
    servers_slots_elsewhere="[torch-servers-in-turn-adamw]",
    tensorflow_ema_per_replica="[tensorflow-workers-3-ema_overwrite]",
    tensorflow_embeddings_made_dense="[tensorflow-workers-2-embedding_adam]",
    tensorflow_embeddings_of_rows_that_all_have="[tensorflow-mirrored-3-embedding_adamw_clipped]",
    tensorflow_replicas_weigh_alike="[tensorflow-mirrored-2-uneven_batches]",
    tensorflow_xla_loses_losses="[tensorflow-workers-3-embedding_jit]",
    torch_copies_not_refreshed="[torch-mirrored-2-sgd]",
    torch_gradient_summed_twice="[torch-mirrored-2-sgd]",
    torch_moments_of_one_replica="[torch-workers-2x2-synchronized_batch_normalization]",
    torch_predictions_swapped="[torch-workers-2x2-uneven_batches]",
    torch_replicas_weigh_alike="[torch-workers-2x2-uneven_batches]",
    torch_sample_weights_not_replayed="[torch-workers-2-masks_with_weights]",
    torch_workers_not_summed="[torch-workers-2-reduction_sum_over_batch_size]",
    validation_cut_short="[torch-workers-2x2-validation]",
    weights_of_a_batch_are_zero="[torch-workers-2-zero_weights]",
)
@pytest.mark.parametrize("cell", _params())
def test_numbers_are_those_of_one_device(
    cell: Cell, pools: Pools, oracle_folder: Path, pytestconfig: pytest.Config
) -> None:
    _check(cell, pools, oracle_folder, pytestconfig.getoption("--foreign-backward"))


# Cells whose backward pass recomputes values, in each kind of strategy. `--foreign-backward` runs all cells this way.
_RECOMPUTED = [
    cell
    for cell in CELLS
    if cell.case == "remat_of_states"
    and cell.configuration in ("mirrored-3", "workers-2x2", "fully-sharded-2x1")
]


@pytest.mark.kills(torch_recomputed_without_a_replica="[torch-mirrored-3-remat_of_states]")
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell, id=str(cell), marks=pytest.mark.xdist_group(f"contract-torch-{cell.configuration}")
        )
        for cell in _RECOMPUTED
    ],
)
def test_numbers_are_those_of_one_device_with_the_backward_pass_in_another_thread(
    cell: Cell, pools: Pools, oracle_folder: Path
) -> None:
    _check(cell, pools, oracle_folder, is_foreign=True)


def _check(cell: Cell, pools: Pools, oracle_folder: Path, is_foreign: bool) -> None:
    try:
        workers = pools.get(cell.backend, cell.configuration)
        expected = _oracle(pools, cell.backend, cell.case, oracle_folder)
        actual = workers.run(_under_strategy, cell.case, cell.configuration, is_foreign)
    except BaseException:
        pools.close()  # workers that failed at different places must not run the next case together
        raise
    for numbers, path in filter(None, actual):
        compare(CASES[cell.case], expected, numbers)
        if cell.configuration in {"torch": ("workers-2", "workers-3"), "jax": ("workers-2",)}.get(
            cell.backend, ()
        ):
            check_path(cell.case, cell.backend, path)


def _unsupported() -> Iterator[Any]:
    for configuration in CONFIGURATIONS.values():
        for one in configuration.without:
            for backend in one.backends if one.is_error else ():
                name = configuration.name
                group = pytest.mark.xdist_group(f"contract-{backend}-{name}")
                yield pytest.param(backend, name, one.case, id=f"{backend}-{name}-{one.case}", marks=group)


@pytest.mark.parametrize(("backend", "configuration", "case"), _unsupported())
def test_what_cannot_have_these_numbers_is_an_error(
    backend: str, configuration: str, case: str, pools: Pools
) -> None:
    workers = pools.get(backend, configuration)
    with pytest.raises(WorkerFailure, match=r"UnsupportedError: .*\.\nReceived: .*\n[A-Z]"):
        workers.run(_under_strategy, case, configuration)
    pools.close()


@pytest.mark.kills(plain_keras_changed="[jax]")
@pytest.mark.parametrize(
    "backend",
    [pytest.param(b, marks=pytest.mark.xdist_group(f"contract-{b}-mirrored-2")) for b in BACKENDS],
)
def test_keras_stays_as_it_is_outside_of_a_scope(backend: str, pools: Pools, oracle_folder: Path) -> None:
    workers = pools.get(backend, "mirrored-2")
    for case in ("sample_weight", "regularizers"):
        (actual,) = workers.run(run_case, case)
        compare(CASES[case], _oracle(pools, backend, case, oracle_folder), actual)


def test_numbers_that_differ_are_seen() -> None:
    entry = next(iter(CASES.values()))
    expected = {"weight": np.array([1.0, 2.0]), "loss": np.array(0.5)}
    compare(entry, expected, {"weight": np.array([1.0, 2.0 + 1e-6]), "loss": np.array(0.5)})
    for name, value in (("weight", [1.0, 2.001]), ("weight", [2.0, 1.0]), ("loss", float("nan"))):
        with pytest.raises(AssertionError, match=name):
            compare(entry, expected, expected | {name: np.array(value)})
    with pytest.raises(AssertionError, match="loss"):
        compare(entry, {"loss": np.array(np.nan)}, {"loss": np.array(np.nan)})
    with pytest.raises(AssertionError, match="weight"):
        compare(entry, expected, {"loss": np.array(0.5)})


def test_every_backend_and_strategy_is_in_the_matrix() -> None:
    covered = {(cell.backend, cell.configuration) for cell in CELLS}
    assert covered == {(b, c.name) for c in CONFIGURATIONS.values() for b in c.backends}
    assert {b for b, _ in covered} == set(BACKENDS)
    assert {cell.case for cell in CELLS} == set(CASES)


@pytest.mark.parametrize("first", [0, 916])
def test_every_case_runs_on_every_backend_and_kind_of_strategy_within_42_turns(first: int) -> None:
    assert missing_pairs(first, 1) and not missing_pairs(first, 42)
    assert len(missing_pairs(first, 18)) <= 1


@pytest.mark.kills(contract_rotation_frozen="[0]")
@pytest.mark.parametrize("first", [0, 916])
def test_every_cell_runs_within_150_turns(first: int) -> None:
    assert missing_cells(first, 50) and not missing_cells(first, 150)
