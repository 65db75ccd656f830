"""The progress line of a read appears after two seconds, only on a terminal, and disappears at the end."""

from __future__ import annotations

import io
import types

import pytest

from kdist.checkpoint import progress as module
from kdist.checkpoint.progress import progress


class Stream(io.StringIO):
    is_terminal = True

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture
def now(monkeypatch):
    at = [100.0]
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: at[0]))
    return at


def read(now, seconds, stream, monkeypatch, shown=True):
    """Reads 10 MB in ten parts within `seconds`; returns the states of the line."""
    monkeypatch.setattr("sys.stderr", stream)
    with progress("reading here", 10_000_000, shown) as add:
        for _ in range(10):
            now[0] += seconds / 10
            add(1_000_000)
    return stream.getvalue().split("\r")[1:]


def test_the_line_comes_after_two_seconds_and_is_gone_at_the_end(now, monkeypatch):
    *states, cleared, end = read(now, 8.0, Stream(), monkeypatch)
    assert states[0] == "reading here ━━━━━━────────────── 30% of 10.0 MB, 6 s left"
    assert [state.split("%")[0].split()[-1] for state in states] == [
        str(share) for share in range(30, 101, 10)
    ]
    assert set(cleared) == {" "} and len(cleared) >= len(states[-1].rstrip()) and end == ""


@pytest.mark.parametrize("seconds", [0.1, 1.9])
def test_nothing_is_shown_of_what_is_short(now, monkeypatch, seconds):
    assert read(now, seconds, Stream(), monkeypatch) == []


@pytest.mark.kills("progress_in_a_pipe")
def test_nothing_is_written_to_a_file_or_by_another_worker(now, monkeypatch):
    pipe = Stream()
    pipe.is_terminal = False
    monkeypatch.setattr("sys.stdout", pipe)
    assert read(now, 8.0, pipe, monkeypatch) == []
    assert read(now, 8.0, Stream(), monkeypatch, shown=False) == []


def test_a_notebook_shows_it(now, monkeypatch):
    class OutStream(Stream):
        is_terminal = False

    OutStream.__module__ = "ipykernel.iostream"
    assert len(read(now, 8.0, OutStream(), monkeypatch)) == 10


def test_the_other_stream_is_taken_where_one_is_no_terminal(now, monkeypatch):
    pipe, terminal = Stream(), Stream()
    pipe.is_terminal = False
    monkeypatch.setattr("sys.stdout", terminal)
    read(now, 8.0, pipe, monkeypatch)
    assert pipe.getvalue() == "" and "100% of 10.0 MB" in terminal.getvalue()


def test_a_long_path_is_cut_since_a_broken_line_is_not_drawn_over(now, monkeypatch):
    monkeypatch.setenv("COLUMNS", "64")
    stream = Stream()
    monkeypatch.setattr("sys.stderr", stream)
    with progress(f"reading /{'a-long-folder/' * 9}ckpt-3", 10_000_000) as add:
        now[0] += 8.0
        add(5_000_000)
    state = stream.getvalue().split("\r")[1]
    assert len(state) == 63 and state.startswith("…") and state.endswith(", 8 s left")
    assert "/ckpt-3 ━" in state, "the end of a path tells more"


def test_what_a_program_has_put_in_place_of_its_streams_stops_nothing(now, monkeypatch):
    class Tee:
        said = ""

        def write(self, text):
            self.said += text

    closed = Stream()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    tee = Tee()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", tee)
        with progress("reading here", 10_000_000) as add:
            now[0] += 8.0
            add(5_000_000)
    assert tee.said == ""


def test_a_terminal_that_goes_away_stops_nothing(now, monkeypatch):
    stream = Stream()
    monkeypatch.setattr("sys.stderr", stream)
    with progress("reading here", 10_000_000) as add:
        now[0] += 8.0
        add(1_000_000)
        stream.close()
        now[0] += 8.0
        add(1_000_000)
