"""The doctor turns facts into the right lines; the tests provoke every line."""

from __future__ import annotations

import dataclasses
import re

import pytest

from kdist.doctor.examination import failed_line
from kdist.doctor.facts import Facts
from kdist.doctor.machines import judge_all_reduce, judge_clocks, judge_machines, judge_shared
from kdist.doctor.report import Line, Report, names_of, spread
from kdist.doctor.software import judge_software
from kdist.errors import ClusterConfigError, WorkerLostError
from tests.helpers.environment import ROOT

WELL = Facts(
    name="worker 0",
    host="host0",
    python="3.11.7",
    executable="/usr/bin/python3",
    versions={"kdist": "0.2.0", "keras": "3.15.1", "numpy": "2.0.0", "torch": "2.13.0"},
    backend=("torch", "KERAS_BACKEND is set"),
    sources=[("TF_CONFIG", "worker 0 (host0:2222) of 2", True)],
    resolved={"host0": "10.0.0.1", "host1": "10.0.0.2"},
    unresolved={},
    address="host0:2222",
    port="",
    cores=[0, 1, 2, 3],
    threads=4,
    open_files=4096,
    shared_memory=1 << 30,
    gpus=0,
    token="aa",
    devices=("cpu:0",),
)
OTHER = dataclasses.replace(
    WELL,
    name="worker 1",
    host="host1",
    address="host1:2222",
    sources=[("TF_CONFIG", "worker 1 (host1:2222) of 2", True)],
)
BUSY = "Cannot listen on port 2222: Address already in use."


def lines(one=None, two=None):
    """Returns the lines about two workers by check, with these differences on either worker."""
    everyone = [dataclasses.replace(WELL, **one or {}), dataclasses.replace(OTHER, **two or {})]
    found: dict[str, list[Line]] = {}
    for line in [*judge_software(everyone), *judge_machines(everyone)]:
        found.setdefault(line.check, []).append(line)
    return found


def test_where_all_is_well():
    assert {check: [line.says for line in said] for check, said in lines().items()} == {
        "python": ["3.11.7 on all workers, /usr/bin/python3"],
        "packages": ["kdist 0.2.0, keras 3.15.1, numpy 2.0.0, torch 2.13.0"],
        "backend": ["torch (KERAS_BACKEND is set) on all workers"],
        "devices": ["cpu:0 on all workers"],
        "token": ["the same on all workers"],
        "cluster": ["described by TF_CONFIG on all workers"],
        "names": ["2 hosts can be resolved"],
        "ports": ["free on all workers"],
        "threads": ["4 threads on 4 cores of host0, 4 threads on 4 cores of host1"],
        "limits": ["open files and /dev/shm are sufficient"],
    }
    assert {line.status for said in lines().values() for line in said} == {"ok"}


def versions(**changes):
    return {"versions": WELL.versions | changes}


