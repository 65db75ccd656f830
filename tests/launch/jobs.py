"""Runs `kdist run` in a process for its tests. The workers are plain Python and need no framework."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time

from tests.helpers.environment import ROOT

TIMEOUT = 30.0
PRELUDE = """
import json, os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def say(*what): print(*what, flush=True)
def name(pid):
    with open(f"/proc/{pid}/stat", "rb") as file:
        say(f"pid={pid} since={file.read().rpartition(b')')[2].split()[19].decode()};")
"""
SLEEPER = "import time; time.sleep(120)"


class Job:
    """A running `kdist run` command."""

    def __init__(
        self, folder, script, *options, arguments=(), env=None, prelude=PRELUDE, stdin=None, stdout=None
    ):
        self.script = folder / "script.py"
        self.script.write_text(prelude + textwrap.dedent(script))
        self.out, self.err = folder / "out", folder / "err"
        clean = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "TF_CONFIG")}
        clean |= {"PYTHONPATH": str(ROOT), **(env or {})}
        target = [] if "-m" in options else [str(self.script)]
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kdist", "run", *options, *target, *arguments],
                stdout=stdout or out, stderr=err, stdin=stdin or subprocess.DEVNULL, env=clean, cwd=folder,
            )  # fmt: skip

    def wait(self, timeout=TIMEOUT):
        return self.process.wait(timeout)

    def stdout(self):
        return self.out.read_text()

    def stderr(self):
        return self.err.read_text()

    def wait_for(self, *texts):
        deadline = time.monotonic() + TIMEOUT
        while not all(text in self.stdout() for text in texts):
            assert time.monotonic() < deadline, self.stdout() + self.stderr()
            assert self.process.poll() is None, self.stdout() + self.stderr()
            time.sleep(0.02)

    def numbers(self, word):
        return [int(number) for number in re.findall(rf"{word}=(\d+)", self.stdout())]

    def named(self):
        """Returns the processes that the script passed to `name`."""
        return [(int(pid), at) for pid, at in re.findall(r"pid=(\d+) since=(\d+);", self.stdout())]
