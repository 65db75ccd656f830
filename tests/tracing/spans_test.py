"""Spans, the meter that sums them up, and the files that contain them."""

from __future__ import annotations

import contextvars
import json
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist.cluster import environment
from kdist.tracing import Meter, Totals, merging, span, spans, timed, trace_file
from kdist.tracing.pace import pace_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the clock by a time in seconds that only the test changes."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.perf_counter_ns", lambda: int(now[0] * 1e9))
    return now


@pytest.mark.kills("measured_validation_is_training")
def test_a_meter_adds_up_what_each_span_took_by_itself(clock: list[float]) -> None:
    def spend(seconds: float, name: str, category: str, **about: Any) -> None:
        with span(name, category, **about):
            clock[0] += seconds

    with Meter() as meter:
        with span("epoch", "loop"):
            for _ in timed(iter("ab"), "waiting for input", "input"):
                with span("step", "step", rows=64):
                    clock[0] += 2
                    spend(3, "all_reduce", "exchange")
                    # A replica has a separate thread with the context of the step.
                    replica = threading.Thread(
                        target=contextvars.copy_context().run, args=(spend, 4, "all_reduce", "exchange")
                    )
                    replica.start()
                    replica.join()
                clock[0] += 0.5
            with span("validation", "validation"):
                spend(7, "waiting for input", "input")
                spend(1, "step", "step", rows=9)
            reader = threading.Thread(target=spend, args=(30, "reading", "input"))
            reader.start()
            reader.join()
        totals = meter.take()
    assert totals.seconds == pytest.approx({"input": 0, "step": 4, "exchange": 14, "validation": 8})
    assert (totals.steps, totals.rows) == (2, 128)
    assert totals.elapsed == pytest.approx(2 * (9 + 0.5) + 8 + 30)
    assert totals.training == pytest.approx(totals.elapsed - 8)
    assert span("step", "step") is span("step", "step"), "with nobody who wants to know"


@pytest.mark.kills("measured_compiling_counts")
def test_the_step_that_compiles_is_left_out_unless_there_is_no_other(clock: list[float]) -> None:
    with Meter() as meter:
        for number, seconds in enumerate((60.0, 1.0, 2.0)):
            with span("step", "step", rows=10, first=number == 0):
                clock[0] += seconds
        assert meter.take() == Totals(3.0, 2, 20, {"step": pytest.approx(3.0)})
        with span("step", "step", rows=10, first=True):
            clock[0] += 50
        assert meter.take() == Totals(50.0, 1, 10, {"step": pytest.approx(50.0)}, compiles=True)


@pytest.mark.kills("measured_slowest_is_who_waits")
def test_the_slowest_worker_is_the_one_that_waits_for_nobody() -> None:
    # Ten seconds for all. The second worker reads for 4 s, and the others wait for it in the step or
    # exchange.
    fused = [Totals(10.0, 5, 500, {"step": s, "input": i}) for s, i in ((9.0, 0.5), (5.0, 4.0), (8.5, 1.0))]
    pace = pace_of(fused, exchanges_in_programs=True)
    assert pace.slowest == 1
    assert pace.rows_per_second == 50
    assert pace.waiting_for_input == pytest.approx(5.5 / 3 / 10)
    assert pace.waiting_for_others == pytest.approx((4 + 0 + 3.5) / 3 / 10)
    # The same with separate times for the exchange: here the last worker computes for longer.
    told = [Totals(10.0, 5, 500, {"step": s, "exchange": e}) for s, e in ((2.0, 7.5), (3.0, 6.5), (8.0, 1.5))]
    assert pace_of(told, exchanges_in_programs=False).slowest == 2
    assert pace_of(told[:1], exchanges_in_programs=False).waiting_for_others == 0


def events_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_a_trace_is_json_and_shows_each_thread_in_a_row(tmp_path: Path) -> None:
    file = trace_file.TraceFile(str(tmp_path), 3)
    spans.add_sink(file)

    def read() -> None:
        with span("reading", "input", row=1):
            pass

    with span("step", "step", step=1) as late, span("all_reduce", "exchange"):
        for _ in range(2):
            thread = threading.Thread(target=read, name="kdist prefetch")
            thread.start()
            thread.join()
    file.close()
    with span("too late", "step"):
        pass
    with warnings.catch_warnings(action="error"):
        file.add(late)  # of another thread, which was about to end
        file.flush()
    written = json.loads((tmp_path / "worker-3.json").read_text())
    found = events_of(tmp_path / "worker-3.json")
    assert [event["name"] for event in found] == ["reading", "reading", "all_reduce", "step"]
    rows = {e["args"]["name"]: e["tid"] for e in written if e["name"] == "thread_name"}
    assert set(rows) == {"kdist prefetch", "main"}, "a row a name, though there were three threads"
    assert [e["tid"] for e in found] == [rows["kdist prefetch"]] * 2 + [rows["main"]] * 2
    (name,) = (e["args"]["name"] for e in written if e["name"] == "process_name")
    assert name.startswith("worker 3 (") and {e["pid"] for e in written} == {3}
    inner, outer = found[2:]
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert found[0]["args"] == {"row": 1} and outer["args"] == {"step": 1}