# The differences on worker 0 and on worker 1, and the resulting line: status, check, text, command.
PROVOKED = {
    "python": ({}, {"python": "3.12.1"}, "FAIL", "python", "3.11.7 on worker 0, 3.12.1 on worker 1", ""),
    "patch": ({}, {"python": "3.11.9"}, "warn", "python", "3.11.9 on worker 1", ""),
    "keras": (
        {},
        versions(keras="3.16.0"),
        "FAIL",
        "packages",
        "keras 3.15.1 on worker 0, 3.16.0 on worker 1",
        "pip install keras==3.15.1",
    ),
    "numpy": (
        {},
        versions(numpy="1.26"),
        "warn",
        "packages",
        "numpy 2.0.0 on worker 0",
        "pip install numpy==2.0.0",
    ),
    "not there": (
        {},
        versions(torch="not installed"),
        "FAIL",
        "packages",
        "torch 2.13.0 on worker 0, not installed on worker 1",
        "pip install torch",
    ),
    "other backend": (
        {},
        {"backend": ("jax", "set in keras.json")},
        "FAIL",
        "backend",
        "jax (set in keras.json) on worker 1",
        "export KERAS_BACKEND=torch",
    ),
    "unknown backend": (
        {"backend": ("numpy", "why")},
        {},
        "FAIL",
        "backend",
        "kdist supports tensorflow, jax, torch",
        "export KERAS_BACKEND=jax",
    ),
    "broken": (
        {},
        {"import_error": "no libcudart"},
        "FAIL",
        "backend",
        "torch cannot be imported: no libcudart on worker 1",
        "KERAS_BACKEND=torch python -c 'import keras'",
    ),
    "devices": (
        {},
        {"devices": ("cpu:0", "cpu:1")},
        "FAIL",
        "devices",
        "cpu:0, cpu:1 on worker 1",
        "export CUDA_VISIBLE_DEVICES=0",
    ),
    "kind": (
        {},
        {"devices": ("gpu:0",), "accelerators": 1},
        "FAIL",
        "devices",
        "gpu:0 on worker 1",
        "export CUDA_VISIBLE_DEVICES=0",
    ),
    "unused": (
        {"gpus": 2},
        {"gpus": 2},
        "warn",
        "devices",
        "torch does not see 2 GPUs on all workers",
        "kdist info",
    ),
    "no token": (
        {"token": ""},
        {"token": ""},
        "warn",
        "token",
        "not set; the workers cannot verify connections",
        "export KDIST_CLUSTER_TOKEN=$(openssl rand -hex 16)",
    ),
    "token": (
        {},
        {"token": ""},
        "FAIL",
        "token",
        "secret aa on worker 0, none on worker 1",
        "export KDIST_CLUSTER_TOKEN=$(openssl rand -hex 16)",
    ),
    "conflict": (
        {"sources": [*WELL.sources, ("Slurm", "worker 0 of 4", False)]},
        {},
        "warn",
        "cluster",
        "TF_CONFIG on all workers describes the cluster, but Slurm contradicts it on worker 0: worker 0 of 4",
        "kdist info",
    ),
    "wrong source": (
        {"sources": [("TF_CONFIG", "invalid: no JSON", True)]},
        {},
        "FAIL",
        "cluster",
        "TF_CONFIG on worker 0 is invalid: no JSON",
        "kdist info",
    ),
    "name": (
        {},
        {"unresolved": {"host0": "Name or service not known"}},
        "FAIL",
        "names",
        "worker 1 cannot resolve 'host0': Name or service not known",
        "getent hosts host0",
    ),
    "loopback": (
        {},
        {"resolved": {"host0": "127.0.1.1", "host1": "10.0.0.2"}},
        "FAIL",
        "names",
        "worker 1 resolves 'host0' to 127.0.1.1",
        "getent hosts host0",
    ),
    "own loopback": (
        {"resolved": {"host0": "127.0.1.1", "host1": "10.0.0.2"}},
        {},
        "warn",
        "names",
        "worker 0 resolves 'host0' to 127.0.1.1",
        "getent hosts host0",
    ),
    "port": (
        {"port": BUSY},
        {},
        "FAIL",
        "ports",
        "worker 0 (host0:2222): Cannot listen on port 2222",
        "ss -ltnp 'sport = :2222'",
    ),
    "unused port": (
        {},
        {"port": BUSY},
        "warn",
        "ports",
        "worker 1 (host1:2222): Cannot listen on port 2222",
        "ss -ltnp 'sport = :2222'",
    ),
    "threads": (
        {},
        {"host": "host0"},
        "warn",
        "threads",
        "the workers on host0 use 8 threads, but have 4 cores",
        "export OMP_NUM_THREADS=2 TF_NUM_INTRAOP_THREADS=2",
    ),
    "cores": (
        {"cores": [0], "threads": 1},
        {"host": "host0", "cores": [0], "threads": 1},
        "warn",
        "threads",
        "2 workers share 1 core of host0",
        "",
    ),
    "files": ({}, {"open_files": 256}, "warn", "limits", "open files: 256 on worker 1", "ulimit -n 4096"),
    "memory": (
        {"shared_memory": 64 << 20},
        {},
        "warn",
        "limits",
        "/dev/shm has 64 MiB on worker 0",
        "docker run --shm-size=2g",
    ),
}


@pytest.mark.kills(doctor_conflict_not_told="[conflict]", doctor_versions_not_compared="[keras]")
@pytest.mark.parametrize("name", PROVOKED)
def test_what_is_wrong(name):
    one, two, status, check, words, command = PROVOKED[name]
    said = [line for line in lines(one, two)[check] if line.status != "ok"]
    assert [(line.status, line.command) for line in said] == [(status, command)]
    assert words in said[0].says
    others = {c for c, found in lines(one, two).items() if any(line.status != "ok" for line in found)}
    assert others == {check}, "one cause, one line"


def test_workers_of_one_machine_need_no_token():
    here = {"token": "", "resolved": {"127.0.0.1": "127.0.0.1"}}
    (said,) = lines(here, here)["token"]
    assert (said.status, said.command) == ("ok", "") and "of the user" in said.says


def test_every_check_is_provoked():
    assert {row[3] for row in PROVOKED.values()} == set(lines())


