"""Names and paths of the files of a checkpoint.

directory/
  ckpt-12/                          a complete checkpoint. It got this name when all bytes were on disk.
    index.json
    shard-00000-of-00002.safetensors
    shard-00001-of-00002.safetensors
  .ckpt.tmp-0f3a…/                  a checkpoint being written, or left by a killed save
  .ckpt-12.old-77b1…/               the old checkpoint, briefly, while a new one replaces it
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass

from kdist.errors import CheckpointCorruptError

INDEX = "index.json"
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.tmp-[0-9a-f]{16}")
_REPLACED = re.compile(r"\.(?P<name>.+)\.old-[0-9a-f]{16}")
_SHARD = re.compile(r"shard-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
_OWN = re.compile(r"shard-[0-9]{5,}(-of-[0-9]{5,}\.safetensors|\.(json|failed)(\.part)?)")
_NUMBERED = re.compile(r"(?P<prefix>.+)-(?P<number>[0-9]+)")
_SAVED_AT = re.compile(rb'"saved_at": *([0-9.]+)')
_BEGIN = b'{"format": "kdist.checkpoint"'
_HEAD = 400  # bytes at the start of an index, which include `saved_at`


@dataclass(frozen=True)
class Found:
    """A complete checkpoint in a directory."""

    path: str
    number: int  # 12 for "ckpt-12"
    saved_at: float  # seconds since 1970


def numbered(prefix: str, number: int) -> str:
    """Returns the name of a numbered checkpoint, such as "ckpt-12"."""
    return f"{prefix}-{number}"


def temporary(name: str, token: str) -> str:
    """Returns the name of the temporary directory of a save."""
    return f".{name}.tmp-{token}"


def replaced(name: str, token: str) -> str:
    """Returns the hidden name of a checkpoint while a new checkpoint of the same name replaces it."""
    return f".{name}.old-{token}"


def shard(rank: int, number: int) -> str:
    """Returns the file name of one worker's shard."""
    return f"shard-{rank:05d}-of-{number:05d}.safetensors"


def is_shard(name: str) -> bool:
    """Returns whether `shard` can return this name. Other names could point outside the checkpoint."""
    return _SHARD.fullmatch(name) is not None


def is_checkpoint(path: str) -> bool:
    """Returns whether a directory contains an index that kdist wrote, even if the rest is corrupt."""
    try:
        with open(open_regular(os.path.join(path, INDEX)), "rb") as file:
            return not os.path.islink(path) and file.read(len(_BEGIN)) == _BEGIN
    except (OSError, CheckpointCorruptError):
        return False


def is_of_a_save(path: str) -> bool:
    """Returns whether a directory is a checkpoint, or contains only files that a save writes."""
    try:
        return is_checkpoint(path) or (
            not os.path.islink(path) and all(map(_OWN.fullmatch, os.listdir(path)))
        )
    except OSError:
        return False


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


def report(rank: int) -> str:
    """Returns the name of the file that a worker creates when its shard is on disk."""
    return f"shard-{rank:05d}.json"


def failure(rank: int) -> str:
    """Returns the name of the file that a worker creates if it cannot write its shard."""
    return f"shard-{rank:05d}.failed"


def temporary_of(entry: str) -> str | None:
    """Returns the `name` of an entry that `temporary` named, or `None` for other entries."""
    match = _TEMPORARY.fullmatch(entry)
    return match["name"] if match else None


def replaced_of(entry: str) -> str | None:
    """Returns the `name` of an entry that `replaced` named, or `None` for other entries."""
    match = _REPLACED.fullmatch(entry)
    return match["name"] if match else None


def standing(path: str | os.PathLike[str]) -> str:
    """Returns the path of the checkpoint to read: the path itself, or the hidden name of the old checkpoint.

    A save that is killed while it replaces a checkpoint can leave only the hidden one, until the next save.
    """
    path = os.path.abspath(path)
    parent, name = os.path.split(path)
    if os.path.lexists(path):
        return path
    try:
        entries = os.listdir(parent)
    except OSError:
        return path
    hidden = [os.path.join(parent, entry) for entry in entries if replaced_of(entry) == name]
    return max(filter(is_checkpoint, hidden), key=lambda old: _saved_at(old) or 0.0, default=path)


def find(directory: str | os.PathLike[str], prefix: str | None = None) -> list[Found]:
    """Returns the complete checkpoints of a directory, oldest first. `prefix` selects checkpoints by name."""
    found: dict[str, Found] = {}
    try:
        entries = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in entries:  # hidden names sort first, so complete checkpoints override replaced ones
        match = _NUMBERED.fullmatch(replaced_of(entry) or entry)
        if match is None or (entry.startswith(".") and replaced_of(entry) is None):
            continue
        path = os.path.join(directory, entry)
        saved_at = _saved_at(path)
        if saved_at is not None and prefix in (None, match["prefix"]):
            found[match[0]] = Found(path, int(match["number"]), saved_at)
    return sorted(found.values(), key=lambda item: (item.saved_at, item.number))


def latest_checkpoint(directory: str | os.PathLike[str], name: str | None = None) -> str | None:
    """Returns the path of the last saved checkpoint, or `None` if there is none.

    Ignores unfinished saves. Imports neither Keras nor a backend.

    Args:
        directory: The directory of the checkpoints.
        name: If set, only consider checkpoints with this name before the number.

    Returns:
        A path for `Checkpoint.restore`.

    Example:

    >>> import kdist
    >>> kdist.latest_checkpoint("no/such/folder") is None
    True
    """
    found = find(directory, name)
    return found[-1].path if found else None


def _saved_at(path: str) -> float | None:
    try:
        with open(open_regular(os.path.join(path, INDEX)), "rb") as file:
            match = _SAVED_AT.search(file.read(_HEAD))
        # Include corrupt checkpoints, so that restoring raises an error instead of using an older checkpoint.
        return float(match[1]) if match else os.path.getmtime(path)
    except ValueError:
        return os.path.getmtime(path)
    except (OSError, CheckpointCorruptError):
        return None
