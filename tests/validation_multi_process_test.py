"""Edge cases of validation data: no rows, fewer rows than workers, and generators that end early."""

from __future__ import annotations

import itertools
import warnings

import pytest

from tests.helpers.data import make_data
from tests.helpers.models import network
from tests.helpers.processes import (
    each_backend,
    each_backend_in_twelve_turns,
    run,
    run_plain,
    scope,
    strategy,
)


def batches(number):
    x, y = make_data(10)
    for start in range(0, 2 * number, 2):
        yield x[start : start + 2], y[start : start + 2]


CASES = {
    "no rows": lambda: {"validation_data": tuple(array[:0] for array in make_data(10))},
    "no batch": lambda: {"validation_data": batches(0)},
    # Keras reads the first batch in advance, and evaluates it again in each epoch after the end of the generator.
    "exhausted": lambda: {"validation_data": batches(2)},
    "too many steps": lambda: {"validation_data": batches(3), "validation_steps": 5},
    "one row": lambda: {"validation_split": 0.1},
    "no row to train": lambda: {"validation_split": 0.95},
}


def fit_each(under_strategy):
    """Returns the history and the warnings of each case, or its error."""
    found = {}
    for name, arguments in CASES.items():
        model = network(2, 1, metrics=["mae"], seed=3, scope=scope(under_strategy))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                history = model.fit(
                    *make_data(10), batch_size=4, epochs=3, shuffle=False, verbose=0, **arguments()
                ).history
            except ValueError as error:
                found[name] = str(error)
            else:
                is_short = any("ran out of data" in str(one.message) for one in warned)
                found[name] = {key: list(map(float, values)) for key, values in history.items()}, is_short
    return found


@pytest.mark.kills(validation_of_no_rows_is_zero="[torch]")
@each_backend_in_twelve_turns
def test_odd_validation_data_has_the_results_of_plain_keras(backend):
    expected = run_plain(backend, fit_each, False)
    kinds = {name: type(value) for name, value in expected.items()}
    assert kinds == dict.fromkeys(CASES, tuple) | {"no batch": str, "no row to train": str}
    assert "val_loss" not in expected["no rows"][0] and len(expected["one row"][0]["val_loss"]) == 3
    for found, name in itertools.product(run(backend, 2, fit_each, True), CASES):
        if isinstance(expected[name], str):
            assert found[name] == expected[name]
            continue
        (history, is_short), (expected_history, expected_short) = found[name], expected[name]
        assert is_short == expected_short, name
        assert history.keys() == expected_history.keys(), name
        for key, values in expected_history.items():
            assert history[key] == pytest.approx(values, rel=1e-5, abs=2e-6), (name, key)


def in_worker_fit_nothing():

    import kdist

    model = network(1, scope=strategy().scope())
    x, y = make_data(0)
    messages = []
    for method in (model.fit, model.evaluate):
        with pytest.raises(kdist.errors.InvalidArgumentError) as caught:
            method(x, y, verbose=0)
        messages.append(str(caught.value))
    return messages


@pytest.mark.kills(data_without_rows_has_no_clear_error="[torch]")
@each_backend
def test_no_rows_to_train_is_a_clear_error(backend):
    for messages in run(backend, 2, in_worker_fit_nothing):
        for message in messages:
            assert message.splitlines() == [
                "The data has no rows.",
                "Received: rows=0",
                "Pass at least one row.",
            ]


def fit_with_own_evaluate(under_strategy):
    """Returns the validation results of models that override `evaluate`, and the number of their calls."""
    import keras

    class Passes(keras.Model):
        def evaluate(self, *args, **kwargs):
            calls.append(sorted(kwargs))
            return super().evaluate(*args, **kwargs) | {"doubled": 2.0 * len(calls)}

    class Alone(keras.Model):
        def evaluate(self, x=None, y=None, **kwargs):
            calls.append(len(x))
            return super().evaluate(x * 2, y, batch_size=3, verbose=0, return_dict=True)

    x, y = make_data(10)
    found = {}
    for kind, validation_data in ((Passes, batches(4)), (Alone, (x[:7], y[:7]))):
        calls = []
        with scope(under_strategy):
            keras.utils.set_random_seed(3)
            inputs = keras.Input((3,))
            model = kind(inputs, keras.layers.Dense(1)(inputs))
            model.compile("sgd", "mse", metrics=["mae"])
        fit = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0, "validation_freq": 2}
        history = model.fit(x, y, validation_data=validation_data, **fit).history
        found[kind.__name__] = {key: list(map(float, values)) for key, values in history.items()}, calls
    return found


@pytest.mark.kills("validation_without_the_users_evaluate", "evaluate_of_fit_reads_the_data_again")
@each_backend
def test_the_validation_calls_an_overridden_evaluate(backend):
    expected = run_plain(backend, fit_with_own_evaluate, False)
    assert len(expected["Passes"][1]) == 1 and expected["Passes"][0]["val_doubled"] == [2.0]
    for found in run(backend, 2, fit_with_own_evaluate, True):
        for name, (history, calls) in expected.items():
            assert found[name][1] == calls, name
            assert found[name][0].keys() == history.keys(), name
            for key, values in history.items():
                assert found[name][0][key] == pytest.approx(values, rel=1e-5, abs=2e-6), (name, key)
