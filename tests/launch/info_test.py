"""`kdist info` and `kdist demo`: the commands, and their parts."""

import importlib.metadata
import platform
import sys

import pytest

from kdist import demo
from kdist.command_line import build_parser
from kdist.launch import info
from kdist.launch.plan import count_cores
from tests.helpers.processes import TIMEOUT, each_backend, run
from tests.helpers.scripts import run_python


def test_versions():
    assert info.version_of("pytest")[0].isdigit()
    assert info.version_of("no-such-package") == "not installed"


def test_devices_are_asked_in_another_process(monkeypatch):
    # A broken installation crashes or hangs in that process. Tests below check the real output.
    monkeypatch.setitem(info._DEVICES, "jax", "print('noise'); print('one, two')")
    assert info.devices_of("jax") == "one, two"
    monkeypatch.setitem(info._DEVICES, "jax", "import os; os.abort()")
    assert info.devices_of("jax") == "cannot list devices: exit code -6"
    monkeypatch.setitem(info._DEVICES, "jax", "raise ImportError('broken')")
    assert info.devices_of("jax") == "cannot list devices: ImportError: broken"
    monkeypatch.setitem(info._DEVICES, "jax", "import time; time.sleep(60)")
    assert info.devices_of("jax", timeout=0.3) == "no response within 0.3 s"
    assert "kdist supports" in info.devices_of("numpy")


def test_cluster_lines():
    lines = "\n".join(info.cluster_lines({"TF_CONFIG": "{", "RANK": "0", "WORLD_SIZE": "1"}))
    assert "TF_CONFIG: invalid: `TF_CONFIG`: the value is not JSON" in lines
    assert "torchrun: worker 0 of 1; not used because TF_CONFIG comes first" in lines
    assert info.cluster_lines({}) == ["  default: one worker; used because no variable describes a cluster"]


def in_worker_answer(code):
    """Returns the output of the command in a process that has some devices."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    return printed.getvalue()


DEVICES = {
    # The workers of a pool have three CPU devices.
    "tensorflow": "cpu:0, cpu:1, cpu:2\n",
    "jax": "cpu:0, cpu:1, cpu:2\n",
    "torch": "cpu:0\n",
}


@pytest.mark.kills(launch_info_without_torch="[torch]")
@each_backend
def test_what_each_backend_is_asked(backend):
    said = run(backend, 1, in_worker_answer, info._DEVICES[backend])[0]
    if "gpu" in said.lower() or "cuda" in said:  # in addition to the CPUs, or instead of them
        assert ":0" in said
    else:
        assert said == DEVICES[backend]


def command(*arguments, timeout=TIMEOUT, **env):
    return run_python("-m", "kdist", *arguments, timeout=timeout, code=None, **env)


def test_info():
    done = command("info", KERAS_BACKEND="jax", RANK="1", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="80")
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert lines["python"].startswith(f"{platform.python_version()} ({sys.executable})")
    for package in ("keras", "jax", "numpy"):
        assert lines[package] == importlib.metadata.version(package)
    assert lines["os"].endswith("memory") and f"{count_cores()} cores" in lines["os"]
    assert lines["backend"] == "jax (KERAS_BACKEND is set)"
    assert lines["devices"].split(", ")[0] in ("cpu:0", "cuda:0")
    assert lines["  torchrun"].startswith("worker 1 of 2; used")


def test_the_demo_s_options():
    options = build_parser().parse_args(["demo"])
    assert (options.num_workers, options.backend, options.epochs) == ("2", None, "8")
    with pytest.raises(SystemExit):
        build_parser().parse_args(["demo", "--backend", "numpy"])


@pytest.mark.kills("demo_does_not_compare_losses")
def test_the_demo_says_when_the_runs_disagree():
    one = {"loss": 0.5, "accuracy": 0.9, "steps_per_second": 10.0, "weights": [[[0.5, 1.0]], [2.0]]}
    near, far = one | {"weights": [[[0.5, 1.0005]], [2.0]]}, one | {"weights": [[[0.5, 1.0]], [1.998]]}
    assert "largest weight difference                       5.0e-04" in demo._report(one, near, 3)
    assert "The runs agree: 3 workers" in demo._report(one, near, 3)
    for other in (far, one | {"loss": 0.502}):
        assert "The runs DIFFER by more than 0.001" in demo._report(one, other, 3)


def test_help_of_the_command_line():
    done = command("run", "--help")
    assert done.returncode == 0 and "--num-workers" in done.stdout and "examples:" in done.stdout
