"""`kdist.launch(fn, on="ray")` on a Ray cluster of this machine, which the tests start and stop."""

import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import kdist.launch
from kdist.errors import BackendError, InvalidArgumentError, LaunchError, WorkerTimeoutError
from kdist.launch.linux import descendants
from kdist.testing import no_leaks
from tests.docs.examples import example
from tests.helpers import by_hand
from tests.helpers.alive import left_of
from tests.helpers.environment import ROOT, clean_environment
from tests.helpers.processes import each_backend_in_twelve_turns

TIMEOUT = 60.0
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


def start(ray, before, times=3):
    """Starts Ray, and tries again if one of its own processes does not start within Ray's 30 s.

    In about one of some hundred starts, Ray's first process ended before it opened its log.
    """
    try:
        ray.init(num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
    except Exception as error:
        if times == 1 or "timed out" not in str(error).lower():
            raise
        left = descendants([os.getpid()]) - before
        print(
            f"Ray did not start: {error}. Its processes:",
            {pid: Path(f"/proc/{pid}/status").read_text() for pid in left},
        )
        ray.shutdown()
        for pid in left & descendants([os.getpid()]):
            os.kill(pid, signal.SIGKILL)
        start(ray, before, times - 1)


@pytest.fixture(scope="module")
def cluster():
    """Yields Ray, connected to a cluster that counts four cores."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        before = descendants([os.getpid()])
        start(ray, before)
        try:
            yield ray
        finally:
            started = descendants([os.getpid()]) - before
            ray.shutdown()
            deadline = time.monotonic() + 10
            while (left := started & descendants([os.getpid()])) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not left


@pytest.fixture
def nothing_stays(cluster):
    """Checks after the test that the cluster still runs and its resources are free again."""
    yield
    assert cluster.is_initialized()
    deadline = time.monotonic() + 10
    while cluster.available_resources().get("CPU") != 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert cluster.available_resources()["CPU"] == 4


def name_of(pid):
    """Returns the pid of a process and its start time, because pids are reused."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return pid, file.read().rpartition(b")")[2].split()[19].decode()


@pytest.mark.in_turn(4)
@pytest.mark.kills("ray_settings_not_told")
@needs_ray
def test_results_in_order(nothing_stays, capfd, monkeypatch):
    monkeypatch.setenv("KDIST_HANG_TIMEOUT", "77")

    def work(a, b):
        print("hello", flush=True)
        print("warned", file=sys.stderr)
        told = [
            os.environ[name] for name in ("KDIST_TEST", "KDIST_HANG_TIMEOUT", "LOCAL_RANK", "OMP_NUM_THREADS")
        ]
        token = os.environ["KDIST_CLUSTER_TOKEN"]
        return int(os.environ["RANK"]), a + b, told, os.environ["TF_CONFIG"], "keras" in sys.modules, token

    results = kdist.launch(
        work, 3, args=(1,), kwargs={"b": 2}, env={"KDIST_TEST": 5}, timeout=TIMEOUT, on="ray"
    )
    assert [result[:3] for result in results] == [(i, 3, ["5", "77", str(i), "1"]) for i in range(3)]
    clusters = [eval(result[3]) for result in results]
    assert [one["task"]["index"] for one in clusters] == [0, 1, 2]
    assert len({*clusters[0]["cluster"]["worker"]}) == 3 and not any(result[4] for result in results)
    assert len({result[5] for result in results}) == 1 and len(bytes.fromhex(results[0][5])) == 16
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == [f"[worker {i}] hello" for i in range(3)]
    assert sorted(printed.err.splitlines()) == [f"[worker {i}] warned" for i in range(3)]


@needs_ray
def test_a_failure_is_raised_with_its_cause(nothing_stays, tmp_path):
    def work():
        helper = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        )
        (tmp_path / os.environ["RANK"]).write_text(repr([name_of(os.getpid()), name_of(helper.pid)]))
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        if os.environ["RANK"] == "1":
            raise KeyError("this one")
        time.sleep(100)

    with pytest.raises(LaunchError, match="worker 1 failed: KeyError") as info:
        kdist.launch(work, 2, timeout=TIMEOUT, on="ray")
    assert isinstance(info.value.__cause__, KeyError)
    assert "in work" in str(info.value) and info.value.worker_index == 1 and info.value.exit_code == 1
    assert left_of([one for path in tmp_path.iterdir() for one in eval(path.read_text())]) == []


@pytest.mark.kills(ray_consequence_blamed="[worker]")
@needs_ray
@pytest.mark.parametrize("victim", ["worker", "actor"])
def test_a_killed_worker(nothing_stays, victim, tmp_path):
    exiting = tmp_path / "pid"

    def work():
        if os.environ["RANK"] == "0":
            if victim == "worker":  # until the parent of the other worker has noticed its exit
                while not exiting.exists() or os.path.exists(f"/proc/{exiting.read_text() or 'self'}"):
                    time.sleep(0.01)
                time.sleep(0.2)
            os.kill(os.getpid() if victim == "worker" else os.getppid(), signal.SIGKILL)
        elif victim == "worker":  # exits first, and blames worker 0
            print("The job lost worker 0", file=sys.stderr)
            exiting.write_text(str(os.getpid()))
            os._exit(1)
        time.sleep(100)

    start = time.monotonic()
    with pytest.raises(LaunchError, match="worker 0 was killed by SIGKILL") as info:
        kdist.launch(work, 2, timeout=TIMEOUT, on="ray")
    assert info.value.exit_code == 137 and time.monotonic() - start < 30


