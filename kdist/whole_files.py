"""Files that appear only when they are complete: written to a temporary path, and then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from kdist.errors import InvalidArgumentError

_Result = TypeVar("_Result")

_FILES = (".keras", ".h5", ".hdf5", ".json")


def is_remote(path: str) -> bool:
    """Returns whether a path is in an object store (`gs://…`, `hf://…`), which never shows partial files."""
    return "://" in path


def normal(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path, which is equal on all workers; paths in object stores are unchanged."""
    text = os.fspath(path)
    return text if is_remote(text) else os.path.abspath(text)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a file for writing. The file gets its name when the `with` block succeeds.

    Example:

    >>> import os, tempfile
    >>> from kdist.whole_files import whole_file
    >>> folder = tempfile.mkdtemp()
    >>> with whole_file(f"{folder}/new") as file:
    ...     _ = file.write(b"all of it")
    >>> os.listdir(folder)
    ['new']
    """
    part = f"{os.fspath(path)}.{os.urandom(4).hex()}.part"  # other processes may write the same file
    try:
        with open(part, "xb") as file:
            yield file
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


def check_output(path: str) -> None:
    """Checks that `whole_file` can write to a path, before any work is done.

    Raises:
        InvalidArgumentError: If the directory does not exist or is read-only, or the path is a directory.
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


def write_whole(path: str, write: Callable[[str], _Result], worker_index: int) -> tuple[_Result, str]:
    """Calls a function that writes a file or directory, and moves the result to its path when it is complete.

    The function writes into a hidden directory next to `path`, which has the index of the worker in its name. If the
    process is killed, the hidden directory stays until the next save to the same path.

    Returns:
        The result of `write`, and the path of the file that was moved last.
    """
    real = os.path.realpath(path) if not is_remote(path) else path
    staging = os.path.join(os.path.dirname(real), f".{os.path.basename(real)}.worker-{worker_index}")
    if is_remote(path) or (os.path.isdir(real) and real.endswith(_FILES)):
        return write(path), path
    try:
        shutil.rmtree(staging, ignore_errors=True)
        os.mkdir(staging)
    except OSError:
        # The directory does not exist, which Keras reports, or only the file itself is writable.
        return write(path), path
    try:
        result = write(os.path.join(staging, os.path.basename(real)))
        return result, _move(Path(staging), Path(real).parent) or path
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move(staging: Path, folder: Path) -> str | None:
    """Moves all files to the same places below `folder`. Files that list other files come last."""
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
