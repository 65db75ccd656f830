"""`kdist run --num-ps --evaluator`: how the end of each role affects the job. The tasks are plain Python."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest

from tests.helpers.alive import left_of

PRELUDE = """
import json, os, pathlib, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
restart = int(os.environ["KDIST_RESTART"])
def say(*what): print(*what, flush=True)
def die(): os.kill(os.getpid(), signal.SIGKILL)
def wait_for(name):
    while not pathlib.Path(name).exists(): time.sleep(0.02)
with open("/proc/self/stat", "rb") as file:
    say(f"pid={os.getpid()} since={file.read().rpartition(b')')[2].split()[19].decode()};")
def serve(): time.sleep(100)
"""
SERVED = "if role in ('worker', 'ps'): serve()\n"


@pytest.fixture
def start(run):
    def started(script, *options, env=None, number=("-n", "2", "--num-ps", "2")):
        return run(script, *number, *options, prelude=PRELUDE, env=env)

    return started


def names(job):
    return {line.partition("]")[0] + "]" for line in job.stdout().splitlines()}


def test_all_roles_run_the_script_and_end_with_the_chief(start, tmp_path):
    script = """
names = ["TF_CONFIG", "KDIST_CLUSTER_TOKEN", "RANK"]
pathlib.Path(f"{role}-{index}").write_text(json.dumps({n: os.environ.get(n) for n in names}))
if role == "chief":
    for task in ("worker-0", "worker-1", "ps-0", "ps-1", "evaluator-0"): wait_for(task)
    say("token", os.environ["KDIST_CLUSTER_TOKEN"] == "mine")
elif role != "evaluator":
    serve()
