"""The syntax of faults for `--inject`, and the options that go with it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.cluster import injection, timeouts
from kdist.cluster.injection import KINDS, Fault, parse
from kdist.command_line import main
from kdist.errors import InvalidArgumentError

FAULTS = st.builds(
    Fault,
    kind=st.sampled_from(KINDS),
    worker=st.none() | st.integers(0, 999),
    step=st.none() | st.integers(1, 10**8),
    epoch=st.none() | st.integers(1, 10**8),
    phase=st.sampled_from([*injection.PHASES, "save-write", "save-rename"]),
    seconds=st.integers(0, 1000).map(float) | st.sampled_from([0.5, 2.25]),
    always=st.booleans(),
)


@given(st.lists(FAULTS, max_size=4))
def test_what_is_written_is_what_is_read(faults):
    assert injection.split(injection.join(faults)) == faults


@given(st.text(max_size=30) | st.from_regex(r"(kill|hang|stop):(worker|step|phase|seconds|x)=[\w.,=-]*"))
def test_any_text_is_a_fault_or_a_clear_error(text):
    with contextlib.suppress(InvalidArgumentError):
        fault = parse(text)
        assert parse(str(fault)) == fault


def test_examples():
    assert parse("kill:worker=1,step=30") == Fault("kill", worker=1, step=30)
    assert parse("hang") == Fault("hang")
    assert parse("slow: seconds=2.5, phase=fit step") == Fault("slow", seconds=2.5)
    assert parse("exit:phase=epoch-end,epoch=2,always=1") == Fault(
        "exit", phase="epoch-end", epoch=2, always=True
    )
    assert Fault("kill", phase="save").is_at("save-write") and not Fault("kill", phase="save-write").is_at(
        "save"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("die", "not one of kill, hang"),
        ("kill:", "not one of worker, step"),
        ("kill:worker", "The option 'worker' of the fault"),
        ("kill:worker=1,worker=2", "'worker=2' of the fault is repeated"),
        ("kill:when=1", "not one of worker, step"),
        ("kill:worker=-1", "`worker` is not an integer of at least 0"),
        ("kill:step=0", "`step` is not an integer of at least 1"),
        ("kill:phase=lunch", "`phase` is not one of begin, step"),
        ("slow:seconds=soon", "`seconds` is not a number"),
        ("kill:always=yes", "`always` is not 0 or 1"),
    ],
)
def test_wrong_faults(text, says, capsys, tmp_path):
    with pytest.raises(InvalidArgumentError, match=says):
        parse(text)
    (tmp_path / "x.py").write_text("")
    assert main(["run", "-n", "2", "--inject", text, str(tmp_path / "x.py")]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-restarts", "many"], "--max-restarts is not a whole number"),
        (["--min-workers", "3"], "--min-workers is larger than --num-workers"),
        (["--min-workers", "0"], "at least 1"),
        (["--min-workers", "1", "--hosts", "a:1,b:1", "--host-index", "0"], "works only on one machine"),
        (["--heartbeat-timeout", "0"], "`--heartbeat-timeout` is not a number of seconds"),
        (["--heartbeat-timeout", "nan"], "--heartbeat-timeout='nan'"),
        (["--hang-timeout", "soon"], "--hang-timeout='soon'"),
        (["--inject", "kill:worker=2"], "the last worker of this job is worker 1"),
    ],
)
def test_wrong_options(options, says, capsys, tmp_path):
    (tmp_path / "x.py").write_text("")
    assert main(["run", "-n", "2", *options, str(tmp_path / "x.py")]) == 2
    assert says in capsys.readouterr().err


def test_the_timeouts_come_from_the_environment():
    assert timeouts.heartbeat_timeout({}) == 15
    assert timeouts.heartbeat_timeout({"KDIST_HEARTBEAT_TIMEOUT": "2.5"}) == 2.5
    with pytest.raises(InvalidArgumentError, match="KDIST_HEARTBEAT_TIMEOUT='soon'"):
        timeouts.heartbeat_timeout({"KDIST_HEARTBEAT_TIMEOUT": "soon"})
    assert timeouts.hang_timeout({"KDIST_HEARTBEAT_TIMEOUT": "2.5"}) == 600
    assert timeouts.hang_timeout({"KDIST_HANG_TIMEOUT": "9"}) == 9
