"""`kdist.launch(fn)`: results, failures, timeouts."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kdist.launch
from kdist.errors import BackendError, InvalidArgumentError, LaunchError, WorkerTimeoutError
from kdist.launch import local_workers
from kdist.testing import no_leaks
from tests.helpers.scripts import run_python, wait_until

TIMEOUT = 30.0
ROOT = Path(__file__).resolve().parents[2]


def test_the_module_is_the_function():
    from kdist.launch import launch

    assert callable(kdist.launch) and callable(launch)


def test_results_in_order(capfd):
    def work(a, b):
        print("hello", flush=True)
        return int(os.environ["RANK"]), a + b, os.environ["KDIST_TEST"]

    with no_leaks():
        results = kdist.launch(
            work, num_workers=3, args=(1,), kwargs={"b": 2}, env={"KDIST_TEST": 5}, timeout=TIMEOUT
        )
    assert results == [(i, 3, "5") for i in range(3)]
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[worker {i}] hello" for i in range(3)]


def test_a_function_can_refer_to_the_function_that_starts_it():
    assert kdist.launch(lambda: callable(kdist.launch), num_workers=1, timeout=TIMEOUT) == [True]


def test_workers_of_a_function_say_no_plan_unless_they_are_asked_to(monkeypatch):
    def level():
        return os.environ["KDIST_LOG"]

    monkeypatch.delenv("KDIST_LOG", raising=False)
    assert kdist.launch(level, 1, timeout=TIMEOUT) == ["warning"]
    monkeypatch.setenv("KDIST_LOG", "info")
    assert kdist.launch(level, 1, timeout=TIMEOUT) == ["info"]
    assert kdist.launch(level, 1, env={"KDIST_LOG": "debug"}, timeout=TIMEOUT) == ["debug"]


def test_a_failure_is_raised_with_its_cause():
    def work():
        if os.environ["RANK"] == "1":
            raise KeyError("this one")
        time.sleep(100)

    start = time.monotonic()
    with no_leaks(), pytest.raises(LaunchError, match="worker 1 failed: KeyError") as info:
        kdist.launch(work, 2, timeout=TIMEOUT)
    assert time.monotonic() - start < 15
    assert isinstance(info.value.__cause__, KeyError)
    assert "in work" in str(info.value) and info.value.worker_index == 1 and info.value.exit_code == 1


def test_a_killed_worker():
    def work():
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), 9)
        time.sleep(100)

    with no_leaks(), pytest.raises(LaunchError, match="worker 0 was killed by SIGKILL") as info:
        kdist.launch(work, 2, timeout=TIMEOUT)
    assert info.value.exit_code == 137


def test_a_worker_that_leaves_without_a_result():
    with pytest.raises(LaunchError, match="worker 0 exited without returning a result"):
        kdist.launch(lambda: os._exit(0), num_workers=1, timeout=TIMEOUT)


def test_timeout_shows_where_the_workers_are():
    def stuck_here():
        if os.environ["RANK"] == "1":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
            time.sleep(100)

    with no_leaks(), pytest.raises(WorkerTimeoutError, match="within 5 s: worker 1.\n") as info:
        kdist.launch(stuck_here, 2, timeout=5)
    assert "in stuck_here" in str(info.value) and "Stack of worker 0" not in str(info.value)


def test_from_another_thread():
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(kdist.launch(lambda: 7, num_workers=2, timeout=TIMEOUT))
    )
    thread.start()
    thread.join(TIMEOUT)
    assert results == [7, 7]


def test_wrong_arguments():
    with pytest.raises(InvalidArgumentError, match="fn"):
        kdist.launch(3)
    with pytest.raises(InvalidArgumentError, match="`args` is not a tuple"):
        kdist.launch(print, args="x")
    with pytest.raises(InvalidArgumentError, match="`kwargs` is not a dictionary"):
        kdist.launch(print, kwargs=[("end", "")])
    with pytest.raises(InvalidArgumentError, match="number of workers"):
        kdist.launch(print, num_workers=0)
    with pytest.raises(InvalidArgumentError, match="timeout"):
        kdist.launch(print, timeout=0)
    with pytest.raises(BackendError, match="backend"):
        kdist.launch(print, backend="nosuch")
    for env in ({"A": None}, {"A B": 1}, {"A": "\0"}, {1: 1}):
        with pytest.raises(InvalidArgumentError, match="`env` contains a variable with an invalid name or v"):
            kdist.launch(print, num_workers=1, env=env)
    with pytest.raises(InvalidArgumentError, match="pickled"):
        kdist.launch(print, args=(threading.Lock(),))


@pytest.mark.kills("launch_result_not_pickled_without_its_type")
def test_result_that_cannot_travel():
    with pytest.raises(LaunchError, match="worker 0 failed: LaunchError: The result of the function") as info:
        kdist.launch(lambda: {"a": threading.Lock()}, num_workers=1, timeout=TIMEOUT)
    assert "<lambda>" in str(info.value) and "type='dict', error=\"TypeError: cannot pickle" in str(
        info.value
    )


def test_from_a_main_script_without_a_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import kdist.launch\n"
        "class Box:\n    def __init__(self, value): self.value = value\n"
        "def work(box): return Box(box.value + 1)\n"
        "print([box.value for box in kdist.launch(work, num_workers=2, args=(Box(1),), timeout=30)])\n"
    )
    assert run_python(str(script), cwd=tmp_path, timeout=TIMEOUT).stdout == "[2, 2]\n"


def test_ctrl_c_ends_the_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import kdist.launch\n"
        "def work():\n    import os, time\n    print(f'pid={os.getpid()}', flush=True)\n    time.sleep(100)\n"
        "try:\n    kdist.launch(work, 2)\nexcept KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
    )
    with open(tmp_path / "out", "w+") as out:
        process = subprocess.Popen(
            [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=out
        )
        try:
            wait_until(lambda: (tmp_path / "out").read_text().count("pid=") == 2, TIMEOUT)
            process.send_signal(2)
            assert process.wait(TIMEOUT) == 0
        finally:
            process.kill()
    text = (tmp_path / "out").read_text()
    assert text.endswith("interrupted\n")
    for line in text.splitlines()[:2]:
        assert not os.path.exists(f"/proc/{line.partition('pid=')[2]}")


def test_with_servers_the_function_runs_in_the_coordinator_alone(monkeypatch, tmp_path, capfd):
    # Normally, the other tasks run `kdist.Server(…).join()`. Here, they print their task and wait.
    said = "import os, time; print('serves', os.environ['TF_CONFIG'][-34:], flush=True); time.sleep(60)"
    monkeypatch.setattr(local_workers, "_SERVE", said.replace("{", "{{"))

    def train(folder):
        import json
        import os
        import time

        time.sleep(1)
        config = json.loads(os.environ["TF_CONFIG"])
        return config["task"]["type"], {job: len(tasks) for job, tasks in config["cluster"].items()}

    found = kdist.launch(train, num_workers=2, num_ps=1, args=(str(tmp_path),))
    assert found == [("chief", {"chief": 1, "worker": 2, "ps": 1})]
    printed = capfd.readouterr().out
    assert all(f"[{name}] serves" in printed for name in ("worker 0", "worker 1", "ps 0"))

    def fail():
        raise ValueError("no")

    with pytest.raises(LaunchError, match="chief failed: ValueError: no"):
        kdist.launch(fail, num_workers=1, num_ps=1)
    monkeypatch.setattr(local_workers, "_SERVE", "raise SystemExit(5)")
    with pytest.raises(LaunchError, match="worker 0 ended with exit code 5"):
        kdist.launch(time.sleep, num_workers=1, args=(60,), num_ps=1)


@pytest.mark.parametrize("options", [{"num_ps": -1}, {"num_ps": 1.5}, {"num_ps": 1, "on": "ray"}])
def test_a_number_of_servers_that_cannot_be(options):
    with pytest.raises(InvalidArgumentError, match="num_ps"):
        kdist.launch(print, num_workers=1, **options)
