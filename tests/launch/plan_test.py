"""The variables of each worker, and the small parts of the launcher."""

import importlib.util
import io
import json
import os
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist import errors
from kdist.cluster import discover
from kdist.cluster.keras_backends import check_backend
from kdist.errors import BackendError, ClusterConfigError, InvalidArgumentError
from kdist.launch import plan as planning
from kdist.launch import supervisor as supervisor_module
from kdist.launch.options import parse_hosts, resolve_num_workers
from kdist.launch.output import LineStream, Sink, Tail
from kdist.launch.plan import JobPlan, WorkerPlan, idle_gpus, plan_job
from kdist.launch.report import MOST_LINES, failure_block, last_traceback, shell_exit_code
from kdist.launch.supervisor import Supervisor
from kdist.launch.worker_process import WorkerProcess
from tests.helpers.ports import neighboring_ports

# ---- the plan


@pytest.mark.kills("launch_task_index_off_by_one")
def test_tf_config_and_torchruns_variables_agree():
    plan = plan_job(3, environ={"PATH": "p", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    plan.release_ports()
    assert plan.num_workers == 3
    for index, worker in enumerate(plan.workers):
        config = json.loads(worker.environ["TF_CONFIG"])
        assert config["task"] == {"type": "worker", "index": index}
        both = discover(environ=worker.environ)
        torchrun = discover(environ={k: v for k, v in worker.environ.items() if k != "TF_CONFIG"})
        for cluster in (both, torchrun):
            assert (cluster.num_workers, cluster.worker_index) == (3, index)
            assert (cluster.local_rank, cluster.local_workers) == (index, 3)
            assert cluster.coordinator == plan.workers[0].address
        assert not torchrun.coordinator_taken
        assert worker.address.startswith("127.0.0.1:")
        assert worker.environ["PATH"] == "p" and worker.environ["PYTHONUNBUFFERED"] == "1"
        assert worker.environ["GROUP_RANK"] == "0"
        assert "KERAS_BACKEND" not in worker.environ
    assert len({worker.address for worker in plan.workers}) == 3


@pytest.mark.kills("tensorflow_logs_each_start", "log_level_of_the_user_overruled")
def test_tensorflow_logs_warnings_and_errors_unless_the_user_sets_a_level():
    for environ, level in (({}, "1"), ({"TF_CPP_MIN_LOG_LEVEL": "0"}, "0")):
        plan = plan_job(1, environ=environ)
        plan.release_ports()
        assert plan.workers[0].environ["TF_CPP_MIN_LOG_LEVEL"] == level


def test_hosts():
    port = neighboring_ports(2)
    hosts = ["192.0.2.7:5000", f"127.0.0.1:{port}"]
    plan = plan_job(2, hosts=hosts, host_index=1, environ={}, backend="JAX")
    assert [worker.index for worker in plan.workers] == [2, 3]
    first = plan.workers[0].environ
    assert json.loads(first["TF_CONFIG"])["cluster"]["worker"] == [
        "192.0.2.7:5000", "192.0.2.7:5001", f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}",
    ]  # fmt: skip
    assert (first["RANK"], first["LOCAL_RANK"], first["WORLD_SIZE"], first["GROUP_RANK"]) == (
        "2",
        "0",
        "4",
        "1",
    )
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == ("192.0.2.7", "5000")
    assert first["KERAS_BACKEND"] == "jax"


def test_wrong_hosts():
    with pytest.raises(InvalidArgumentError, match="host-index"):
        plan_job(1, hosts=["a:1"], host_index=1)
    with pytest.raises(InvalidArgumentError, match="overlap"):
        plan_job(2, hosts=["127.0.0.1:5000", "127.0.0.1:5001"], host_index=0)
    with pytest.raises(ClusterConfigError, match="65535"):
        plan_job(2, hosts=["127.0.0.1:65535"])
    with pytest.raises(InvalidArgumentError, match="same address twice"):
        parse_hosts("a:1,a:1")
    held = planning.hold_free_ports(1)
    held[0].listen()
    with held[0], pytest.raises(ClusterConfigError, match="Cannot listen on port"):
        plan_job(1, hosts=[f"127.0.0.1:{held[0].getsockname()[1]}"])


@given(st.text(max_size=30))
def test_any_host_list_is_an_error_or_addresses(text):
    try:
        assert all(":" in entry for entry in parse_hosts(text))
    except (ClusterConfigError, InvalidArgumentError) as error:
        assert "ost" in str(error)  # noqa: PT017


@pytest.mark.kills("launch_threads_not_shared", "launcher_gpus_left_idle")
def test_threads_and_gpus_are_shared_out(monkeypatch):
    monkeypatch.setattr(planning, "count_cores", lambda: 8)
    workers = plan_job(2, environ={"CUDA_VISIBLE_DEVICES": "4,5,6"}).workers
    assert [worker.environ["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["4", "5"]
    for gpus, each in ((8, ["0,1,2,3", "4,5,6,7"]), (5, ["0,1", "2,3"]), (2, ["0", "1"])):
        environ = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
        plan = plan_job(2, environ=environ)
        assert [worker.environ["CUDA_VISIBLE_DEVICES"] for worker in plan.workers] == each
        assert idle_gpus(plan, environ) == (["4"] if gpus == 5 else [])
    assert workers[0].environ["OMP_NUM_THREADS"] == workers[0].environ["TF_NUM_INTRAOP_THREADS"] == "4"
    few = plan_job(2, environ={"CUDA_VISIBLE_DEVICES": "4", "OMP_NUM_THREADS": "7"}).workers
    assert few[1].environ["CUDA_VISIBLE_DEVICES"] == "4" and few[1].environ["OMP_NUM_THREADS"] == "7"
    one = plan_job(1, environ={"CUDA_VISIBLE_DEVICES": "4,5"}).workers
    assert one[0].environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert plan_job(1, environ={}, extra={"RANK": "x"}).workers[0].environ["RANK"] == "x"


def test_number_of_workers(monkeypatch):
    monkeypatch.setattr(planning, "count_cores", lambda: 8)
    assert resolve_num_workers("auto", {"CUDA_VISIBLE_DEVICES": "1,2"}) == 2
    assert resolve_num_workers("auto", {"CUDA_VISIBLE_DEVICES": ""}) == 1, "not one a core"
    assert resolve_num_workers("3") == resolve_num_workers(3) == 3
    for wrong in ("0", "-1", "two", "", "1.5", 0, True, "9" * 30):
        with pytest.raises(InvalidArgumentError, match="number of workers"):
            resolve_num_workers(wrong)


def test_backends(monkeypatch):
    check_backend(None)
    with pytest.raises(BackendError, match="one of tensorflow, jax, torch"):
        check_backend("numpy")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="package 'jax' is not installed"):
        check_backend("jax")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "keras" else 1)
    with pytest.raises(BackendError, match="package 'keras' is not installed"):
        check_backend("Torch")


# ---- the output


class _Terminal(io.TextIOWrapper):
    def __init__(self, terminal):
        super().__init__(io.BytesIO(), encoding="utf-8")
        self._terminal = terminal

    def isatty(self):
        return self._terminal


def _lines(*feeds, terminal=False, eager=False):
    """Feeds (worker, bytes) pairs through two streams and returns everything that was written."""
    stream = _Terminal(terminal)
    sink = Sink(stream)
    streams = [LineStream(sink, f"[{i}] ", eager and i == 0) for i in range(2)]
    for worker, data in feeds:
        streams[worker].feed(data)
    for line in streams:
        line.close()
    stream.flush()
    return stream.buffer.getvalue()


def test_lines_are_whole_and_prefixed():
    assert _lines((0, b"a\nb"), (1, b"c\n"), (0, b"d\n")) == b"[0] a\n[1] c\n[0] bd\n"
    assert _lines((0, b"\n"), (1, b"x")) == b"[0] \n[1] x\n"
    assert _lines((0, b"a\r\nb\r\n")) == b"[0] a\n[0] b\n"


def test_a_redrawn_line_keeps_its_last_state_where_there_is_no_terminal():
    bar = b"1/2 \r2/2 \b\b\b\r2/2 done\nnext\n"
    assert _lines((0, bar)) == b"[0] 2/2 done\n[0] next\n"
    assert _lines((0, b"1/2\r2/2\r")) == b"[0] 2/2\n"


def test_a_redrawn_line_is_live_on_a_terminal():
    written = _lines((0, b"1/2"), (0, b"\r2/2"), (1, b"x\n"), (0, b"\r3/2\n"), terminal=True, eager=True)
    assert written == b"[0] 1/2\r[0] 2/2\x1b[K\n[1] x\n[0] 3/2\n"


def test_colors_are_for_terminals_and_who_wants_them(monkeypatch):
    bar = ((0, b"\x1b[1m1/2\x1b[0m \x1b[3"), (0, b"2m==\x1b[0m done\n"))
    assert _lines(*bar) == b"[0] 1/2 == done\n"
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert _lines(*bar, terminal=True) == b"[0] \x1b[1m1/2\x1b[0m \x1b[32m==\x1b[0m done\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert _lines(*bar, terminal=True) == b"[0] 1/2 == done\n"


def test_what_is_left_of_a_bar_is_told_without_colors_too():
    bar = "1/2 \x1b[32m━━\x1b[0m\x1b[37m━━\x1b[0m ━\n".encode()
    whole = "[0] 1/2 ━━── ━\n".encode()
    assert _lines((0, bar)) == whole
    for place in range(len(bar)):
        assert _lines((0, bar[:place]), (0, bar[place:])) == whole, place
    assert _lines((0, b"\xe2\x94")) == b"[0] \xe2\x94\n", "nothing is lost at the end"


@pytest.mark.kills("launch_lines_mixed")
@given(st.lists(st.tuples(st.integers(0, 1), st.binary(max_size=6)), max_size=20))
def test_no_line_is_lost_or_mixed(feeds):
    clean = [(worker, data.translate(None, b"\r\b\x1b")) for worker, data in feeds]
    written = _lines(*clean)
    for worker in (0, 1):
        sent = b"".join(data for who, data in clean if who == worker)
        prefix = b"[%d] " % worker
        got = [line[4:] for line in written.split(b"\n") if line.startswith(prefix)]
        assert got == (sent.split(b"\n") if not sent.endswith(b"\n") and sent else sent.split(b"\n")[:-1])


def test_half_a_line_is_shown_after_a_moment(monkeypatch):
    stream = _Terminal(False)
    line = LineStream(Sink(stream), "[0] ")
    line.feed(b"Password: ")
    line.tick()
    assert stream.buffer.getvalue() == b"" and line.waits()
    monkeypatch.setattr("kdist.launch.output._PATIENCE", -1.0)
    line.tick()
    assert stream.buffer.getvalue() == b"[0] Password: " and not line.waits()
    line.feed(b"ok\n")
    assert stream.buffer.getvalue() == b"[0] Password: ok\n"


def test_one_worker_passes_through():
    stream = _Terminal(False)
    line = LineStream(Sink(stream), None)
    for data in (b"a\r", b"\xff\x00b", b"\n"):
        line.feed(data)
    line.close()
    assert stream.buffer.getvalue() == b"a\r\xff\x00b\n"


def test_a_reader_that_has_gone_does_not_matter():
    class Closed(io.StringIO):
        buffer = None

        def write(self, text):
            raise BrokenPipeError

    sink = Sink(Closed())
    sink.write(b"x")
    assert sink.broken


def test_output_that_nobody_reads_is_discarded_when_the_job_ends():
    ours, theirs = os.pipe()
    with open(ours, "rb") as reader, open(theirs, "w") as stream:
        sink = Sink(stream)
        calls = []
        sink.gives_up = lambda: calls.append(None) or len(calls) == 3
        sink.write(b"first\n")
        assert not sink.broken and not calls
        sink.write(b"x" * 1_000_000)
        assert sink.broken and len(calls) == 3
        sink.say("kdist: all workers have exited.")
        assert reader.read1(65536).startswith(b"first\nxxx")


@pytest.mark.kills("torch_traceback_not_found", "other_workers_failed_first")
def test_tail_notes_the_traceback():
    tail = Tail(most=3)
    tail.feed(b"1\n2\n3\n4\nTrace")
    assert tail.traceback_at is None and tail.lines() == ["2", "3", "4", "Trace"]
    tail.feed(b"back (most recent call last):\n")
    assert tail.traceback_at is not None and not tail.has_lost_another
    rank = Tail()
    rank.feed(b"[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: no\n")
    assert rank.traceback_at is not None
    assert rank.lines() == ["Traceback (most recent call last):", "ValueError: no"]
    tail.feed(b"kdist: The job lost worker 0 (a:1): it died.\n")
    assert tail.has_lost_another and not tail.reports_another
    other = Tail()
    other.feed(b"WorkerFailedError: Worker 1 failed in a callback: ValueError: no\nReceived: failed_")
    other.feed(b"worker=1\n")
    assert other.has_lost_another and other.reports_another


# ---- the report

TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    g()", "ValueError: no"]


@pytest.mark.kills("log_line_ends_the_traceback", "source_line_taken_for_the_error")
def test_the_last_traceback_is_preferred():
    first = ["Traceback (most recent call last):", "KeyError: 1", "", "During handling of ...", ""]
    log = "E0000 00:00:17 a.cc:1] failed"  # from another thread
    assert last_traceback(["noise", *first, *TRACEBACK[:2], log, *TRACEBACK[2:]], 10) == TRACEBACK
    assert last_traceback([*TRACEBACK[:2], f"    {log}", "g()", TRACEBACK[3]], 3)[-1] == TRACEBACK[3]


@pytest.mark.kills("noise_in_the_report")
def test_without_a_traceback_log_lines_of_frameworks_are_left_out():
    noise = [
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "I0000 00:00:1795769899.003348   26325 port.cc:153] oneDNN custom operations are on.",
        "2026-11-27 08:56:18.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.",
    ]
    own = ["epoch 1", "E0000 00:00:17 a.cc:1] failed"]
    assert last_traceback([own[0], *noise, own[1]], 10) == own
    assert last_traceback(noise, 10) == noise, "better than nothing"
    assert last_traceback(["a", "", "b"], 10) == ["a", "b"]
    assert last_traceback([], 10) == []


def test_a_long_traceback_is_shortened_from_the_middle():
    frames = [line for i in range(50) for line in (f'  File "a.py", line {i}, in f{i}', f"    call{i}()")]
    short = last_traceback([TRACEBACK[0], *frames, "ValueError: no", *["detail"] * 30], 12)
    assert len(short) <= 12 and short[0] == TRACEBACK[0]
    assert "ValueError: no" in short and "    call49()" in short and "  …" in short


@pytest.mark.kills("users_line_lost_in_frames_of_libraries")
def test_the_last_frame_of_the_user_is_shown():
    library = [f'  File "/v/site-packages/keras/x.py", line {i}, in f' for i in range(30)]
    own = [f'  File "{errors.__file__}", line 3, in own', "    raise ValueError(", "^^^^^^^^^^^^^^^^^"]
    first = ['  File "/home/me/train.py", line 1, in <module>', "    main()"]
    last = ['  File "/home/me/train.py", line 9, in main', "    model.fit(x)", "    ^^^^^^^^^^^^"]
    said = ["ValueError: no", *[f"detail {i}" for i in range(9)]]
    block = last_traceback([TRACEBACK[0], *first, *last, *library, *own, *said], 17)
    assert block == [TRACEBACK[0], "  …", *last, "  …", *said]
    assert last_traceback([TRACEBACK[0], *first, said[0]], 17) == [TRACEBACK[0], *first, said[0]]
    ours = last_traceback([TRACEBACK[0], *library, *own, said[0]], 17)
    assert ours == [TRACEBACK[0], "  …", *[*library, *own][-14:], said[0]], "no frame of the user"


def _ended(code, lines=(), log_file=None):
    sink = Sink(io.StringIO())
    worker = WorkerProcess(WorkerPlan(1, "", {}), [], sink, sink, log_file=log_file)
    worker.exit_code = code
    worker.tail.feed("\n".join(lines).encode("utf-8", "replace"))
    return worker


@given(
    st.lists(st.text(max_size=300) | st.sampled_from(TRACEBACK), max_size=80), st.sampled_from([1, -9, -6, 3])
)
def test_the_block_has_at_most_20_lines(lines, code):
    lines = [line.replace("\n", " ").replace("\r", " ") for line in lines]
    block = failure_block(failed := _ended(code, lines, "d/worker-1.log"), [failed, _ended(0), _ended(0)])
    assert block.count("\n") + 1 <= MOST_LINES
    assert block.startswith("──── kdist: worker 1 failed first") and block.endswith("d/worker-1.log")


def test_exit_codes():
    assert [shell_exit_code(code) for code in (0, 3, -9, -15, 256 + 7)] == [0, 3, 137, 143, 7]
    assert "SIGKILL (signal 9)" in failure_block(_ended(-9), [])
    assert "exit code 3" in failure_block(_ended(3), [])


def _tail(reason="", traceback_at=None):
    lost, reported = reason != "", reason == "reported"
    return types.SimpleNamespace(traceback_at=traceback_at, has_lost_another=lost, reports_another=reported)


def _judged(*workers):
    supervisor = Supervisor([], JobPlan("job", 0, []), Sink(io.StringIO()))
    for exit_code, exited_at, traceback_at, *reason in workers:
        tail = _tail(*reason, traceback_at=traceback_at)
        supervisor._failures.append(
            types.SimpleNamespace(exit_code=exit_code, exited_at=exited_at, tail=tail)
        )
    supervisor._judge()
    return supervisor._failures.index(supervisor._outcome.failed)


def test_who_failed_first():
    assert _judged((1, 10.0, None), (1, 10.1, None)) == 0
    # The first worker only lost its connection to the second worker, which was killed.
    assert _judged((1, 10.0, 9.9), (-9, 10.1, None)) == 1
    assert _judged((-6, 10.0, None), (-11, 10.1, None)) == 1
    # The second worker printed its traceback before the first worker lost its connection.
    assert _judged((-6, 10.0, None), (1, 10.1, 9.8)) == 1
    # An old traceback is not the reason for a failure.
    assert _judged((1, 10.0, None), (1, 10.1, 2.0)) == 0
    # The first worker reports the loss of the second worker, which exits later.
    assert _judged((1, 10.0, 9.9, "lost"), (1, 14.0, None)) == 1
    assert _judged((1, 10.1, None, "lost"), (1, 10.0, None, "lost")) == 1


@pytest.mark.kills("reported_workers_terminated_while_they_exit")
@pytest.mark.parametrize(("reason", "waits"), [("lost", 0.6), ("reported", 5.0), ("", 0.2)])
def test_the_launcher_waits_for_the_worker_that_failed_first(reason, waits, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(supervisor_module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    shared = {"plan": types.SimpleNamespace(role="worker", helps=False), "frozen": False}
    ended = {"exit_code": 1, "exited_at": 100.0, "collect": lambda: True, "tail": _tail(reason)}
    failed = types.SimpleNamespace(**shared, **ended, alive=False)
    leaves = types.SimpleNamespace(**shared, alive=True, exit_code=None, pid=0, tail=_tail())
    supervisor = Supervisor([failed, leaves], JobPlan("job", 2, []), Sink(io.StringIO()))
    for method in ("_signal_all", "_kill_everything"):
        monkeypatch.setattr(supervisor, method, lambda *args: None)
    supervisor._note_exit(failed)
    for seconds in (0.1, 0.25, 0.55, 0.65, 4.9, 5.1):
        now[0] = 100.0 + seconds
        supervisor._act()
        assert (supervisor._outcome.failed is failed) == (seconds > waits)
