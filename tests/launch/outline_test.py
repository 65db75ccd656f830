"""A job's plan in words, and the output of `kdist run --dry-run`, which starts nothing."""

from __future__ import annotations

import json
import logging
import re

import pytest

import kdist
from kdist.cluster import logs
from kdist.command_line import main
from kdist.launch import linux, outline
from kdist.launch.plan import plan_job
from tests.helpers.ports import neighboring_ports

GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.fixture
def script(tmp_path, monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("A process was started.")

    monkeypatch.setattr(linux, "become_subreaper", start)
    monkeypatch.setattr("subprocess.Popen", start)
    for name in ("KERAS_BACKEND", "KDIST_LOG", "TF_CONFIG", "KDIST_CLUSTER_TOKEN", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in GPUS.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "train it.py"
    path.write_text("raise SystemExit(3)")
    return path


@pytest.fixture
def level():
    before = logs.logger.level
    yield
    logs.logger.setLevel(before)


def line(*args, asked="2", environ=GPUS, hosts=(), **kwargs):
    plan = plan_job(*args, environ={"KERAS_BACKEND": "jax", **environ}, hosts=hosts, **kwargs)
    plan.release_ports()
    return outline.line(plan, asked, max(1, len(hosts))), outline.left_idle(plan, environ)


@pytest.mark.kills("launch_plan_names_a_backend")
def test_the_line_has_workers_and_devices():
    assert line(2) == ("2 workers × 4 gpu, from --num-workers", "")
    assert line(1)[0].startswith("1 worker × 8 gpu")
    assert line(2, environ={"CUDA_VISIBLE_DEVICES": ""}, backend="Torch") == (
        "2 workers × 1 cpu, from --num-workers",
        "",
    )
    said, _ = line(2, 1, True)
    assert said.startswith("1 chief, 2 workers × 1 gpu, 1 parameter server, 1 evaluator, from")


def test_the_workers_of_this_machine_are_told_from_all():
    port = neighboring_ports(4)
    hosts = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 2}"]
    assert line(2, hosts=hosts, host_index=1)[0].startswith("2 of 4 workers × 4 gpu")


def test_auto_says_what_it_has_found(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert line(1, asked="auto", environ={})[0].endswith("from auto: no GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert line(2, asked="auto", environ={})[0].endswith("from auto: 2 GPUs")


def test_gpus_that_no_task_has_are_named():
    assert line(3)[1] == (
        "GPUs 6, 7 stay idle, because all workers get the same number of GPUs. "
        "To use all, choose a --num-workers that divides 8."
    )
    assert line(7)[1].startswith("GPU 7 stays idle")
    assert line(7, 0, True)[1] == "", "the evaluator has it"
    assert line(3, 1)[1].startswith(
        "GPUs 4, 5, 6, 7 stay idle, because with --num-ps each worker uses one GPU."
    )


@pytest.mark.kills("launcher_dry_run_starts")
def test_a_dry_run_starts_nothing_and_prints_what_each_worker_would_be_told(script, capsys):
    logs = script.parent / "logs"
    call = ["run", "-n", "3", "--dry-run", "--backend", "torch", "--log-dir", str(logs), str(script), "a b"]
    assert main(call) == 0
    out, err = capsys.readouterr()
    assert err == "" and not logs.exists()
    assert out.startswith("plan: 3 workers × 2 gpu, from --num-workers\nGPUs 6, 7 stay idle")
    assert f"'{script}' 'a b'\n" in out and "Nothing was started." in out
    tasks = re.split(r"^worker ", out, flags=re.MULTILINE)[1:]
    for index, task in enumerate(tasks):
        address = re.match(rf"{index} \((127.0.0.1:\d+)\): 2 gpu, ", task)[1]
        config = json.loads(re.search("TF_CONFIG='(.*)'", task)[1])
        assert config["task"] == {"type": "worker", "index": index}
        assert config["cluster"]["worker"][index] == address
        assert f"\n  RANK={index}\n" in task and "\n  KERAS_BACKEND=torch\n" in task
        assert f"\n  CUDA_VISIBLE_DEVICES={2 * index},{2 * index + 1}\n" in task
    assert len(tasks) == 3


@pytest.mark.kills("launcher_dry_run_tells_the_secret")
def test_a_dry_run_shows_no_secret(script, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("secrets.token_hex", lambda size: shown.append("5ec2e7") or "5ec2e7")
    for options in (["-n", "1", "--num-ps", "1"], ["-n", "2"]):
        shown.clear()
        assert main(["run", *options, "--dry-run", str(script)]) == 0
        out, _ = capsys.readouterr()
        assert shown and "5ec2e7" not in out and "KDIST_CLUSTER_TOKEN=" in out


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (["--env", "A=1", "--env", "B=x=y", "--env", "A=2"], ["A=2", "B=x=y"]),
        (["--join-timeout", "45"], ["KDIST_JOIN_TIMEOUT=45"]),
        (["--log-level", "warning"], ["KDIST_LOG=warning"]),
        (["--backend", "Torch", "--env", "KERAS_BACKEND=jax"], ["KERAS_BACKEND=torch"]),
        (["--env", "KERAS_BACKEND=jax"], ["KERAS_BACKEND=jax"]),
    ],
)
@pytest.mark.parametrize("roles", [[], ["--num-ps", "1", "--evaluator"]], ids=["workers", "roles"])
def test_variables_reach_all_tasks(options, variables, roles, script, capsys, level):
    assert main(["run", "-n", "2", *roles, *options, "--dry-run", str(script)]) == 0
    out, _ = capsys.readouterr()
    for variable in variables:
        assert out.count(f"\n  {variable}\n") == (5 if roles else 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--env", "A"], "--env does not have the form NAME=VALUE"),
        (["--env", "1A=b"], "--env does not have the form NAME=VALUE"),
        (["--join-timeout", "soon"], "--join-timeout='soon'"),
        (["--env", "KDIST_LOG=loud"], "KDIST_LOG='loud'"),
        (["--env", "KERAS_BACKEND=numpy"], "Choose one of tensorflow, jax, torch"),
    ],
)
def test_wrong_variables(options, message, script, capsys):
    assert main(["run", "-n", "2", *options, "--dry-run", str(script)]) == 2
    assert message in capsys.readouterr().err


def test_the_log_level_is_also_the_launchers(script, monkeypatch, level):
    monkeypatch.setenv("KDIST_LOG", "error")
    assert main(["run", "--log-level", "debug", "--dry-run", str(script)]) == 0
    assert logs.logger.level == logging.DEBUG


def test_an_unknown_log_level_is_refused(script, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--log-level", "loud", str(script)])
    assert ended.value.code == 2 and "debug" in capsys.readouterr().err


def test_launch_is_an_alias_of_run(script, capsys):
    assert main(["launch", "-n", "2", "--dry-run", str(script)]) == 0
    assert capsys.readouterr().out.startswith("plan: 2 workers")
    assert main(["launch", "-n", "0", str(script)]) == 2
    assert capsys.readouterr().err.startswith("kdist launch: ")


def test_a_wrong_call_is_one_in_a_dry_run_too(script, capsys):
    assert main(["run", "-n", "0", "--dry-run", str(script)]) == 2
    assert 'positive integer nor "auto"' in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"kdist {kdist.__version__}\n"


def test_a_wrong_level_is_a_wrong_call(script, capsys, monkeypatch):
    monkeypatch.setenv("KDIST_LOG", "loud")
    assert main(["run", str(script)]) == 2
    assert "KDIST_LOG='loud'" in capsys.readouterr().err
