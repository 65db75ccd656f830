"""Started in place of a worker: asks to die with the launcher, then becomes the worker.

`python -I -S _start.py LAUNCHER_PID PROGRAM ARGUMENT…`. The request survives `exec`. Setting it in a
`preexec_fn` would be shorter, but runs Python between fork and exec, which can deadlock where the launching
process has threads (a notebook with JAX in it).
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
