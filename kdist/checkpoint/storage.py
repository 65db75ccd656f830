"""The files of checkpoints: in a local directory, or in an object store if the path is a URL (`s3://bucket/run`).

An object store has no directories, no rename and no locks. However, an object appears only when it is complete,
and then all workers see it. kdist reaches stores through fsspec, which has a package for each protocol.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kdist.errors import CheckpointCorruptError, CheckpointError, KdistError
from kdist.whole_files import is_remote, normal, whole_file

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from kdist.arrays.types import R, T

CHUNK = 32 << 20
_BEAT = 1.0  # seconds between two objects that show that an upload continues; other workers wait longer


def plain(path: str | os.PathLike[str]) -> str:
    """Returns a path as text. Converts a `file://` URL to a path, and removes slashes at the end of other URLs."""
    text = os.fspath(path)
    if text.startswith(("file://", "local://")):
        return text.partition("://")[2]
    protocol, sign, rest = text.partition("://")
    return f"{protocol}{sign}{rest.rstrip('/')}" if sign else text


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path of a local file, or the URL of an object."""
    return normal(plain(path))


def split(path: str) -> tuple[str, str]:
    """Returns the directory and the name, as `os.path.split` does. `memory://ckpt` is in `memory://`."""
    directory, name = os.path.split(path)
    return (f"{directory}//", name) if is_remote(path) and not is_remote(directory) else (directory, name)


def of(path: str) -> Local | Remote:
    """Returns the storage of a path.

    Raises:
        CheckpointError: If the package for the protocol of a URL is not installed.
    """
    return Remote(path) if is_remote(path) else _LOCAL


# Local files --------------------------------------------------------------------------------------------------


def open_regular(path: str) -> int:
    """Opens a regular file for reading and returns its descriptor.

    A checkpoint may come from an untrusted source. Reading a pipe could block forever, and a link could point
    to any file on this machine.

    Raises:
        CheckpointCorruptError: If `path` is not a regular file.
        OSError: If the file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise
    else:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    raise CheckpointCorruptError(
        "The checkpoint is corrupt: a file is not a regular file, but a link, a pipe or a directory.",
        received={"file": path},
        hint="If it is a link, copy the checkpoint again with: cp -rL SOURCE DESTINATION",
    )


class LocalFile:
    """A regular file, open for reading."""

    chunk = 1 << 20  # small enough that the bytes are still in the processor's cache for the checksum

    def __init__(self, path: str) -> None:
        self._fd = open_regular(path)
        self.num_bytes = os.fstat(self._fd).st_size

    def read_into(self, part: memoryview, offset: int) -> int:
        """Reads bytes at an offset. Returns their number, which is 0 at the end of the file."""
        return os.preadv(self._fd, [part], offset)

    def close(self) -> None:
        os.close(self._fd)


class Local:
    """The storage of local paths, including network file systems."""

    threads = 4  # how many read at the same time

    def names(self, directory: str) -> list[str]:
        return os.listdir(directory)

    def sizes(self, directory: str) -> Iterator[tuple[str, int]]:
        for entry in os.scandir(directory):
            with contextlib.suppress(FileNotFoundError):  # renamed in the meantime
                yield entry.name, entry.stat().st_size

    def exists(self, path: str) -> bool:
        """Returns whether a file or directory exists."""
        return os.path.exists(path)

    def modified(self, path: str) -> float:
        """Returns the time of the last change, in seconds since 1970."""
        return os.path.getmtime(path)

    def opener(self, directory: str) -> Callable[[str], LocalFile]:
        """Returns a function that opens a file of the directory by its name."""
        return lambda name: LocalFile(os.path.join(directory, name))

    def head(self, path: str, length: int) -> bytes:
        """Returns the first bytes of a regular file."""
        with open(open_regular(path), "rb") as file:
            return file.read(length)

    def read(self, path: str) -> bytes:
        """Returns the bytes of a file that this job has written."""
        with open(path, "rb") as file:
            return file.read()

    def put(self, path: str, data: bytes) -> None:
        """Writes or replaces a small file, which appears when it is complete."""
        with whole_file(path) as file:
            file.write(data)

    def write(self, path: str, parts: Iterable[Any]) -> None:
        """Writes a new file and waits until it is on disk."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            done = 0
            for part in parts:
                view = memoryview(part)
                while view:
                    written = os.write(fd, view)
                    if written >= CHUNK and hasattr(os, "posix_fadvise"):
                        # Linux starts writing to the disk immediately, while this thread prepares the next bytes.
                        os.posix_fadvise(fd, done, written, os.POSIX_FADV_DONTNEED)
                    view = view[written:]
                    done += written
            os.fsync(fd)
        finally:
            os.close(fd)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        return list(map(function, items))


_LOCAL = Local()


# Object stores ------------------------------------------------------------------------------------------------


