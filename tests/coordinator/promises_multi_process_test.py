"""Guarantees of training with parameter servers, and the errors for unsupported requests.

One script per backend runs all tasks as threads of one process. The tests check the script's findings.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.coordinator.promises import SCRIPT
from tests.helpers.processes import each_backend
from tests.helpers.scripts import Script


@pytest.fixture(scope="module")
def found(backend: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # On TensorFlow, each waiting closure occupies a thread.
    env = {"KERAS_BACKEND": backend, "TF_NUM_INTEROP_THREADS": "8"}
    script = Script(tmp_path_factory.mktemp(backend), "promises", SCRIPT, env).finish()
    return {"backend": backend} | script.told("found ")


@pytest.mark.kills(
    servers_closures_one_at_a_time="[torch]",
    servers_difference_told_twice="[torch]",
    servers_staleness_not_passed_on="[tensorflow]",
    tensorflow_closures_one_at_a_time="[tensorflow]",
)
@each_backend
def test_each_function_counts_once_and_is_as_stale_as_allowed(found: dict[str, Any]) -> None:
    assert found["counted"] == found["iterations"] == found["values"] == 90
    assert found["weights differ by"] == 0
    assert found["done"] is True
    # Two of the three workers run at the same time, and one waits. Each pair sees all earlier updates.
    assert found["updates found"] == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]
    assert found["updates"] == 12


@pytest.mark.kills(
    servers_draw_alike="[torch]",
    servers_two_workers_draw_alike="[torch]",
    servers_worker_index_of_datasets_is_0="[jax]",
    tensorflow_servers_draw_alike="[tensorflow]",
    tensorflow_two_workers_draw_alike="[tensorflow]",
    tensorflow_worker_index_of_datasets_is_0="[tensorflow]",
)
@each_backend
def test_each_worker_has_its_own_values_and_draws(found: dict[str, Any]) -> None:
    assert found["read"] == [[index, 10 + index] for index in range(3) for _ in range(3)]
    assert len(found["draws"]) == 30
    assert len(set(map(tuple, found["draws"]))) == 30  # no worker repeats a draw of another worker


@pytest.mark.kills(per_worker_datasets_as_they_are="[jax]", servers_keep_all_iterators="[torch]")
@each_backend
def test_datasets_of_the_workers_own_give_tensors_of_the_backend(found: dict[str, Any]) -> None:
    # Workers keep only the last few of the 21 datasets and their iterators.
    assert all(number < 10 for number in found.get("kept values", []))
    for name in ("kinds", "kinds of a list"):
        for is_tensor, total in found.get(name, []):
            assert is_tensor and total in (3, 7, 11, 15)
    assert len(found["kinds"]) == 4
    assert ("kinds of a list" in found) == (found["backend"] != "tensorflow")


@each_backend
def test_the_coordinator_says_what_it_has_and_for_whom_it_waited(found: dict[str, Any]) -> None:
    backend, is_native = found["backend"], found["backend"] == "tensorflow"
    assert found["repr"] == f"<kdist.ParameterServerStrategy on {backend}: 3 workers, 2 parameter servers>"
    plan = f"ParameterServer on {backend}, 3 workers, 2 parameter servers, from SimpleClusterResolver"
    assert plan in found["waits"]
    said = [line for line in found["waits"] if line.startswith("waiting for ")]
    found_missing = [
        re.fullmatch(r"waiting for (.*) \(localhost:\d+\) to join \([01] of 1 s\)", line)[1] for line in said
    ]
    assert set(found_missing) == (set() if is_native else {"worker 3", "ps 1"})


ERRORS = {
    "no worker": r"ClusterConfigError: .*no worker, but",
    "no server": r"ClusterConfigError: .*no parameter server, a task of the job ps, but",
    "two chiefs": r'ClusterConfigError: .*more than one task of the job "chief"',
    "a worker's strategy": r"ClusterConfigError: .*not the chief[\s\S]*worker 1[\s\S]*kdist.Server",
    "a server's strategy": r"ClusterConfigError: .*not the chief[\s\S]*ps 0[\s\S]*kdist.Server",
    "a worker that never comes": r"WorkerTimeoutError: .*worker 3 \(localhost:\d+\)[\s\S]*Server",
    "a server that never comes": r"WorkerTimeoutError: .*ps 1 \(localhost:\d+\)",
    "a wrong job": r"InvalidArgumentError: `job_name` is not a job of this cluster[\s\S]*\nReceived: job_name='chief'",
    "a wrong index": r"InvalidArgumentError: `task_index` is not the index of a task[\s\S]*\nReceived: task_index=3",
    "a wrong protocol": r"InvalidArgumentError: `protocol` is not supported",
    "a port that is taken": r"ClusterConfigError: Cannot listen on port \d+[\s\S]*localhost:\d+[\s\S]*another port",
    "a partitioner that is none": r"InvalidArgumentError: `variable_partitioner` is not a function",
    "a staleness below zero": r"InvalidArgumentError: `max_staleness` is not[\s\S]*\nReceived: max_staleness=-1",
    "iterating here": r"StrategyScopeError: The coordinator cannot iterate[\s\S]*schedule\(step, args=\(iterator,\)\)",
    "no function": r"InvalidArgumentError: `fn` is not a function[\s\S]*\nReceived: fn=7",
    "no strategy": r"InvalidArgumentError: `strategy` is not a ParameterServerStrategy",
    "no current worker": r"StrategyScopeError: There is no current worker",
    "a function that raises": r"ValueError: an error of its own",
    "a dataset that raises": r"ValueError: an error of its own",
    "what cannot be pickled": r"InvalidArgumentError: .*pickled.*lock",
    "a result that cannot be pickled": r"InvalidArgumentError: The result .* to the coordinator\..*lock",
    "variables from outside": r"Unknown variable.*path=outside",
    "a norm of one variable's parts": r"UnsupportedError: clipnorm cannot be [\s\S]*clipnorm=1.0, variable='divided'",
    "a norm of all variables": r"UnsupportedError: global_clipnorm cannot be [\s\S]*\nReceived: global_clipnorm=1.0",
    "no shards": r"InvalidArgumentError: .* partitioner [\s\S]*\nReceived: .*returned=\[0, 1\]",
    "no list": r"InvalidArgumentError: .* partitioner [\s\S]*\nReceived: .*returned=2",
    "what is gone": r"CallFailed: ps \d .*KeyError",
    "a function of the first that ends later": r"StrategyScopeError.*one coordinator at a time",
    "all workers": r"no error",
    "the first of two coordinators": r"StrategyScopeError.*one coordinator at a time",
    "synchronous in one process": r"InvalidArgumentError: Two workers .* in the same process\.",
}


@pytest.mark.kills(
    results_explained_as_functions="[torch]",
    servers_keep_what_is_gone="[torch]",
    servers_group_in_one_process="[torch]",
    servers_fail_after_a_failed_dataset="[jax]",
    servers_answer_for_an_older_session="[torch]",
)
@each_backend
def test_what_cannot_be_is_an_error_that_says_what_can(found: dict[str, Any]) -> None:
    names = [name for name in ERRORS if name in found]
    assert set(ERRORS) - set(names) == (ON_OWN_SERVERS if found["backend"] == "tensorflow" else set())
    others = {name: found[name] for name in names if not re.search(ERRORS[name], found[name], re.DOTALL)}
    assert not others
    assert {name: found[f"{name} seconds"] for name in names if found[f"{name} seconds"] > 15} == {}
    assert {value for name, value in found.items() if name.endswith(", then")} == {7}
    assert found.get("the second of two", 3.0) == 3.0
    assert found.get("held", 1) == 1


ON_OWN_SERVERS = {"a worker that never comes", "a server that never comes", "what cannot be pickled"}
ON_OWN_SERVERS |= {"a result that cannot be pickled"}
ON_OWN_SERVERS |= {
    "a norm of one variable's parts",
    "a norm of all variables",
    "variables from outside",
    "what is gone",
    "a function of the first that ends later",
    "all workers",
    "the first of two coordinators",
    "synchronous in one process",
}
