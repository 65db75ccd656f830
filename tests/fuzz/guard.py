"""Forbids effects of an input: long runs, much memory, pickles, new processes, and files in other places."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Iterator

SECONDS = 5.0
MEMORY = 512 << 20
_PATHS = ("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree")
_FORBIDDEN = ("pickle.find_class", "marshal.loads", "exec", "ctypes.dlopen", "os.system", "os.exec", "os.posix_spawn",
              "subprocess.Popen", "socket.connect", "socket.bind")  # fmt: skip
_SYSTEM = (
    sys.prefix,
    sys.base_prefix,
    os.path.dirname(os.__file__),
    "/proc/",
    "/sys/",
    "/dev/urandom",
    "/usr/lib",
    "/usr/share",
)
_allowed: list[str] | None = None
_is_there = False


class Forbidden(BaseException):
    """Raised when an input makes kdist do something forbidden; no `except Exception` hides it."""


def _look(event: str, args: tuple[object, ...]) -> None:
    if _allowed is None:
        return
    if event in _PATHS and isinstance(args[0], (str, bytes)):
        path = os.path.abspath(os.fsdecode(args[0]))
        if not path.startswith((*_allowed, *_SYSTEM)) and not path.endswith((".py", ".pyc")):
            raise Forbidden(f"{event} {path}")
    elif event in _FORBIDDEN and "importlib" not in sys._getframe(1).f_code.co_filename:
        raise Forbidden(f"{event} {args!r:.200}")


def _late(*_: object) -> None:
    raise Forbidden(f"took more than {SECONDS:g} s")


@contextlib.contextmanager
def watched(*folders: str) -> Iterator[None]:
    """Allows files only in these directories, limits the memory, and raises at any forbidden action."""
    global _allowed, _is_there
    if not _is_there:
        sys.addaudithook(_look)  # permanent: Python cannot remove an audit hook
        _is_there = True
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, _late)
    faulthandler.dump_traceback_later(600, exit=True)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    _allowed = [os.path.abspath(folder) for folder in folders]
    try:
        yield
    finally:
        _allowed = None
        resource.setrlimit(resource.RLIMIT_AS, before)
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raises if the block takes more than `SECONDS`."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
