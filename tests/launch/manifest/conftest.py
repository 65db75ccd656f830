"""The `manifest` fixture returns the output of `kdist manifest`."""

from __future__ import annotations

import pytest

from kdist.command_line import main


@pytest.fixture
def manifest(capfd, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)

    def write(scheduler, *options):
        assert main(["manifest", scheduler, *options]) == 0, capfd.readouterr().err
        return capfd.readouterr().out

    return write
