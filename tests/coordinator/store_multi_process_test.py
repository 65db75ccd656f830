"""A server's store applies repeated updates only once, and does not send unchanged values again."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from tests.helpers.compare import assert_equal
from tests.helpers.processes import run

each_own_engine = pytest.mark.parametrize("backend", ["jax", "torch"], scope="module")


def new_store(values: dict[str, Any]) -> Any:
    from kdist.backends import get_backend
    from kdist.coordinator.store import ParameterStore

    engine = get_backend().coordination_engine
    assert engine is not None
    store = ParameterStore(engine())
    parts = [{"key": key, "path": f"model/{key}", "trainable": key == "a"} for key in values]
    store.hold({"parts": parts}, [*values.values()])
    return store


def pull(store: Any, keys: list[str], versions: list[int] | None = None) -> tuple[Any, list[Any]]:
    header, arrays = store.pull({"keys": keys, "versions": versions or [-1] * len(keys)}, [])
    return header, [np.array(array) for array in arrays]


def commit(store: Any, closure: int, oldest: int, **what: Any) -> Any:
    arrays = what.pop("arrays")
    header = {
        "closure": [closure, 0],
        "oldest": oldest,
        "gradients": [],
        "differences": [],
        "bases": [],
        "values": [],
    }
    return store.commit(header | what, arrays)[0]


def additions() -> tuple[Any, Any]:
    """Commits random additions, many of them repeatedly; returns the stored values and the expected sums."""
    draw = np.random.RandomState(4)
    store = new_store({"a": np.zeros((3, 2), "float32"), "b": np.zeros((), "float32")})
    by_hand = {"a": np.zeros((3, 2)), "b": np.zeros(())}
    running: dict[int, Any] = {}
    for number in range(200):
        key = "ab"[draw.randint(2)]
        running[number] = key, draw.randint(-9, 9, by_hand[key].shape).astype("float32")
        while running and draw.rand() < 0.7:
            closure = [*running][draw.randint(len(running))]
            key, value = running[closure]
            answer = commit(store, closure, min(running), differences=[key], arrays=[value])
            if not answer["again"]:
                by_hand[key] = by_hand[key] + value
            if draw.rand() < 0.6:
                del running[closure]
    commit(store, 200, 200, arrays=[])
    assert len(store._made) == 1  # closures that cannot be repeated are forgotten
    return pull(store, ["a", "b"])[1], [by_hand["a"], by_hand["b"]]


@each_own_engine
def test_each_update_is_made_once(backend: str) -> None:
    ((found, by_hand),) = run(backend, 1, additions)
    assert_equal(found, by_hand)


def repeated() -> Any:
    store = new_store({"a": np.zeros(2, "float32")})
    for closure in (3, 3, 5, 3, 5):
        commit(store, closure, 3, differences=["a"], arrays=[np.ones(2, "float32")])
    return pull(store, ["a"])[1][0]


@pytest.mark.kills("servers_closure_counts_twice")
@each_own_engine
def test_what_is_repeated_counts_once(backend: str) -> None:
    np.testing.assert_array_equal(run(backend, 1, repeated)[0], [2, 2])


def late() -> Any:
    store = new_store({"a": np.zeros(2, "float32")})
    for closure, oldest in ((0, 0), (1, 1), (0, 0), (2, 0), (0, 0), (1, 0)):  # only 1 reports the end of 0
        commit(store, closure, oldest, differences=["a"], arrays=[np.ones(2, "float32")])
    return pull(store, ["a"])[1][0]


@pytest.mark.kills("servers_late_closure_counts_twice")
@each_own_engine
def test_what_is_repeated_after_its_end_counts_once(backend: str) -> None:
    np.testing.assert_array_equal(run(backend, 1, late)[0], [3, 3])


def versions() -> Any:
    store = new_store({"a": np.zeros(2, "float32"), "b": np.ones(3, "float32")})
    header, arrays = pull(store, ["a", "b"])
    assert len(arrays) == 2
    again = pull(store, ["a", "b"], header["versions"])
    commit(store, 0, 0, differences=["b"], arrays=[np.ones(3, "float32")])
    changed = pull(store, ["a", "b"], header["versions"])
    return len(again[1]), [array.tolist() for array in changed[1]]


@each_own_engine
def test_only_what_has_changed_is_sent(backend: str) -> None:
    assert run(backend, 1, versions) == [(0, [[2.0, 2.0, 2.0]])]


def optimized() -> Any:
    """Takes constrained gradient steps: a dense step, sent twice, an empty step, and a step on rows."""
    import keras

    from kdist.coordinator import shipping

    start = np.array([[1.0, -1.0], [0.5, 2.0]], "float32")
    store = new_store({"a": start, "rate": np.full((), 0.5, "float32"), "count": np.zeros((), "int32")})
    optimizer = keras.optimizers.SGD(0.5)
    names = keras.optimizers.SGD(0.5)
    names.build([keras.Variable(start, name="a")])
    own = [[v.name, "count" if v.name == "iteration" else "rate"] for v in names.variables]
    pickled = shipping.dumps((optimizer, {"a": keras.constraints.NonNeg()}), None)
    header = {"optimizer": 0, "trained": ["a"], "undecayed": [], "own": own}
    store.optimize(header, [pickled])
    gradient = np.array([[1.0, 1.0], [-1.0, 1.0]], "float32")
    one = {"optimizer": 0, "keys": [["a", "dense"]]}
    commit(store, 0, 0, gradients=[one], arrays=[gradient])
    commit(store, 0, 0, gradients=[one], arrays=[gradient])
    commit(store, 1, 0, gradients=[{"optimizer": 0, "keys": []}], arrays=[])
    rows = [{"optimizer": 0, "keys": [["a", "rows"]]}]
    commit(store, 2, 0, gradients=rows, arrays=[np.array([1]), np.array([[2.0, 1.0]], "float32")])
    return [array.tolist() for array in pull(store, ["a", "count"])[1]]


@pytest.mark.kills("servers_without_constraints")
@each_own_engine
def test_an_optimizer_s_steps_and_constraints(backend: str) -> None:
    # First [[.5, -1.5 → 0], [1, 1.5]]; then the second row changes again.
    assert run(backend, 1, optimized) == [[[[0.5, 0.0], [0.0, 1.0]], 3]]


def read_while_a_closure_ends() -> Any:
    """Reads a variable on the chief; before the answer arrives, the last closure changes it and ends."""
    import keras

    from kdist.coordinator.placement import place
    from kdist.coordinator.served import Home, Record, Served

    store = new_store({"1.0": np.zeros(2, "float32")})

    class Server:
        def begin(self, method: str, header: Any, arrays: Any = ()) -> Any:
            answer = getattr(store, method)(header, arrays)

            def wait() -> Any:
                if served.generation == 1 and method == "pull":
                    commit(store, 0, 0, differences=["1.0"], arrays=[np.ones(2, "float32")])
                    served.generation += 1
                return answer

            return wait

    servers: Any = [Server()]
    served = Served(store._engine, servers, tells=True)
    variable = keras.Variable(np.zeros(2, "float32"))
    served.add(Record(served, variable, Home(1, place((2,), "float32", None, 1)), variable.value))
    served.generation += 1
    assert variable.value is not None  # Keras itself may read the value twice
    return variable.value.tolist()


@pytest.mark.kills("servers_answer_of_an_ended_closure")
@each_own_engine
def test_a_value_that_was_read_while_a_closure_ended_is_read_again(backend: str) -> None:
    assert run(backend, 1, read_while_a_closure_ends) == [[1.0, 1.0]]


def numbers_of_optimizers() -> list[int]:
    """Deletes an optimizer before it registers the last one."""
    import keras

    from kdist.coordinator.optimizers import NUMBER, Optimizers

    optimizers: Any = Optimizers(None, None, None)  # type: ignore[arg-type]
    first, second = keras.optimizers.SGD(), keras.optimizers.SGD()
    found = [optimizers.reduced(one)[2][NUMBER] for one in (first, second)]
    del first
    gc.collect()
    return [*found, optimizers.reduced(keras.optimizers.SGD())[2][NUMBER]]


@pytest.mark.kills("servers_number_of_a_deleted_optimizer")
@each_own_engine
def test_an_optimizer_never_gets_the_number_of_another(backend: str) -> None:
    (numbers,) = run(backend, 1, numbers_of_optimizers)
    assert len(set(numbers)) == 3