class RemoteFile:
    """An object whose ranges can be read by several threads."""

    chunk = CHUNK  # one request each

    def __init__(self, store: AbstractFileSystem, path: str, num_bytes: int) -> None:
        self._store, self._path, self.num_bytes = store, path, num_bytes

    def read_into(self, part: memoryview, offset: int) -> int:
        """Reads bytes at an offset. Returns their number, which is 0 if the object was deleted."""
        with contextlib.suppress(FileNotFoundError), _as_error_of_kdist(self._path):
            data = self._store.cat_file(self._path, start=offset, end=offset + len(part))
            part[: len(data)] = data
            return len(data)
        return 0

    def close(self) -> None:
        """Does nothing, because each request is separate."""


class Remote:
    """The storage of URLs with the protocol of `path`. Its methods do the same as the methods of `Local`."""

    threads = 16  # because each request waits for the network

    def __init__(self, path: str) -> None:
        protocol, _, rest = path.partition("://")
        self._store = _connected(f"{protocol}://{rest.partition('/')[0]}", os.getpid())

    def names(self, directory: str) -> list[str]:
        return [name for name, _ in self.sizes(directory)]

    def sizes(self, directory: str) -> list[tuple[str, int]]:
        try:
            with _as_error_of_kdist(directory):
                self._store.invalidate_cache()  # other processes add objects
                found = self._store.ls(directory, detail=True)
        except FileNotFoundError:  # no object has this prefix
            return []
        return [(os.path.basename(entry["name"].rstrip("/")), entry["size"] or 0) for entry in found]

    def exists(self, path: str) -> bool:
        return bool(self.sizes(path))

    def modified(self, path: str) -> float:
        with _as_error_of_kdist(path):
            return self._store.modified(path).timestamp()

    def opener(self, directory: str) -> Callable[[str], RemoteFile]:
        sizes = dict(self.sizes(directory))

        def open_object(name: str) -> RemoteFile:
            path = os.path.join(directory, name)
            if name not in sizes:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return RemoteFile(self._store, path, sizes[name])

        return open_object

    def head(self, path: str, length: int) -> bytes:
        with _as_error_of_kdist(path):
            return self._store.cat_file(path, start=0, end=length)

    def read(self, path: str) -> bytes:
        with _as_error_of_kdist(path):
            return self._store.cat_file(path)

    def put(self, path: str, data: bytes) -> None:
        self._store.pipe_file(path, data)

    def write(self, path: str, parts: Iterable[Any]) -> None:
        beats, last = 0, time.monotonic()
        with self._store.open(path, "wb", block_size=CHUNK) as file:
            for part in parts:
                file.write(memoryview(part))
                # The object is not visible yet, so another object, which grows, shows that this worker is alive.
                if time.monotonic() - last >= _BEAT:
                    beats, last = beats + 1, time.monotonic()
                    with contextlib.suppress(Exception):  # a lost sign of life is harmless
                        self.put(f"{path}.part", b"." * beats)

    def remove(self, paths: Iterable[str]) -> None:
        """Deletes objects, if they exist."""
        self.map(self._remove, paths)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _as_error_of_kdist(path):
            self._store.rm_file(path)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        # A thread in the background may still save when Python exits, and then no pool can start.
        if threading.current_thread() is not threading.main_thread():
            return list(map(function, items))
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(function, items))


@functools.cache  # fsspec has a cache per thread, and each save has a new thread
def _connected(root: str, process: int) -> AbstractFileSystem:
    """Returns the file system of fsspec for URLs that begin with `root`, for this process only."""
    try:
        import fsspec

        fsspec.get_filesystem_class(root.partition("://")[0])
    except ImportError as error:
        raise CheckpointError(
            "Cannot use the URL, because a package for its protocol is not installed.",
            received={"url": root, "error": str(error)},
            hint="In your checkout of kdist, run: pip install '.[remote]', and install the package for the store, "
            "such as s3fs for s3:// or gcsfs for gs://.",
        ) from error
    except ValueError as error:
        raise CheckpointError(
            "Cannot use the URL, because fsspec does not support its protocol.",
            received={"url": root, "error": str(error)},
            hint="Pass a path, or a URL such as s3://bucket/run, gs://bucket/run or az://container/run.",
        ) from error
    with _as_error_of_kdist(root):
        return fsspec.core.url_to_fs(root)[0]


@contextlib.contextmanager
def _as_error_of_kdist(path: str) -> Iterator[None]:
    """Converts errors of a store's library into an error of kdist, except for a missing object."""
    try:
        yield
    except (FileNotFoundError, KdistError):
        raise
    except Exception as error:  # each library has its own errors
        raise CheckpointError(
            "The object store reports an error.",
            received={"path": path, "error": f"{type(error).__name__}: {error}"},
            hint="Check the URL, the network, and the credentials that the package for the store uses.",
        ) from error
