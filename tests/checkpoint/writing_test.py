"""The chief's wait for the reports of the others."""

from __future__ import annotations

import json
import re
import time

import pytest

from kdist.checkpoint import layout, writing
from kdist.checkpoint.places import Place
from kdist.errors import CheckpointError


def place_in(folder, lost):
    return Place(str(folder), str(folder / "ckpt"), [0, 3], 0, "token", lost=lost)


def test_nobody_waits_for_a_worker_that_is_lost(tmp_path):
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=re.escape("that of worker 3 did not come")):
        writing.wait_for(place_in(tmp_path, lambda: {3}), 1)
    assert time.monotonic() - began < writing._PATIENCE_HEARTBEATS


def test_a_report_counts_though_its_worker_was_lost_afterwards(tmp_path):
    (tmp_path / layout.report(1)).write_text(json.dumps({"file": "x"}))
    assert writing.wait_for(place_in(tmp_path, lambda: {3}), 1) == {"file": "x"}


def test_the_loss_of_another_one_is_waited_out(tmp_path):
    asked = []

    def lost():
        asked.append(True)
        if len(asked) == 2:
            (tmp_path / layout.report(1)).write_text("1")
        return {2}

    assert writing.wait_for(place_in(tmp_path, lost), 1) == 1
    assert len(asked) == 2
