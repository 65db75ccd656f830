"""`kdist doctor` and `kdist test` pass in a working setup on each backend, and report problems in others."""

from __future__ import annotations

import contextlib
import json
import re
import socket

import pytest

from kdist.cluster import environment
from kdist.command_line import main
from kdist.doctor import command, probes
from kdist.doctor.local_workers import hidden_gpus, together
from kdist.doctor.report import Line, Report
from kdist.launch.shipping import Ended, Ending
from kdist.parity import Training
from tests.helpers.processes import BACKENDS, each_backend
from tests.helpers.scripts import Script, environments_of, finished, local_addresses, run_python, tf_config

SOURCE = "import sys\nfrom kdist.command_line import main\nsys.exit(main({arguments!r}))"
CHECKS = "python packages backend devices token cluster names ports threads limits joining clocks shared all-reduce"


def start(folder, name, *arguments, **env):
    return Script(folder, name, SOURCE.format(arguments=["doctor", *arguments]), env)


def checks(said):
    """Returns the status of each check in a report."""
    return {check: status for status, check in re.findall(r"^  (ok|warn|FAIL) +(\S+)", said, re.MULTILINE)}


@each_backend
def test_workers_that_are_well(backend, tmp_path):
    source = SOURCE.format(arguments=["doctor", "--shared", "."])
    scripts = finished(tmp_path, source, environments_of(backend))
    said = scripts[0].stdout()
    assert said.startswith(f"kdist doctor: 2 workers on {backend}, cluster from TF_CONFIG\n")
    assert list(checks(said)) == CHECKS.split() and "FAIL" not in said
    assert said.endswith("next: start your script in place of kdist doctor\n")
    assert (
        "all 2 workers joined within" in said and "MB/s)" in said and "files are replaced atomically" in said
    )
    assert scripts[1].stdout() == ""
    assert not list(tmp_path.glob(".kdist*"))


# The broken setups, with their expected output. They all wait for a few seconds at the same time.
def broken(folder):
    def alone(name, *arguments, **env):
        return start(folder, name, "--timeout", "12", *arguments, **env)

    yield from (
        (
            alone(f"missing-{backend}", KERAS_BACKEND=backend, TF_CONFIG=tf_config(addresses, 0)),
            "FAIL  joining",
            rf"1 of 2 workers did not join within \d+ s: worker 1 \({addresses[1]}\)",
        )
        for backend, addresses in ((backend, local_addresses(2)) for backend in BACKENDS)
    )
    first, second = local_addresses(2)
    yield (
        alone("chief", KERAS_BACKEND="torch", TF_CONFIG=tf_config([first, second], 1)),
        "FAIL  joining",
        rf"worker 0 \({first}\).*No process listens at {first}",
    )
    yield alone("wrong", KERAS_BACKEND="jax", TF_CONFIG="{"), "FAIL  cluster", "the value is not JSON"
    arguments = ["test", "--timeout", "12"]
    tested = Script(
        folder, "tested", SOURCE.format(arguments=arguments), {"KERAS_BACKEND": "jax", "TF_CONFIG": "{"}
    )
    yield tested, "FAIL  cluster", "the value is not JSON.* jax [^ ]+ 1 FAIL not run FAIL next: "
    unknown = alone("unknown", KERAS_BACKEND="numpy", TF_CONFIG=tf_config([first, second], 0))
    yield unknown, "FAIL  backend", "kdist supports tensorflow, jax, torch"