@needs_ray
def test_timeout_shows_where_the_workers_are(nothing_stays):
    def stuck_here():
        if os.environ["RANK"] == "1":
            time.sleep(100)

    with pytest.raises(WorkerTimeoutError, match="within 8 s: worker 1.\n") as info:
        kdist.launch(stuck_here, 2, timeout=8, on="ray")
    assert "in stuck_here" in str(info.value) and "Stack of worker 0" not in str(info.value)


@needs_ray
def test_more_than_the_cluster_has(nothing_stays):
    with pytest.raises(InvalidArgumentError, match="(?s)too small for all workers.*room_for=4"):
        kdist.launch(print, 5, on="ray")
    with pytest.raises(InvalidArgumentError, match="(?s)too small for all workers.*room_for=1"):
        kdist.launch(print, 2, on="ray", resources={"CPU": 3})
    with pytest.raises(InvalidArgumentError, match="(?s)too small for all workers.*room_for=0"):
        kdist.launch(print, "auto", on="ray", resources={"CPU": 1, "GPU": 1})


@needs_ray
def test_a_busy_cluster(nothing_stays, cluster):
    group = cluster.util.placement_group([{"CPU": 3}])
    assert group.wait(TIMEOUT)
    try:
        with pytest.raises(WorkerTimeoutError, match="room for all workers within"):
            kdist.launch(print, 2, on="ray", timeout=1)
    finally:
        cluster.util.remove_placement_group(group)


@pytest.mark.kills(ray_backend_not_passed_on="[jax]")
@pytest.mark.timeout(300)  # real workers take long to import their backend
@pytest.mark.xdist_group("ray_multi_process_test")  # the tests of this group share a cluster
@needs_ray
@each_backend_in_twelve_turns
def test_two_workers_train_as_one_device(nothing_stays, backend):
    def train():
        import keras

        import kdist
        from tests.helpers import by_hand

        strategy = kdist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = by_hand.model(is_true=strategy.runtime.worker_index == 0)
        by_hand.fit(model, 2)
        weights = [float(value) for part in model.get_weights() for value in part.ravel()]
        return keras.backend.backend(), strategy.num_replicas_in_sync, weights

    env = {"PYTHONPATH": str(ROOT)}
    for *about, weights in kdist.launch(train, 2, on="ray", backend=backend, env=env, timeout=240):
        assert about == [backend, 2]
        np.testing.assert_allclose(weights, by_hand.weights(2), rtol=1e-5)


@pytest.mark.full  # starting a cluster and importing the backend takes long
@needs_ray
def test_two_workers_train_on_a_cluster_that_is_started_and_stopped(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, kdist, os\n"
        "def train():\n"
        "    import kdist\n"
        "    from tests.helpers import by_hand\n"
        "    strategy = kdist.MultiWorkerMirroredStrategy()\n"
        "    with strategy.scope():\n"
        "        model = by_hand.model(is_true=strategy.runtime.worker_index == 0)\n"
        "    by_hand.fit(model, 2)\n"
        "    return [float(v) for part in model.get_weights() for v in part.ravel()], strategy.num_replicas_in_sync\n"
        "from kdist.testing import no_leaks\n"
        "import signal\n"
        "handler = signal.getsignal(signal.SIGTERM)\n"
        "with no_leaks(settle=10, ignore_variables='RAY_'):\n"
        "    results = kdist.launch(train, 2, on='ray', backend='jax', timeout=150)\n"
        "assert signal.getsignal(signal.SIGTERM) is handler\n"
        "import ray\n"
        "print(json.dumps(results), ray.is_initialized())\n"
    )
    env = clean_environment() | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("RAY_ADDRESS", None)
    done = subprocess.run([sys.executable, str(script)], env=env, cwd=tmp_path,
                          capture_output=True, text=True, timeout=170)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results, connected = done.stdout.splitlines()[-1].rsplit(" ", 1)
    assert connected == "False"
    for weights, replicas in eval(results):
        np.testing.assert_allclose(weights, by_hand.weights(2), rtol=1e-5)
        assert replicas == 2


@pytest.mark.full  # real workers take long to import their backend
@needs_ray
def test_the_example_of_the_page(nothing_stays, tmp_path):
    (tmp_path / "example.py").write_text(example("how_to_ray_0"))
    one, two = runpy.run_path(str(tmp_path / "example.py"))["losses"]
    assert one == two and len(one) == 5 and one[-1] < one[0]


@needs_ray
def test_wrong_arguments():
    with no_leaks(), pytest.raises(InvalidArgumentError, match="number of workers"):
        kdist.launch(print, num_workers=0, on="ray")
    with pytest.raises(BackendError, match="backend"):
        kdist.launch(print, backend="nosuch", on="ray")


@needs_ray
@pytest.mark.parametrize("resources", [{}, {"CPU": 0}, {"CPU": -1}, {"GPU": "1"}])
def test_wrong_resources(cluster, resources):
    with pytest.raises(InvalidArgumentError, match="`resources` does not map"):
        kdist.launch(print, on="ray", resources=resources)


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install '\.\[ray\]'"):
        kdist.launch(print, on="ray")


def test_a_place_that_is_not_known():
    with pytest.raises(InvalidArgumentError, match="`on` is neither 'processes' nor 'ray'"):
        kdist.launch(print, on="spark")
    with pytest.raises(InvalidArgumentError, match="`resources` applies only to a Ray cluster"):
        kdist.launch(print, resources={"CPU": 2})