@pytest.mark.kills("doctor_cores_of_one_worker")
def test_workers_that_have_cores_of_their_own_do_not_share_them():
    one, two = ({"host": "host0", "cores": [core], "threads": 1} for core in (0, 1))
    (line,) = lines(one, two)["threads"]
    assert (line.status, line.says) == ("ok", "2 threads on 2 cores of host0")


def test_sources_that_say_the_same_do_not_conflict():
    also = [("torchrun", "worker 0 of 2", False), ("Slurm", "does not describe a cluster", False)]
    assert [line.status for line in lines({"sources": [*WELL.sources, *also]})["cluster"]] == ["ok"]
    assert "no cluster is configured" in lines({"sources": []}, {"sources": []})["cluster"][0].says


@pytest.mark.parametrize(
    ("offsets", "status", "says"),
    [
        ([(0.0, 0.001), (0.2, 0.03)], "ok", "within 230 ms"),
        ([(0.0, 0.001), (-3.0, 0.1)], "warn", "worker 1 is 3.0 s behind; times in logs"),
        ([(0.0, 0.001), (90.0, 0.1)], "warn", "worker 1 is 90.0 s ahead; times"),
        ([(0.0, 0.001), (3.0, 2.5)], "ok", "within 5500 ms"),  # the measurement is not more precise
    ],
)
def test_clocks(offsets, status, says):
    line = judge_clocks(offsets)
    assert line.status == status and line.says.startswith(says)


@pytest.mark.kills("doctor_looks_at_a_directory_that_is_missing")
def test_shared_folder():
    assert judge_shared("/data", ["", ""]).status == "ok"
    assert "mkdir -p /no/such" in repr(judge_shared("/no/such", ["cannot be written (No such file)"]))
    line = judge_shared("/data", ["", "cannot be written (Permission denied)"])
    assert (line.status, line.says) == ("FAIL", "/data: cannot be written (Permission denied) on worker 1")


@pytest.mark.kills("doctor_wrong_sum_passes")
def test_all_reduce():
    line = judge_all_reduce([0.0005, 0.02], 8 << 20, True)
    assert (line.status, line.says) == ("ok", "0.5 ms for one number, 20 ms for 8 MB (419 MB/s)")
    wrong = judge_all_reduce([0.0005, 0.02], 8 << 20, False)
    assert wrong.status == "FAIL" and "the sum is wrong" in wrong.says


def test_what_lies_between_workers_is_named_where_nothing_else_says_what_to_do():
    advised = [
        (stage, type(error).__name__)
        for stage in ("joining", "all-reduce", "one step")
        for error in (ConnectionError("x"), WorkerLostError("x"), ClusterConfigError("x", hint="y"))
        if "Open all ports" in failed_line(stage, error).text()
    ]
    assert advised == [
        (s, e) for s in ("joining", "all-reduce") for e in ("ConnectionError", "WorkerLostError")
    ]


def test_text_of_a_report():
    told = Line("FAIL", "names", "worker 1 cannot resolve 'host0'", "There", "getent hosts host0")
    report = Report("2 workers on jax", [Line("ok", "python", "3.11.7"), told], joined=True)
    assert report.text() == (
        "kdist doctor: 2 workers on jax\n"
        "  ok    python      3.11.7\n"
        "  FAIL  names       worker 1 cannot resolve 'host0'\n"
        "                    → There: getent hosts host0"
    )
    assert report.exit_code == 1 and Report("", [report.lines[0]]).exit_code == 0
    assert report.next_command("run", "again") == "getent hosts host0"
    assert Report("", [Line("FAIL", "a", "b")]).next_command("run", "again") == "again"
    assert Report("", [Line("warn", "a", "b", command="c")]).next_command("run", "again") == "run"


def test_long_lines_are_wrapped_and_commands_are_not():
    command = "export " + "A" * 150
    *says, last = Line("warn", "names", "word " * 60, "Do", command).text().splitlines()
    assert all(len(line) <= 118 for line in says) and len(says) > 2
    assert last.endswith(command)


def test_who():
    assert names_of(["worker 0"], 1) == "worker 0" and names_of(["worker 1"], 2) == "worker 1"
    assert names_of([f"worker {i}" for i in range(5)], 9) == "worker 0, worker 1 and 3 more"
    assert (
        spread([("worker 0", 1), ("worker 1", 2), ("worker 2", 1)], 3)
        == "1 on worker 0, worker 2, 2 on worker 1"
    )


def test_the_page_explains_every_check():
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `(.+?)` \|", page.partition("## What the lines mean")[2], re.MULTILINE)
    others = ("joining", "clocks", "shared", "all-reduce", "one step")
    assert sorted(explained) == sorted([*lines(), *others])