def test_traces_of_killed_and_restarted_workers_are_put_together(tmp_path: Path) -> None:
    for worker, name in ((0, "first"), (1, "second"), (0, "again")):
        file = trace_file.TraceFile(str(tmp_path), worker)
        spans.add_sink(file)
        with span(name, "step"):
            pass
        if name == "second":  # killed in the middle of a line
            file.flush()
            spans.remove_sink(file)
            with open(tmp_path / "worker-1.json", "a") as torn:
                torn.write(',\n{"name": "ha')
        else:
            file.close()
    with pytest.raises(ValueError):
        json.loads((tmp_path / "worker-1.json").read_text())
    assert [Path(path).name for path in merging.files_in(str(tmp_path))] == [
        "worker-0.json",
        "worker-0-2.json",
        "worker-1.json",
    ]
    merged = Path(merging.merge(str(tmp_path)))
    assert [(event["name"], event["pid"]) for event in events_of(merged)] == [
        ("first", 0),
        ("again", 10_000),
        ("second", 1),
    ]
    assert not list(tmp_path.glob("*.part"))


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Path]:
    """A directory for traces, which `trace_file.begin` writes to."""
    with environment.patched(KDIST_TRACE=tmp_path):
        yield tmp_path
    trace_file._end()
    trace_file._file = None


@pytest.mark.kills("trace_written_by_children")
def test_a_child_writes_nothing_into_its_parents_trace(begun: Path) -> None:
    trace_file.begin(0)
    with span("of the parent", "step"):  # not on disk yet
        pass
    pid = os.fork()
    if pid == 0:
        for _ in range(600):  # more than the buffer holds
            with span("of a child", "input"):
                pass
        trace_file.flush()
        trace_file._end()
        trace_file.begin(0)
        with span("of a child that is a worker itself", "input"):
            pass
        trace_file._end()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    with span("of the parent", "step"):
        pass
    trace_file._end()
    assert [event["name"] for event in events_of(begun / "worker-0.json")] == ["of the parent"] * 2
    (event,) = events_of(begun / "worker-0-2.json")
    assert event["name"] == "of a child that is a worker itself"


@pytest.mark.kills("trace_tasks_are_all_workers")
@pytest.mark.parametrize(
    ("job", "index", "name"),
    [("chief", 0, "chief"), ("worker", 1, "worker 1"), ("ps", 1, "ps 1"), ("evaluator", 0, "evaluator")],
)
def test_tasks_with_different_work_trace_by_their_names(begun: Path, job: str, index: int, name: str) -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1", "e:1"]}
    config = {"cluster": cluster, "task": {"type": job, "index": index}}
    trace_file.TraceFile(str(begun), 0).close()
    with environment.patched(TF_CONFIG=json.dumps(config)):
        trace_file.begin(0)  # each process by itself is the first worker
    with span("what it does", "step"):
        pass
    trace_file._end()
    file = begun / f"{job}-{index}.json"
    assert [event["name"] for event in events_of(file)] == ["what it does"]
    about = {e["name"]: e["args"] for e in json.loads(file.read_text()) if e["ph"] == "M"}
    assert about["process_name"]["name"].startswith(f"{name} (")
    both = [json.loads(Path(path).read_text())[0]["pid"] for path in merging.files_in(str(begun))]
    assert len(both) == 2 and both == sorted(set(both)), "the first worker is in another row"
    assert (begun / "trace.json").exists() == (job == "chief")


def test_a_disk_that_takes_no_more_ends_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = trace_file.TraceFile(str(tmp_path), 0)
    spans.add_sink(file)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with span("step", "step"):
        monkeypatch.setattr(trace_file.os, "write", full)
    with pytest.warns(UserWarning, match="KDIST_TRACE: stopped writing the trace to .*No space left"):
        file.flush()
    assert span("step", "step") is span("step", "step"), "nobody listens any more"
    (tmp_path / "a-file").touch()
    with (
        environment.patched(KDIST_TRACE=tmp_path / "a-file" / "folder"),
        pytest.warns(UserWarning, match="cannot write the trace"),
    ):
        trace_file.begin(0)


def test_a_trace_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "_MOST_EVENTS", 3)
    file = trace_file.TraceFile(str(tmp_path), 0)
    spans.add_sink(file)
    for _ in range(5):
        with span("step", "step"):
            pass
    assert len(events_of(tmp_path / "worker-0.json")) == 3
    assert json.loads((tmp_path / "worker-0.json").read_text())[-1]["name"].startswith("Trace limit reached")
