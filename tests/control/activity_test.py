"""Activity outside of an idle main thread: work of real threads and child processes counts."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from kdist.control import activity, stalls
from tests.helpers.scripts import wait_until

WORKS = """
import sys, time
print("begins", flush=True)
while time.process_time() < 1.0: pass
print("rests", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child():
    process = subprocess.Popen(
        [sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait(10)
    process.stdin.close()
    process.stdout.close()


def test_a_child_that_has_computed_since_the_last_look(child):
    assert child.stdout.readline() == "begins\n"
    activity.others_work_for_it()
    assert child.stdout.readline() == "rests\n"
    assert activity.others_work_for_it()
    # After about a second, the child is idle, and this process does not wait for a disk.
    wait_until(lambda: not activity.others_work_for_it(), 20)


def test_a_grandchild_counts_too():
    shell = subprocess.Popen(
        ["sh", "-c", f"{sys.executable} -c '{WORKS}'; true"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert shell.stdout.readline() == "begins\n"
        activity.others_work_for_it()
        assert shell.stdout.readline() == "rests\n"
        assert activity.others_work_for_it()
    finally:
        shell.communicate(timeout=20)


def test_the_threads_of_a_process_count():
    machine = stalls.Machine()
    before = machine.cpu_seconds()

    def work():
        while time.thread_time() < 0.2:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert machine.cpu_seconds() - before >= 0.2


@pytest.mark.kills("stall_watch_counts_itself")
def test_the_looks_of_the_watch_do_not_count():
    machine = stalls.Machine()
    before, end = machine.cpu_seconds(), time.thread_time() + 0.3
    while time.thread_time() < end:
        pass
    assert machine.cpu_seconds() - before < 0.1


def test_more_than_threads_that_only_look_around():
    assert activity.is_busy(0.31, 10.0) and not activity.is_busy(0.29, 10.0)
    assert activity.is_busy(0.031, 0.1) and not activity.is_busy(0.029, 0.1), (
        "a tenth of a second says little"
    )


def test_a_process_that_was_stopped(child):
    assert child.stdout.readline() == "begins\n"
    assert not activity.is_stopped(child.pid)
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: activity.is_stopped(child.pid), 20)
    assert not activity.is_stopped(2**22 + 1), "no such process"
