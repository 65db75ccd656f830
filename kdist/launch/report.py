"""The report at the end of a failed job: the worker that failed first, the reason, and its traceback."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from kdist.cluster import timeouts
from kdist.cluster.roles import listed
from kdist.errors import is_library
from kdist.launch.linux import is_stopped, signal_name
from kdist.launch.worker_process import WorkerProcess

MOST_LINES = 20
_WIDEST = 240
# Lines that TensorFlow and JAX print when they start, such as "I0000 00:00:17 port.cc:153] oneDNN".
_NOISE = re.compile(
    r"[IW]\d{4} [\d:.]+ |\d{4}-\d\d-\d\d [\d:.]+: [IW] |WARNING: All log messages before absl"
)
# TensorFlow's threads print such errors within a traceback, even within its lines, for example when a peer exits.
_ERROR_LOG = re.compile(r"E\d{4} [\d:.]+ |\d{4}-\d\d-\d\d [\d:.]+: E ")
# The loss of a peer does not cause these signals, so a worker that died of one of them failed first.
_OWN_FAULT = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_FRAME = re.compile(r'[ |+]*File "([^"]+)", line \d+')
_ERROR = re.compile(r"[ |+]*[\w.<>]+(: |:?$)")  # such as "ValueError: no", and not "return f(x)" or "^^^"
_START = re.compile(r"[ |+]*(Traceback \(most recent call last\)|Fatal Python error)")


def reasons(failures: Sequence[WorkerProcess]) -> list[WorkerProcess]:
    """Returns the failed workers that did not fail because they lost another worker."""
    return [worker for worker in failures if not worker.tail.has_lost_another]


def first_failure(
    failures: Sequence[WorkerProcess], workers: Sequence[WorkerProcess]
) -> tuple[WorkerProcess, int]:
    """Returns the worker that failed first, and the number of workers that were killed, stopped or hung.

    Not only failed workers count, because a signal can stop a live worker.
    """
    own_fault = [worker for worker in failures if -(worker.exit_code or 0) in _OWN_FAULT]
    frozen = [worker for worker in workers if worker.frozen or (worker.alive and is_stopped(worker.pid))]
    first = (own_fault or frozen or [min(reasons(failures) or failures, key=_failed_at)])[0]
    first.frozen = first in frozen
    gone = {id(worker) for worker in (*own_fault, *frozen)}
    if (first.exit_code or 0) < 0 or first.exit_code == timeouts.STALLED:
        gone.add(id(first))
    return first, len(gone)


def _failed_at(worker: WorkerProcess) -> float:
    """Returns the time of a failure. A worker prints its traceback before its libraries have shut down."""
    printed = worker.tail.traceback_at
    return printed if printed is not None and worker.exited_at - printed < 5.0 else worker.exited_at


def shell_exit_code(exit_code: int) -> int:
    """Converts an exit code of `subprocess` to the exit code of a shell: 128 plus the number for a signal.

    Example:

    >>> from kdist.launch.report import shell_exit_code
    >>> shell_exit_code(-9)
    137
    """
    return 128 - exit_code if exit_code < 0 else exit_code & 0xFF


def describe_exit(exit_code: int, frozen: bool = False) -> str:
    """Describes an exit code of `subprocess`, for example "was killed by SIGKILL (signal 9)".

    Set `frozen` if a signal such as SIGSTOP had stopped the process before it was killed.
    """
    if frozen:
        return "was stopped by a signal such as SIGSTOP"
    if exit_code == timeouts.PREEMPTED:
        return f"was preempted and can resume after a restart (exit code {exit_code})"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was killed by {signal_name(-exit_code)} (signal {-exit_code})"


def unexpected_exit(worker: WorkerProcess) -> str:
    """Describes the exit of a task that should run until the end of the job."""
    said = f"{worker.plan.full_name} {describe_exit(worker.exit_code or 0)}"
    if worker.exit_code:
        return said
    return f"{said} while the job needs it (call kdist.Server(…).join(), which does not return)"


def last_traceback(lines: Sequence[str], most: int) -> list[str]:
    """Returns the last traceback in the last lines of a worker's stderr, with the user's last frame only.

    If there is no frame of the user, shortens the traceback in the middle. If there is no traceback, returns the
    last lines.

    Example:

    >>> from kdist.launch.report import last_traceback
    >>> last_traceback(["noise", "Traceback (most recent call last):", "  File ...", "ValueError: no"], 5)
    ['Traceback (most recent call last):', '  File ...', 'ValueError: no']
    """
    lines = [line[:_WIDEST] for line in lines if line.strip()]
    lines = [line for line in lines if not _NOISE.match(line)] or lines
    starts = [position for position, line in enumerate(lines) if _START.match(line)]
    if not starts:
        return lines[-min(most, 8) :]
    block = [line for line in lines[starts[-1] :] if not _ERROR_LOG.match(line)]
    # The exception is not indented like the frames. Python does not indent the carets under an expression of
    # several lines either, and a log can break a line after its indentation.
    indents = [len(line) - len(line.lstrip()) for line in block]
    ends = [i for i in range(1, len(block)) if indents[i] <= indents[0]] or [len(block) - 1]
    error = next((i for i in ends if _ERROR.match(block[i])), ends[0])
    frames = _of_user(block[1:error])
    after = block[error : error + max(1, most // 3, most - 1 - len(frames))]
    room = max(0, most - 1 - len(after))
    frames = ["  …", *frames[len(frames) - room + 1 :]] if len(frames) > room else frames
    return [block[0], *frames, *after][:most]


def _of_user(lines: list[str]) -> list[str]:
    """Returns the lines of the last frame in the user's code, or all lines if there is none."""
    found = {position: frame for position, line in enumerate(lines) if (frame := _FRAME.match(line))}
    own = [position for position, frame in found.items() if not is_library(frame[1])]
    if not own:
        return lines
    end = next((position for position in found if position > own[-1]), len(lines))
    return [*["  …"] * (own[-1] > 0), *lines[own[-1] : end], *["  …"] * (end < len(lines))]


def failure_block(
    failed: WorkerProcess, workers: Sequence[WorkerProcess], lost_server: WorkerProcess | None = None
) -> str:
    """Returns the last lines of a failed job's output, at most 20, about the worker that failed first."""
    code = 1 if failed.exit_code is None else failed.exit_code
    name = failed.plan.full_name if len(workers) > 1 else failed.name
    others = [worker for worker in workers if worker not in (failed, lost_server)]
    # A worker that ended too early may be the reason why another one failed, for example when it waited for it.
    ended = [worker for worker in others if worker.exit_code == 0 and worker.exited_at < failed.exited_at]
    terminated = [worker.name for worker in others if worker not in ended]
    kind = "tasks" if any(worker.plan.helps for worker in workers) else "workers"
    when = "first"
    if lost_server is not None and lost_server is not failed:
        when = f"after the loss of {lost_server.plan.full_name}"
    head = f"──── kdist: {name} failed {when}: it {describe_exit(code, failed.frozen)} ────"
    foot = []
    if code == -9 and not failed.frozen:
        foot.append(
            "If you did not send SIGKILL, the machine probably ran out of memory. Check: dmesg -T | grep -i oom"
        )
    if ended:
        names = listed([worker.name for worker in ended])
        foot.append(f"Before that, these {kind} had ended with exit code 0: {names}.")
    if terminated:
        foot.append(f"kdist terminated the other {kind}: {listed(terminated)}.")
    if failed.log_file:
        foot.append(f"Full output: {failed.log_file}")
    body = last_traceback(failed.tail.lines(), MOST_LINES - 1 - len(foot))
    return "\n".join([head, *body, *foot])