def test_workers_that_are_not(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told = {"KERAS_BACKEND": "jax", "TF_CONFIG": tf_config([address, *local_addresses(1)], 0)}
        busy = start(tmp_path, "busy", "--timeout", "12", **told)
        with contextlib.ExitStack() as cleanup:
            wrong = [*broken(tmp_path), (busy, "FAIL  ports", "worker 0 .* Cannot listen on port")]
            for script, _, _ in wrong:
                cleanup.enter_context(script)
            for script, line, words in wrong:
                said = " ".join(script.finish(code=1).stdout().split())
                assert " ".join(line.split()) in said and re.search(words, said), said
                assert "next: " in script.stdout().splitlines()[-1]
    port = address.rpartition(":")[2]
    assert busy.stdout().endswith(f"next: ss -ltnp 'sport = :{port}'\n")


def test_another_version_of_kdist(tmp_path):
    source = """
        import dataclasses
        from kdist.doctor import examination, facts

        @dataclasses.dataclass(frozen=True)
        class Facts(facts.Facts):
            of_tomorrow: int = 0

        installed, facts.Facts = facts.version_of, Facts
        facts.version_of = lambda package: "9.0" if package == "kdist" else installed(package)
        examination.examine(examination.Options(60.0), lambda report: print(report.text(), flush=True))
    """
    first, second = environments_of("torch")
    with start(tmp_path, "ours", **first) as ours, Script(tmp_path, "theirs", source, second) as theirs:
        scripts = [ours.finish(code=1), theirs.finish()]
    for script in scripts:
        said = " ".join(script.stdout().split())
        assert re.search(r"FAIL packages kdist [0-9.]+\w* on worker 0, 9.0 on worker 1", said), said
        assert said.count("FAIL") == 1 and "clocks" not in said, "others may be asked other things"


@pytest.mark.kills("doctor_does_not_end_by_itself")
def test_what_does_not_end(tmp_path):
    source = """
        import time
        from kdist.doctor import examination
        examination.probes.all_reduce_times = lambda strategy: time.sleep(100)
        examination.examine(examination.Options(8.0), lambda report: print(report.text(), flush=True))
    """
    script = Script(tmp_path, "hangs", source, {"KERAS_BACKEND": "torch"}).finish(60, code=1)
    said = " ".join(script.stdout().split())
    assert (
        "ok clocks" in said and "FAIL all-reduce not finished within 8 s → The workers reach worker 0" in said
    )
    assert "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0" in said


@pytest.mark.kills("doctor_sum_not_looked_at")
def test_an_engine_that_computes_something_else(tmp_path):
    source = """
        import dataclasses
        import kdist
        import numpy as np
        from kdist.doctor import examination, probes

        plain = probes.train_it(None)
        expected = dataclasses.replace(plain, numbers={k: (np.array(v) + 1).tolist() for k, v in plain.numbers.items()})
        right = kdist.ReplicaContext.all_reduce
        kdist.ReplicaContext.all_reduce = lambda *args, **kwargs: right(*args, **kwargs) * 2
        options = examination.Options(60.0, trains=True, expected=expected)
        examination.examine(options, lambda report: print(report.text(), flush=True))
    """
    scripts = finished(tmp_path, source, environments_of("torch"), 60)
    said = " ".join(scripts[0].stdout().split())
    assert re.search(r"FAIL all-reduce \S+ ms .* but the sum is wrong", said), said
    assert re.search("FAIL one step .* 11 of 11 differ", said), said


@pytest.mark.full
@pytest.mark.timeout(300)
def test_kdist_test_starts_workers_itself():
    done = run_python("-m", "kdist", "test", "--backend", "torch", "--timeout", "150", timeout=280)
    assert done.stdout.startswith("kdist doctor: 2 workers on torch, started on this machine\n")
    assert "one step    2 replicas match one device" in done.stdout
    *_, head, row, last = done.stdout.splitlines()
    assert head.split() == ["backend", "version", "checks", "one", "step", "result"]
    assert row.startswith("torch ") and row.endswith("matches   ok")
    assert last == "next: kdist run --num-workers 2 train.py"


@pytest.mark.kills("doctor_step_not_compared")
def test_one_step_that_differs(monkeypatch):
    runs = {True: {"loss": 0.5}, False: {"loss": 0.75}}

    def train(make_strategy):
        return Training("a strategy", 2, runs[make_strategy() == "right"], ())

    monkeypatch.setattr(probes, "train_it", train)
    expected = Training("one device", 1, {"loss": 0.5}, ())

    def exchange(numbers):
        return [runs[True], numbers]

    assert probes.compare_step(expected, "right", exchange).status == "ok"
    wrong = probes.compare_step(expected, "wrong", exchange)
    assert (
        wrong.status == "FAIL"
        and "worker 1" in wrong.says
        and "0.5 on one device, 0.75 with the strategy" in wrong.says
    )
    assert probes.compare_step(None, "wrong", exchange) is None


WELL, ILL = Line("ok", "python", "3"), Line("FAIL", "backend", "jax cannot be imported: no on worker 1")


def ended(index, code=0, lines=()):
    return Ended(index, code, list(lines), None)


def test_reports_of_workers_become_one():
    both = Report("two", [WELL], joined=True)
    assert together([both, Report("one", [ILL])], Ending([])) is both
    alone = together([Report("zero", [WELL]), Report("one", [WELL, ILL])], Ending([], failed=ended(1, 1)))
    assert alone.lines == [WELL, ILL] and alone.title == "zero"
    dead = together([Report("zero", [WELL]), None], Ending([], failed=ended(1, -9, ["last words"])))
    assert (
        dead.exit_code == 1 and dead.lines[-1].says == "worker 1 was killed by SIGKILL (signal 9): last words"
    )
    silent = together([None, None], Ending([], unfinished=[ended(0), ended(1)]))
    assert [line.says for line in silent.lines] == ["worker 0 did not exit", "worker 1 did not exit"]


def test_gpus_are_hidden_where_there_are_too_few():
    for gpus, num_workers, hidden in (("", 2, False), ("0", 1, False), ("0", 2, True), ("0,1", 2, False)):
        assert bool(hidden_gpus(num_workers, {"CUDA_VISIBLE_DEVICES": gpus})) == hidden


def test_the_table():
    step = Line("ok", "one step", "well")
    shown = [("jax", Report("", [WELL, step])), ("torch", Report("", [WELL, ILL]))]
    head, first, second = command._table(shown).splitlines()
    assert first.startswith("jax ") and first.split()[2:] == ["2", "ok", "matches", "ok"]
    assert second.endswith("1 ok, 1 FAIL  not run   FAIL")
    assert head.index("result") == first.rindex("ok")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "--timeout", "0"], "--timeout is not between 1 and"),
        (["doctor", "--num-workers", "many"], "--num-workers is not a whole number of at least 1"),
        (["test", "--num-workers", "1"], "--num-workers is not a whole number of at least 2"),
        (["doctor", "--backend", "numpy"], "kdist does not support the Keras backend 'numpy'"),
    ],
)
def test_wrong_calls(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_number_of_workers_beside_a_cluster(capsys):
    with environment.patched(TF_CONFIG=tf_config(["a:1", "b:1"], 0)):
        assert main(["doctor", "-n", "2"]) == 2
    assert "a cluster is configured here" in capsys.readouterr().err


def test_json(monkeypatch, capsys):
    monkeypatch.setattr(command, "examine_here", lambda *told: Report("two", [WELL, ILL], joined=True))
    assert main(["doctor", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["ok"], said["title"], said["next"]) == (
        False,
        "two",
        "fix the failed checks, then: kdist doctor",
    )
    assert said["lines"][1] == {
        "status": "FAIL",
        "check": "backend",
        "says": ILL.says,
        "remedy": "",
        "command": "",
    }


def test_a_backend_may_be_spelt_in_capitals(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        command, "examine_here", lambda *told: asked.append(told[-1]) or Report("two", [WELL])
    )
    assert main(["doctor", "--backend", "JAX"]) == 0
    assert asked == ["jax"]
