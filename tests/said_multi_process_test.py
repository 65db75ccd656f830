"""The log lines and the `repr` of strategies: the chief logs one line, `KDIST_LOG` adds more, and never on stdout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import BACKENDS, each_backend, run
from tests.helpers.scripts import Script, environments_of, finished, local_addresses

COMMUNICATION = {"tensorflow": "grpc", "jax": "gloo", "torch": "gloo"}
SCRIPT = """
import kdist
first = kdist.MultiWorkerMirroredStrategy()
print(first)
print(kdist.MultiWorkerMirroredStrategy() is first)
"""


def said_by_kdist(script: Script) -> list[str]:
    return [line for line in script.stderr().splitlines() if line.startswith("kdist: ")]


@pytest.mark.kills(said_by_every_worker="[torch]", said_with_every_strategy="[jax]")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.in_turn(3)
def test_the_chief_says_once_what_came_of_the_job(backend: str, tmp_path: Path) -> None:
    addresses = local_addresses(2)
    quiet, debug = environments_of(backend, addresses, KDIST_LOG="")
    workers = finished(tmp_path, SCRIPT, [quiet, debug | {"KDIST_LOG": "debug"}])
    by = COMMUNICATION[backend]
    for index, worker in enumerate(workers):
        name = (
            f"<kdist.MultiWorkerMirroredStrategy on {backend}: worker {index} of 2, 1 device (cpu:0), {by}>"
        )
        assert worker.stdout() == f"{name}\nFalse\n"
    plan = f"kdist: MultiWorkerMirrored on {backend}/{by}, 2 workers × 1 cpu, from TF_CONFIG"
    assert said_by_kdist(workers[0]) == [plan]
    cluster, joining, joined, strategy, *_ = said_by_kdist(workers[1])
    assert (
        cluster
        == f"kdist: cluster from TF_CONFIG: worker 1 ({addresses[1]}) of 2, worker 0 at {addresses[0]}"
    )
    assert joining.startswith(
        f"kdist: joining worker 0 ({addresses[0]}), worker 1 ({addresses[1]}) (timeout: "
    )
    assert joined.startswith("kdist: joined after ") and strategy.startswith(
        "kdist: <kdist.MultiWorkerMirrored"
    )


ALONE = """
import kdist
kdist.MultiWorkerMirroredStrategy()
with kdist.MirroredStrategy(["cpu:0"]).scope():
    pass
"""


@pytest.mark.parametrize(("backend", "level"), zip(BACKENDS, ("", "info", "loud"), strict=True))
@pytest.mark.in_turn(3)
def test_a_process_alone_says_nothing_unless_it_is_asked_to(backend: str, level: str, tmp_path: Path) -> None:
    script = Script(tmp_path, "alone", ALONE, {"KERAS_BACKEND": backend, "KDIST_LOG": level}).finish(
        code=1 if level == "loud" else 0
    )
    assert script.stdout() == ""
    lines = [f"kdist: {name} on {backend}, 1 worker × 1 cpu" for name in ("MultiWorkerMirrored", "Mirrored")]
    assert said_by_kdist(script) == (lines if level == "info" else [])
    assert ("`KDIST_LOG` is not one of" in script.stderr()) == (level == "loud")


def names() -> list[str]:
    """Returns the `repr` of strategies in one process: of complete, incomplete and custom strategies."""
    import kdist

    class Own(kdist.MirroredStrategy):
        pass

    devices = ["cpu:0", "cpu:1"]
    made = [
        kdist.OneDeviceStrategy("cpu:0"),
        kdist.experimental.CentralStorageStrategy(devices, "cpu:1"),
        Own(devices),
        kdist.MirroredStrategy.__new__(kdist.MirroredStrategy),
        kdist.ParameterServerStrategy.__new__(kdist.ParameterServerStrategy),
        kdist.get_strategy(),
    ]
    return [repr(one) for one in made]


@each_backend
def test_every_strategy_says_what_it_is(backend: str) -> None:
    assert run(backend, 1, names)[0] == [
        f"<kdist.OneDeviceStrategy on {backend}: 1 device (cpu:0)>",
        f"<kdist.experimental.CentralStorageStrategy on {backend}: 2 devices (cpu:0, cpu:1), variables on cpu:1>",
        f"<Own on {backend}: 2 devices (cpu:0, cpu:1)>",
        "<kdist.MirroredStrategy: not created yet>",
        "<kdist.ParameterServerStrategy: not created yet>",
        "<default strategy of kdist: 1 replica, nothing is distributed>",
    ]


def divided() -> str:
    import kdist

    return repr(
        kdist.ModelParallelStrategy(
            lambda path, shape: (), mesh={"batch": 1, "model": 2}, devices=["cpu:0", "cpu:1"]
        )
    )


def test_a_strategy_that_divides_says_its_mesh() -> None:
    assert run("jax", 1, divided)[0] == (
        "<kdist.ModelParallelStrategy on jax: 2 devices (cpu:0, cpu:1), mesh batch=1 × model=2>"
    )
