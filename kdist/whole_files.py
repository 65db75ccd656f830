"""Files that appear as a whole: written beside their place, and moved into it by one rename."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from kdist.errors import InvalidArgumentError

_FILES = (".keras", ".h5", ".hdf5", ".json")


def is_remote(path: str) -> bool:
    """Says whether a path is that of an object store (`gs://…`, `hf://…`), which has no half files."""
    return "://" in path


def normal(path: str | os.PathLike[str]) -> str:
    """Returns what a path is called on all workers."""
    text = os.fspath(path)
    return text if is_remote(text) else os.path.abspath(text)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Within this, a file is written; it has its name once it is complete.

    Example:

    >>> import os, tempfile
    >>> from kdist.whole_files import whole_file
    >>> folder = tempfile.mkdtemp()
    >>> with whole_file(f"{folder}/new") as file:
    ...     _ = file.write(b"all of it")
    >>> os.listdir(folder)
    ['new']
    """
    part = f"{os.fspath(path)}.{os.urandom(4).hex()}.part"  # others may write the same file
    try:
        with open(part, "xb") as file:
            yield file
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


def check_output(path: str) -> None:
    """Raises, before any work is done, if `whole_file` could not write this.

    Raises:
        InvalidArgumentError: There is no such folder, it is read-only, or the name is that of a folder.
    """
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        trial = f"{path}.{os.urandom(4).hex()}.part"
        with open(trial, "xb"):
            os.unlink(trial)
    except OSError as error:
        folder = os.path.dirname(path) or "."
        raise InvalidArgumentError(
            "Cannot write the output file.",
            received={"output": path, "error": error.strerror},
            hint="Choose another file."
            if os.path.isdir(folder)
            else f"Create the directory: mkdir -p {folder}",
        ) from error


def write_whole(path: str, write: Callable[[Any], Any], worker_index: int) -> tuple[Any, str]:
    """Calls a function that writes a file or a folder, and shows what it wrote once it is complete.

    It writes into a hidden folder beside `path`. A process that is killed leaves that behind, and the next
    save to the same path removes it.

    Args:
        path: Where the result belongs.
        write: Writes to the path that it is given, which has the same name in another folder.
        worker_index: Makes the hidden folder this worker's own.

    Returns:
        What `write` returned, and the path of the file that was moved last.
    """
    real = os.path.realpath(path) if not is_remote(path) else path
    staging = os.path.join(os.path.dirname(real), f".{os.path.basename(real)}.worker-{worker_index}")
    if is_remote(path) or (os.path.isdir(real) and real.endswith(_FILES)):
        return write(path), path
    try:
        shutil.rmtree(staging, ignore_errors=True)
        os.mkdir(staging)
    except OSError:
        # No such folder: Keras's own error. Or one in which only the file itself may be written.
        return write(path), path
    try:
        result = write(os.path.join(staging, os.path.basename(real)))
        return result, _move(Path(staging), Path(real).parent) or path
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move(staging: Path, folder: Path) -> str | None:
    """Moves all files to the same places below `folder`; those that list others come last."""
    files = [file for file in staging.rglob("*") if file.is_file()]
    for file in files:
        with open(file, "rb+") as stream:
            os.fsync(stream.fileno())
    files.sort(key=lambda file: (-len(file.parts), file.suffix in (".json", ".pb"), file.name))
    last = None
    for file in files:
        last = folder / file.relative_to(staging)
        last.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, last)
    for empty in staging.rglob("*"):
        if empty.is_dir():
            (folder / empty.relative_to(staging)).mkdir(parents=True, exist_ok=True)
    return None if last is None else str(last)
