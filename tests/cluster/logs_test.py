"""The logger of kdist: the levels of `KDIST_LOG`, and where messages go."""

from __future__ import annotations

import logging

import pytest

from kdist.cluster import logs
from kdist.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KDIST_LOG", raising=False)
    before = logs.logger.level
    yield
    logs.logger.setLevel(before)


def say_everything() -> None:
    logs.logger.debug("decided %d", 1)
    logs.logger.info("made %d", 2)
    logs.notice("the plan %d", 3)
    logs.logger.warning("odd %d", 4)
    logs.logger.error("broken %d", 5)


@pytest.mark.kills("log_level_not_read")
@pytest.mark.parametrize(
    ("level", "most"), [("debug", 5), (" INFO", 4), (None, 3), ("", 3), ("warning", 2), ("error", 1)]
)
def test_a_level_lets_through_what_is_at_least_as_grave(level, most, capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # without pytest's handlers
    logs.logger.setLevel(logs.NOTICE)
    logs.set_up({} if level is None else {"KDIST_LOG": level})
    say_everything()
    out, err = capsys.readouterr()
    everything = ["decided 1", "made 2", "the plan 3", "odd 4", "broken 5"]
    assert out == "" and err.splitlines() == [f"kdist: {text}" for text in everything[-most:]]


@pytest.mark.parametrize("wrong", ["loud", "10", "notice", "debug,info"])
def test_another_value_is_an_error_that_says_the_rule(wrong):
    with pytest.raises(InvalidArgumentError, match="one of debug, info, warning, error") as raised:
        logs.set_up({"KDIST_LOG": wrong})
    assert f"KDIST_LOG={wrong!r}" in str(raised.value)
    assert raised.value.hint.endswith("export KDIST_LOG=debug")


def test_a_level_of_the_user_s_own_stands_where_the_variable_says_none():
    logs.logger.setLevel(logging.ERROR)
    logs.set_up({})
    assert logs.logger.level == logging.ERROR


def test_a_program_that_shows_messages_itself_gets_each_once(capsys, monkeypatch):
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    monkeypatch.setattr(logging.root, "handlers", [handler])
    logs.notice("the plan")
    assert [(one.name, one.levelname, one.getMessage()) for one in records] == [
        ("kdist", "NOTICE", "the plan")
    ]
    assert capsys.readouterr().err == ""


def test_a_reader_that_has_gone_does_not_matter(monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])

    class Gone:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Gone())
    logs.logger.error("x")
    monkeypatch.setattr("sys.stderr", None)
    logs.logger.error("x")
