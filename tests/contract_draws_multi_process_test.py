"""The contract for random training programs.

A failure prints the program: add it to `_KEPT`. Set `TESTS_TURN` to repeat the programs of a turn. To find a smaller
program that fails, add `Phase.shrink` to the settings, which takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st

from tests.contract import CONFIGURATIONS, Numbers
from tests.contract_draws import TOLERANCE, Draw, train
from tests.contract_pools import Pools, without_kdist
from tests.helpers import processes
from tests.turn import turn

_CELLS = [(backend, c.name) for c in CONFIGURATIONS.values() for backend in c.backends]
# Programs that failed before, by backend and configuration.
_KEPT: dict[tuple[str, str], tuple[Draw, ...]] = {}


def _can(draw: Draw, backend: str, configuration: str) -> bool:
    """Returns whether a program is supported, and has results that rounding cannot change.

    Servers cannot compute the norm of accumulated gradients. A normalized batch of one row is 0, so that all classes
    have the same probability, and rounding decides the accuracy.
    """
    has_one_row = draw.batch_size == 1 or draw.rows % draw.batch_size == 1
    if has_one_row and draw.layers == "normalization" and "categorical" in draw.loss:
        return False
    is_divided = backend != "tensorflow" and configuration == "servers-in-turn"
    return not (is_divided and draw.clipping in ("clipnorm", "global_clipnorm") and draw.accumulation > 1)


def _draws(backend: str) -> st.SearchStrategy[Draw]:
    # Keras multiplies matrices in float32 on PyTorch and, by default, on JAX.
    dtypes = ["float32", "mixed_bfloat16"] + ["float64"] * (backend == "tensorflow")
    return st.builds(
        Draw,
        layers=st.sampled_from(["dense", "convolution", "normalization", "recurrent", "embedding"]),
        loss=st.sampled_from(["mse", "huber", "log_cosh", "sparse_categorical_crossentropy"]),
        optimizer=st.sampled_from(["sgd", "adam", "adamw", "rmsprop", "adagrad"]),
        clipping=st.sampled_from(["", "clipnorm", "global_clipnorm", "clipvalue"]),
        accumulation=st.integers(1, 3),
        rows=st.integers(1, 40),
        batch_size=st.integers(1, 17),
        validation_rows=st.integers(0, 9),
        weights=st.sampled_from(["none", "random", "mostly zero"]),
        dtype=st.sampled_from(dtypes),
        epochs=st.integers(1, 2),
        steps_per_execution=st.integers(1, 3),
        regularizer=st.sampled_from([0.0, 0.1]),
        seed=st.integers(0, 2**31),
    ).flatmap(_with_class_weights)


def _with_class_weights(draw: Draw) -> st.SearchStrategy[Draw]:
    # Keras accepts weights per class only for labels that are classes.
    if "categorical" not in draw.loss or draw.weights != "none":
        return st.just(draw)
    return st.sampled_from([draw, Draw(**{**vars(draw), "weights": "per class"})])


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


def _check(draw: Draw, backend: str, configuration: str, pools: Pools) -> None:
    try:
        workers = pools.get(backend, configuration)
        expected = pools.plain().run(without_kdist, train, draw)[0]
        found = workers.run(train, draw, configuration)
    except BaseException:
        pools.close()  # workers that failed at different places must not run the next program together
        raise
    for numbers in [numbers for numbers in found if numbers is not None]:
        _compare(expected, numbers, TOLERANCE[draw.dtype])


def _compare(expected: Numbers, found: Numbers, tolerance: float) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert np.isfinite(value).all(), f"{name} of one device is {value}"
        size = float(np.max(np.abs(value), initial=0.05))
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance * size, err_msg=name)


def _cells() -> Iterator[object]:
    for backend, configuration in _CELLS:
        group = pytest.mark.xdist_group(f"contract-{backend}-{configuration}")
        yield pytest.param(backend, configuration, id=f"{backend}-{configuration}", marks=group)


@pytest.mark.timeout(900)
@pytest.mark.in_turn(len(_CELLS))
@pytest.mark.parametrize(("backend", "configuration"), _cells())
def test_random_programs_have_the_numbers_of_one_device(
    backend: str, configuration: str, pools: Pools
) -> None:
    @seed(turn())
    @settings(
        max_examples=3 if processes.forks else 5,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(_draws(backend).filter(lambda draw: _can(draw, backend, configuration)))
    def check(draw: Draw) -> None:
        _check(draw, backend, configuration, pools)

    for kept in _KEPT.get((backend, configuration), ()):
        check = example(kept)(check)
    check()
