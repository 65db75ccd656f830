"""`kdist info` and `kdist demo`, without the frameworks they ask about."""

import subprocess
import sys
import types

from kdist.launch import info
from kdist.launch.main import main


def test_versions():
    assert info.version_of("pytest")[0].isdigit()
    assert info.version_of("no-such-package") == "not installed"


def test_devices_are_asked_in_another_process(monkeypatch):
    monkeypatch.setitem(info._DEVICES, "jax", "print('noise'); print('one, two')")
    assert info.devices_of("jax") == "one, two"
    monkeypatch.setitem(info._DEVICES, "jax", "import os; os.abort()")
    assert info.devices_of("jax") == "could not be asked: exit code -6"
    monkeypatch.setitem(info._DEVICES, "jax", "raise ImportError('broken')")
    assert info.devices_of("jax") == "could not be asked: ImportError: broken"
    monkeypatch.setitem(info._DEVICES, "jax", "import time; time.sleep(60)")
    assert info.devices_of("jax", timeout=0.3) == "no answer within 0.3 s"
    assert "kdist knows" in info.devices_of("numpy")


def test_cluster_lines():
    lines = "\n".join(info.cluster_lines({"TF_CONFIG": "{", "RANK": "0", "WORLD_SIZE": "1"}))
    assert "TF_CONFIG: wrong: `TF_CONFIG`: the value must be JSON" in lines
    assert "torchrun: worker 0 of 1; not used: TF_CONFIG comes first" in lines
    assert info.cluster_lines({}) == ["  default: a single worker; won: no variable describes a cluster"]


def test_info(monkeypatch, capsys):
    monkeypatch.setattr(info, "devices_of", lambda backend: f"devices of {backend}")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for part in ("python:", "kdist:", "keras:", "tensorflow:", "jax:", "torch:", "numpy:", "cores", "memory"):
        assert part in printed
    assert "backend: torch (KERAS_BACKEND is set)" in printed and "devices: devices of torch" in printed


def test_demo_is_passed_on(monkeypatch):
    seen = []
    demo = types.ModuleType("kdist.demo")
    demo.main = lambda argv: seen.append(argv)
    monkeypatch.setitem(sys.modules, "kdist.demo", demo)
    assert main(["demo", "--num-workers", "3", "--backend", "jax", "--epochs", "2"]) == 0
    assert main(["demo"]) == 0
    assert seen == [["--num-workers", "3", "--backend", "jax", "--epochs", "2"], ["--num-workers", "2"]]


def test_help_of_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "kdist", "run", "--help"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "--num-workers" in done.stdout and "examples:" in done.stdout
