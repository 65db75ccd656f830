"""The report at the end of a failed job: the worker that failed first, the reason, and its traceback."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kdist.cluster import liveness
from kdist.cluster.roles import listed
from kdist.launch.linux import signal_name

MOST_LINES = 20
_WIDEST = 240
# Lines that TensorFlow and JAX print when they start, such as "I0000 00:00:17 port.cc:153] oneDNN".
_NOISE = re.compile(
    r"[IW]\d{4} [\d:.]+ |\d{4}-\d\d-\d\d [\d:.]+: [IW] |WARNING: All log messages before absl"
)
_START = re.compile(r"[ |+]*(Traceback \(most recent call last\)|Fatal Python error)")


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
    if exit_code == liveness.PREEMPTED:
        return f"was preempted and can resume after a restart (exit code {exit_code})"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was killed by {signal_name(-exit_code)} (signal {-exit_code})"


def last_traceback(lines: Sequence[str], most: int) -> list[str]:
    """Returns the last traceback in the last lines of a worker's stderr, shortened in the middle.

    If there is no traceback, returns the last lines.

    Example:

    >>> from kdist.launch.report import last_traceback
    >>> last_traceback(["noise", "Traceback (most recent call last):", "  File ...", "ValueError: no"], 5)
    ['Traceback (most recent call last):', '  File ...', 'ValueError: no']
    """
    lines = [line[:_WIDEST] for line in lines if line.strip()]
    starts = [position for position, line in enumerate(lines) if _START.match(line)]
    if not starts:
        lines = [line for line in lines if not _NOISE.match(line)] or lines
        return lines[-min(most, 8) :]
    block = lines[starts[-1] :]
    if len(block) <= most:
        return block
    # The exception is the first line after the frames that is not indented like the frames.
    indent = len(block[0]) - len(block[0].lstrip())
    body = range(1, len(block))
    error = next((i for i in body if len(block[i]) - len(block[i].lstrip()) <= indent), len(block) - 1)
    after = block[error : error + max(1, most // 3)]
    frames = block[1:error]
    room = max(0, most - 2 - len(after))
    frames = ["  …", *frames[len(frames) - room :]] if len(frames) > room else frames
    return [block[0], *frames, *after][:most]


def failure_block(
    name: str,
    exit_code: int,
    stderr_lines: Sequence[str],
    *,
    log_file: str | None = None,
    others: Sequence[str] = (),
    ended: Sequence[str] = (),
    frozen: bool = False,
    kind: str = "workers",
    after: str = "",
) -> str:
    """Returns the block of at most 20 lines at the end of a failed job's output.

    Args:
        name: The worker that failed first, for example "worker 1".
        exit_code: The exit code of this worker; negative for a signal.
        stderr_lines: The last lines of its stderr.
        log_file: The file with its whole output.
        others: The names of the other workers of this machine, which were terminated.
        ended: The names of the workers that had ended with exit code 0 before.
        frozen: Whether a signal had stopped the worker.
        kind: The noun for `others` and `ended`.
        after: The name of a server that was lost before.
    """
    when = f"after the loss of {after}" if after else "first"
    head = f"──── kdist: {name} failed {when}: it {describe_exit(exit_code, frozen)} ────"
    foot = []
    if exit_code == -9 and not frozen:
        foot.append(
            "If you did not send SIGKILL, the machine probably ran out of memory. Check: dmesg -T | grep -i oom"
        )
    if ended:
        foot.append(f"Before that, these {kind} had ended with exit code 0: {listed(ended)}.")
    if others:
        foot.append(f"kdist terminated the other {kind}: {listed(others)}.")
    if log_file:
        foot.append(f"Full output: {log_file}")
    body = last_traceback(stderr_lines, MOST_LINES - 1 - len(foot))
    return "\n".join([head, *body, *foot])
