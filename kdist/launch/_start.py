"""Asks the kernel to kill this process when the launcher dies, and then replaces it with the worker.

Usage: `python -I -S _start.py LAUNCHER_PID PROGRAM ARGUMENT…`. The request survives `exec`. A `preexec_fn`
would be shorter. However, it runs Python between fork and exec, which can deadlock if the launching process
has threads, as in a notebook with JAX.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(sys.argv[1]):  # the launcher died before the request was made
            os.kill(os.getpid(), signal.SIGKILL)
    os.execv(sys.argv[2], sys.argv[2:])
