"""Keras's progress bar under `kdist run`, on a terminal and in a pipe. The test does not import Keras."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

from tests.helpers.environment import clean_environment
from tests.helpers.scripts import run_python

TIMEOUT = 60
COLOR = re.compile(r"\x1b\[[0-9;]*m")
SCRIPT = """
import importlib.util, os, sys, time, types

def write(message, line_break=True):
    sys.stdout.write(message + "\\n" * line_break)
    sys.stdout.flush()

for name in ("keras", "keras.src", "keras.src.utils"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["keras.src.api_export"] = types.SimpleNamespace(keras_export=lambda name: lambda made: made)
sys.modules["keras.src.utils"].io_utils = types.SimpleNamespace(print_msg=write)
spec = importlib.util.spec_from_file_location("progbar", BAR)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
if os.environ["RANK"] == "0":
    for epoch in (1, 2):
        write(f"Epoch {epoch}/2")
        bar = module.Progbar(8, interval=0)
        for step in range(1, 9):
            bar.update(step, [("loss", 0.5)])
            time.sleep(0.02)
else:
    for line in range(4):
        write(f"line {line}")
        time.sleep(0.05)
"""


@pytest.fixture
def command(tmp_path):
    # Look up only the package's directory: a search for a module inside it would import Keras.
    from importlib.util import find_spec

    (folder,) = find_spec("keras").submodule_search_locations
    script = tmp_path / "bars.py"
    script.write_text(SCRIPT.replace("BAR", repr(os.path.join(folder, "src", "utils", "progbar.py"))))
    return [sys.executable, "-m", "kdist", "run", "-n", "2", "--log-dir", str(tmp_path / "logs"), str(script)]


def screen(written: str) -> list[str]:
    """Returns the lines that a terminal of sufficient width shows after this output."""
    lines, column = [""], 0
    for piece in re.split(r"(\n|\r|\x08|\x1b\[K)", COLOR.sub("", written)):
        if piece == "\n":
            lines.append("")
            column = 0
        elif piece == "\r":
            column = 0
        elif piece == "\x08":
            column = max(0, column - 1)
        elif piece == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column].ljust(column) + piece + lines[-1][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines if line.strip()]


def on_terminal(command, **environ) -> str:
    """Runs a command on a terminal of 120 columns; returns its output."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=clean_environment() | environ
    )
    os.close(theirs)
    parts: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 65536):
                parts.append(data)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert process.wait(TIMEOUT) == 0, b"".join(parts)
    finally:
        process.kill()
        reader.join(TIMEOUT)
        os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def check(lines: list[str]) -> None:
    assert lines[0] == "kdist: 2 workers × 1 cpu, from --num-workers"
    chief = [line for line in lines[1:] if line.startswith("[worker 0] ")]
    other = [line for line in lines[1:] if line.startswith("[worker 1] ")]
    assert len(chief) + len(other) == len(lines) - 1, lines
    assert other == [f"[worker 1] line {number}" for number in range(4)]
    assert [line for line in chief if "Epoch" in line] == ["[worker 0] Epoch 1/2", "[worker 0] Epoch 2/2"]
    done = re.compile(r"\[worker 0\] 8/8 ━{20} \ds \d+ms/step - loss: 0\.5000")
    assert sum(done.fullmatch(line) is not None for line in chief) == 2, lines


def test_a_pipe_gets_each_bar_once_and_no_control_characters(command):
    done = run_python(*command[1:], timeout=TIMEOUT)
    assert not set("\x1b\r\x08") & set(done.stdout + done.stderr)
    check([*done.stderr.splitlines(), *done.stdout.splitlines()])
    assert sum("/8 " in line for line in done.stdout.splitlines()) == 2


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_a_bar_that_moves(command, no_color, tmp_path):
    written = on_terminal(command, NO_COLOR=no_color)
    check(
        [
            line
            for line in screen(written)
            if "line" in line or "Epoch" in line or "8/8" in line or "kdist" in line
        ]
    )
    assert written.count("\r[worker 0] ") > 2, "it is drawn anew"
    assert bool(COLOR.search(written)) == (not no_color)
    halves = re.findall(r"[1-7]/8 (━+)(─+) ", written)
    assert bool(halves) == bool(no_color), "what is left is told without colors, too"
    assert all(len(done + left) == 20 for done, left in halves)
    log = (tmp_path / "logs" / "worker-0.log").read_text()
    assert not set("\x1b\r\x08") & set(log) and log.count("8/8 ") == log.count("/8 ") == 2, "each bar once"
    assert [line[:5] for line in log.splitlines()] == ["Epoch", "8/8 ━"] * 2
