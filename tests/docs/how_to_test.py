"""Checks the *How-to* pages without a cluster: schemas, shell scripts, and kdist commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kdist.cluster import discover, free_ports
from kdist.command_line import main
from tests.helpers.environment import ROOT, clean_environment

PAGES = {
    page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "how-to").glob("*.md"))
}
# Kubeflow's resources: the field with the replicas, their types, and the container that gets the variables.
JOBS = {
    "TFJob": ("tfReplicaSpecs", {"Chief", "Worker", "PS", "Evaluator"}, "tensorflow"),
    "PyTorchJob": ("pytorchReplicaSpecs", {"Master", "Worker"}, "pytorch"),
    "JAXJob": ("jaxReplicaSpecs", {"Worker"}, "jax"),
}


def blocks(kind: str) -> list[tuple[str, str]]:
    found = [
        (name, block)
        for name, page in PAGES.items()
        for block in re.findall(rf"^```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    ]
    assert found
    return found


def resources() -> list[Any]:
    return [one for _, block in blocks("yaml") for one in yaml.safe_load_all(block)]


def run_bash(source: str, folder: Path, env: dict[str, str], *arguments: str) -> str:
    """Runs a script, with the programs in `bin` first in `PATH`, and returns its stdout."""
    (folder / "script.sh").write_text(source, encoding="utf-8")
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "script.sh", *arguments],
        env=clean_environment() | path | env, cwd=folder, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return done.stdout


def program(folder: Path, name: str, source: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/bash\n{source}\n", encoding="utf-8")
    (folder / "bin" / name).chmod(0o755)


def test_there_are_pages_for_all() -> None:
    assert {*PAGES} == {
        "gpus", "kubeflow", "kubernetes", "mpi", "notebooks", "ray", "several-machines", "slurm", "tpu",
    }  # fmt: skip


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
def test_kubernetes_takes_what_is_written_by_hand(version: str) -> None:
    found = [one for one in resources() if "kubeflow" not in one["apiVersion"]]
    assert [one["kind"] for one in found] == ["Service", "Job"]
    for one in found:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_workers_of_the_job_by_hand_find_each_other() -> None:
    service, job = (one for one in resources() if "kubeflow" not in one["apiVersion"])
    spec = job["spec"]
    pod = spec["template"]["spec"]
    told = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    for index in range(spec["completions"]):
        cluster = discover(environ=told | {"JOB_COMPLETION_INDEX": str(index)})
        assert (cluster.worker_index, cluster.num_workers) == (index, spec["parallelism"])
    name = job["metadata"]["name"]
    assert (
        cluster.coordinator == f"{name}-0.{pod['subdomain']}:2222"
        and pod["subdomain"] == service["metadata"]["name"]
    )
    assert service["spec"]["selector"] == {"job-name": name}


@pytest.mark.parametrize("kind", JOBS)
def test_jobs_of_kubeflow(kind: str) -> None:
    (job,) = (one for one in resources() if one["kind"] == kind)
    replicas, roles, container = JOBS[kind]
    assert job["apiVersion"] == "kubeflow.org/v1" and {*job["spec"]} == {replicas}
    for role, spec in job["spec"][replicas].items():
        assert role in roles and {*spec} == {"replicas", "restartPolicy", "template"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **spec["template"]}
        kubernetes_validate.validate(pod, "1.29", strict=True)
        assert [one["name"] for one in pod["spec"]["containers"]] == [container]


def test_the_job_of_trainer() -> None:
    (job,) = (one for one in resources() if one["kind"] == "TrainJob")
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1" and {*job["spec"]} == {
        "runtimeRef",
        "trainer",
    }
    trainer = job["spec"]["trainer"]
    assert {*trainer} <= {"args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode"}
    kubernetes_validate.validate(
        {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"},
            "spec": {"containers": [{"name": "a", **{k: trainer[k] for k in ("command", "env", "image")}}]},
        },
        "1.29", strict=True,
    )  # fmt: skip


@pytest.mark.parametrize(("page", "source"), blocks("bash"), ids=[page for page, _ in blocks("bash")])
def test_bash_can_read_it(page: str, source: str, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n"], input=source, text=True, timeout=30, check=True)
    assert source.startswith("#!/bin/bash\n")


def test_the_script_of_slurm_starts_a_step(tmp_path: Path) -> None:
    ((_, source),) = [block for block in blocks("bash") if block[0] == "slurm"]
    program(tmp_path, "srun", 'echo "$KERAS_BACKEND" "$@"')
    said = run_bash(source, tmp_path, {})
    assert said == "jax --distribution=block --kill-on-bad-exit=0 python train.py\n"


def test_each_process_of_mpi_has_a_gpu(tmp_path: Path) -> None:
    ((_, source),) = [block for block in blocks("bash") if block[0] == "mpi"]
    told = {"OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert run_bash(source, tmp_path, told, "bash", "-c", "echo $CUDA_VISIBLE_DEVICES") == "3\n"


def test_one_command_a_host_by_ssh(tmp_path: Path) -> None:
    ((_, source),) = [block for block in blocks("bash") if block[0] == "several-machines"]
    program(tmp_path, "ssh", 'echo "$2|$(bash -c "$3")"')
    program(tmp_path, "kdist", 'echo "$KDIST_CLUSTER_TOKEN|$@"')
    said = [line.split("|") for line in sorted(run_bash(source, tmp_path, {}).splitlines())]
    assert [host for host, _, _ in said] == ["host0", "host1"]
    assert len({token for _, token, _ in said}) == 1
    assert len(bytes.fromhex(said[0][1])) == 16
    for index, (_, _, words) in enumerate(said):
        assert words == f"run -n 2 --hosts host0:5000,host1:5000 --host-index {index} train.py"


def commands(name: str) -> list[list[str]]:
    """Returns the arguments of each `kdist NAME` command on the pages, without the part after a pipe."""
    lines = re.findall(rf"^\$ (kdist {name}.*)$", "\n".join(PAGES.values()), re.MULTILINE)
    return [shlex.split(line.partition(" | ")[0], comments=True)[1:] for line in lines]


@pytest.mark.kills("how_to_job_that_kubernetes_refuses")
def test_manifests_are_written(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = commands("manifest")
    assert [words[1] for words in written] == ["kubernetes", "slurm"]
    for words in written:
        assert main(words) == 0, capfd.readouterr().err
    for one in yaml.safe_load_all(capfd.readouterr().out):
        kubernetes_validate.validate(one, "1.29", strict=True)
    subprocess.run(["bash", "-n", "train.sh"], timeout=30, check=True)


@pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="there is no `mpirun`: apt-get install openmpi-bin"
)
def test_the_processes_of_mpirun_are_workers(tmp_path: Path) -> None:
    source = "from kdist.cluster import discover\nc = discover()\n"
    source += "print(c.source, c.worker_index, c.num_workers, c.coordinator)\n"
    (tmp_path / "who.py").write_text(source, encoding="utf-8")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    address = f"127.0.0.1:{free_ports(1)[0]}"
    host, port = address.split(":")
    options = ["--oversubscribe", "-x", f"MASTER_ADDR={host}", "-x", f"MASTER_PORT={port}"]
    done = subprocess.run(
        ["mpirun", "-n", "2", *options, sys.executable, "who.py"],
        env=clean_environment() | root, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"MPI {rank} 2 {address}" for rank in (0, 1)]
