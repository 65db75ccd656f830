"""The comparison of two runs finds differences and describes them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kdist.errors import InvalidArgumentError
from kdist.parity import Training, check_options, differences, explain

ONE = {"history, loss": [0.5, 0.25], "weight 0 (dense/kernel)": np.array([[1.0, -2.0], [3.0, 4.0]])}


def run(num_replicas=2, suspects=(), **changes):
    return Training("a strategy", num_replicas, ONE | changes, suspects)


def test_numbers_agree_to_the_tolerances():
    assert differences(ONE, ONE) == {}
    near = {name: np.asarray(value) * (1 + 9e-6) for name, value in ONE.items()}
    assert differences(ONE, near) == {}
    assert set(differences(ONE, near, rtol=1e-6, atol=0)) == set(ONE)
    assert differences({"a": 0.0}, {"a": 1.9e-6}) == {}
    assert differences({"a": 0.0}, {"a": 2.1e-6}) == {"a": "0 on one device, 2.1e-06 with the strategy"}


def test_the_largest_difference_is_named():
    kernel = np.array([[1.0, -2.0], [3.1, 4.5]])
    assert differences(ONE, ONE | {"weight 0 (dense/kernel)": kernel}) == {
        "weight 0 (dense/kernel)": "2 of 4 differ, largest difference at [1, 1]: 4 on one device, 4.5 with the strategy"
    }


def test_what_is_missing_or_has_another_shape():
    assert differences({"a": 1.0}, {"b": 1.0}) == dict.fromkeys(
        "ab", "only one of the two runs has this value"
    )
    assert differences({"a": [1.0]}, {"a": [[1.0]]}) == {
        "a": "shape (1,) on one device, (1, 1) with the strategy"
    }


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.bool_, np.uint32])
def test_numbers_of_every_dtype_can_be_told(dtype):
    one, many = np.asarray([1, 0], dtype), np.asarray([1, 1], dtype)
    assert differences({"a": one}, {"a": one}) == {}
    assert (
        differences({"a": one}, {"a": many})["a"]
        == "1 of 2 differ, largest difference at [1]: 0 on one device, 1 with the strategy"
    )


@pytest.mark.kills("parity_nan_agrees")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_number_agrees_with_nothing(value):
    assert "differ, largest difference at [1]" in differences({"a": [1.0, value]}, {"a": [1.0, value]})["a"]
    assert "nan on one device" in differences({"a": np.nan}, {"a": np.nan})["a"]


@pytest.mark.kills("parity_looks_at_the_first_worker")
def test_the_worker_that_differs_is_named():
    assert explain(run(1), [run(), run()], 1e-5, 1e-6) is None
    said = explain(run(1), [run(), run(**{"history, loss": [0.5, 9.0]})], 1e-5, 1e-6)
    assert said.startswith("a strategy, worker 1, gives different results than one device: 1 of 2 differ")
    assert (
        "history, loss: 1 of 2 differ, largest difference at [1]: 0.25 on one device, 9 with the strategy"
        in said
    )


@pytest.mark.parametrize(
    ("changes", "suspects", "reason"),
    [
        ({"history, loss": [0.5, 0.2501]}, (), "Rounding"),
        ({"history, loss": [0.5, 9.0]}, (), "The rows differ. `data` must return"),
        ({"history, loss": [0.5, 9.0]}, ("Dropout 'd' draws",), "Dropout 'd' draws"),
        (
            {"history, loss": [0.5, 9.0], "before training, w": 1.0},
            ("Dropout 'd'",),
            "The initial weights differ",
        ),
    ],
)
def test_reasons(changes, suspects, reason):
    said = explain(run(1, suspects), [run(**changes)], 1e-5, 1e-6).partition("Likely reasons:\n")[2]
    assert said.startswith(f"  - {reason}"), said


def test_a_long_list_is_cut():
    many = {f"weight {i}": float(i) for i in range(20)}
    said = explain(run(1, **many), [run(**dict.fromkeys(many, -1.0))], 1e-5, 1e-6)
    assert "20 of 22 differ" in said and "  and 12 more" in said and "weight 8:" not in said


def test_one_replica_proves_nothing():
    with pytest.raises(InvalidArgumentError, match="(?s)only one replica.*num_workers=2"):
        explain(run(1), [run(1)], 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "`epochs` is not a whole number of at least 1"),
        ({"epochs": True}, "`epochs`"),
        ({"rtol": float("nan")}, "`rtol` or `atol`"),
        ({"atol": -1.0}, "`rtol` or `atol`"),
        ({"strategy": object()}, "`strategy` is not a function"),
    ],
)
def test_bad_options(changes, message):
    good = {"epochs": 1, "rtol": 1e-5, "atol": 1e-6, "strategy": None}
    check_options(**good)
    with pytest.raises(InvalidArgumentError, match=message):
        check_options(**good | changes)