"""
    job = start(script, "--evaluator", "--log-dir", "logs", env={"RANK": "9", "KDIST_CLUSTER_TOKEN": "mine"})
    assert job.wait() == 0, job.stderr()
    assert names(job) == {"[chief]", "[worker 0]", "[worker 1]", "[ps 0]", "[ps 1]", "[evaluator]"}
    assert "[chief] token True" in job.stdout() and "[worker" not in job.stderr()
    assert left_of(job.named(), 1) == [] and len(job.named()) == 6
    chief, evaluator = (json.loads((tmp_path / task).read_text()) for task in ("chief-0", "evaluator-0"))
    config = json.loads(chief["TF_CONFIG"])
    assert config["task"] == {"type": "chief", "index": 0}
    assert {role: len(listed) for role, listed in config["cluster"].items()} == {
        "chief": 1,
        "worker": 2,
        "ps": 2,
    }
    assert len({address for listed in config["cluster"].values() for address in listed}) == 5
    assert json.loads(evaluator["TF_CONFIG"]) == config | {"task": {"type": "evaluator", "index": 0}}
    assert chief["RANK"] is evaluator["RANK"] is None
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "chief.log", "evaluator.log", "ps-0.log", "ps-1.log", "worker-0.log", "worker-1.log",
    ]  # fmt: skip


def test_the_failure_of_the_chief_is_the_job_s(start):
    job = start(SERVED + "time.sleep(0.3)\nraise SystemExit(7) if restart else ValueError('no data')")
    assert job.wait() == 1
    err = job.stderr()
    assert re.search(
        r"──── kdist: chief \(127.0.0.1:\d+\) failed first: it ended with exit code 1 ────\nTrace", err
    )
    assert "ValueError: no data\nkdist terminated the other tasks: worker 0, worker 1, ps 0, ps 1." in err
    assert left_of(job.named(), 1) == []


@pytest.mark.kills("roles_server_lost_unnoticed")
def test_a_lost_server_ends_the_job_with_its_name(start):
    job = start("if role == 'ps' and index == 1: time.sleep(0.5); die()\nserve()")
    since = time.monotonic()
    assert job.wait() == 137
    assert time.monotonic() - since < 15
    assert re.search(
        r"kdist: ps 1 \(127.0.0.1:\d+\) was killed by SIGKILL \(signal 9\); its variables are lost",
        job.stderr(),
    )
    assert re.search(r"──── kdist: ps 1 \(127.0.0.1:\d+\) failed first: it was killed", job.stderr())
    assert left_of(job.named(), 1) == []


@pytest.mark.kills("roles_chief_has_no_last_words", "lost_server_was_terminated")
def test_the_chief_may_say_itself_that_a_server_is_lost(start):
    script = """
    if role == "ps" and index == 0:
        pathlib.Path("lost").touch()
        sys.exit(0)
    if role == "chief":
        wait_for("lost")
        time.sleep(1)
        sys.exit("go on from step 30")
    serve()
    """
    job = start(script)
    assert job.wait() == 1
    err = job.stderr()
    assert (
        "ended with exit code 0 while the job needs it (call kdist.Server(…).join(), which does not return)"
        in err
    )
    assert re.search(
        r"──── kdist: chief \(127.0.0.1:\d+\) failed after the loss of ps 0 \(127.0.0.1:\d+\): it ended", err
    )
    assert "go on from step 30\nkdist terminated the other tasks: worker 0, worker 1, ps 1." in err


@pytest.mark.kills("roles_port_held_by_children", "roles_worker_not_started_again")
def test_a_worker_is_started_again_alone_at_its_port(start, tmp_path):
    script = """
    if role == "worker" and index == 1:
        say("RESTART", restart, config["cluster"]["worker"][1], os.environ["KDIST_INJECT"] or "none")
        import socket
        host, port = config["cluster"]["worker"][1].split(":")
        server = socket.create_server((host, int(port)))
        if restart < 2:
            if os.fork() == 0: serve()  # holds the port
            time.sleep(0.1)
            print("last words", restart, file=sys.stderr, flush=True)
            die()
        pathlib.Path("again").touch()
    if role == "chief": wait_for("again")
    else: serve()
    """
    job = start(script, "--inject", "slow:seconds=2", "--log-dir", "logs")
    assert job.wait() == 0, job.stderr()
    starts = re.findall(r"\[worker 1\] RESTART (\d) (\S+) (\S+)", job.stdout())
    assert [(number, fault) for number, _, fault in starts] == [
        ("0", "slow:seconds=2"),
        ("1", "none"),
        ("2", "none"),
    ]
    assert len({address for _, address, _ in starts}) == 1
    assert (
        "was killed by SIGKILL (signal 9); restarting it (restart 1 of 3) while the job continues."
        in job.stderr()
    )
    assert "restart 2 of 3" in job.stderr() and "last words 1" in job.stderr()
    assert job.stdout().count("pid=") == 5 + 2  # no other task was restarted
    assert (tmp_path / "logs" / "worker-1.log").read_text().count("RESTART") == 3
    assert left_of(job.named(), 1) == []


@pytest.mark.kills("launch_preempted_forever")
def test_restarts_have_an_end_and_the_job_goes_on_without_a_worker_but_not_without_all(start):
    script = """
    if role == "worker" and (index == 1 or pathlib.Path("all").exists()): sys.exit(3)
    if role == "chief":
        time.sleep(1.5)
    else: serve()
    """
    job = start(script, "--max-restarts", "1")
    assert job.wait() == 0, job.stderr()
    assert "ended with exit code 3 after 1 restart; the job continues without it." in job.stderr()
    # Exits after a preemption do not count, but only the first ones in a row soon after the start.
    job = start(script.replace("exit(3)", "exit(75)").replace("1.5", "5"), "--max-restarts", "1")
    assert job.wait() == 0, job.stderr()
    assert job.stdout().count("[worker 1] pid=") == 5 and job.stderr().count("restart not counted") == 3
    job.script.with_name("all").touch()
    job = start(script.replace("sleep(1.5)", "sleep(60)"), "--max-restarts", "0")
    assert job.wait() == 3
    assert re.search(
        r"──── kdist: worker \d \(127.0.0.1:\d+\) failed first: it ended with exit code 3", job.stderr()
    )


@pytest.mark.kills("roles_evaluator_cut_off")
def test_the_evaluator_has_time_to_end_and_no_more(start, tmp_path):
    script = (
        SERVED
        + """
if role == "evaluator":
    if restart == 0: sys.exit(5)
    pathlib.Path("evaluates").touch()
    time.sleep(float(os.environ["LAST"]))
    say("evaluated")
else:
    wait_for("evaluates")
"""
    )
    job = start(script, "--evaluator", "--evaluator-timeout", "20", env={"LAST": "0.8"})
    assert job.wait() == 0, job.stderr()
    assert "[evaluator] evaluated" in job.stdout()
    err = job.stderr()
    assert "kdist: evaluator ended with exit code 5; restarting it (restart 1 of 3)" in err
    assert "kdist: training has ended; the evaluator has 20 s to finish." in err
    job = start(script, "--evaluator", "--evaluator-timeout", "1", env={"LAST": "60"})
    assert job.wait() == 0
    assert "terminating the evaluator, which did not finish within 1 s after training." in job.stderr()
    assert left_of(job.named(), 1) == []


@pytest.mark.kills("roles_evaluator_s_failure_hidden")
def test_an_evaluator_beside_workers_that_train_alike(start, tmp_path):
    script = """
    if role == "evaluator": sys.exit(6)
    say(os.environ["RANK"], len(os.environ["KDIST_CLUSTER_TOKEN"]) > 16, sorted(config["cluster"]))
    time.sleep(1.5)
    """
    job = start(script, "--evaluator", "--max-restarts", "1", number=("-n", "2"))
    assert job.wait() == 6  # training continued, and the exit code shows the evaluator's failure
    assert {"[worker 0] 0 True ['worker']", "[worker 1] 1 True ['worker']"} <= set(job.stdout().splitlines())
    err = job.stderr()
    assert "kdist: evaluator ended with exit code 6 after 1 restart; the job continues without it." in err
    assert "──── kdist: evaluator failed first" in err and "starting 2 workers" not in err
    failing = (
        "if role == 'worker' and index == 1 and restart == 0: sys.exit(4)\nif role == 'evaluator': serve()"
    )
    job = start(failing, "--evaluator", "--max-restarts", "1", "--evaluator-timeout", "1", number=("-n", "2"))
    assert job.wait() == 0, job.stderr()
    assert (
        "kdist: restart 1 of 1 because worker 1 ended with exit code 4; starting 2 workers." in job.stderr()
    )


@pytest.mark.kills(roles_servers_interrupted_with_the_chief="[75-75]")
@pytest.mark.parametrize(("code", "expected"), [(75, 75), (3, 130)])
def test_ctrl_c_lets_the_chief_save_while_the_servers_are_there(start, code, expected):
    script = f"""
    if role == "chief":
        def save(*_):
            time.sleep(0.5)
            parent = os.getppid()
            below = open(f"/proc/{{parent}}/task/{{parent}}/children").read().split()
            say("saved", len(below))
            sys.exit({code})
        signal.signal(signal.SIGINT, save)
    say("ready")
    serve()
    """
    job = start(script, "--evaluator", "--grace-period", "20")
    job.wait_for("[chief] ready", "[worker 1] ready", "[ps 1] ready", "[evaluator] ready")
    since = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == expected
    assert time.monotonic() - since < 10
    assert "[chief] saved 5" in job.stdout(), "the evaluator has ended, and nobody else"
    assert left_of(job.named(), 1) == []


@pytest.mark.kills("roles_one_secret_for_all_jobs")
def test_the_secret_is_new_and_never_printed(start, tmp_path):
    script = SERVED + 'pathlib.Path("token").write_text(os.environ["KDIST_CLUSTER_TOKEN"])\nsys.exit(1)'
    tokens = []
    for _ in range(2):
        job = start(script)
        assert job.wait() == 1
        tokens.append((tmp_path / "token").read_text())
        assert len(tokens[-1]) == 32 and tokens[-1] not in job.stdout() + job.stderr()
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-ps", "x"), "--num-ps is not a whole number"),
        (("--num-ps", "1", "--min-workers", "1"), "Remove --min-workers."),
        (
            ("--num-ps", "1", "--hosts", "a:1,b:1", "--host-index", "0"),
            "start each task with its TF_CONFIG and the same KDIST_CLUSTER_TOKEN",
        ),
        (("--evaluator", "--evaluator-timeout", "0"), "`--evaluator-timeout` is not a number of seconds"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(start, options, message):
    job = start("say('started')", *options, number=("-n", "2"))
    assert job.wait() == 2
    assert message in job.stderr() and not job.stdout()
