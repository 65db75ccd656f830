"""Where the files of a checkpoint are: names and paths alone.

directory/
  ckpt-12/                          complete: it got this name by one rename, once all was on disk
    index.json
    shard-00000-of-00002.safetensors
    shard-00001-of-00002.safetensors
  .ckpt.tmp-0f3a…/                  being written, or left by a save that was killed
  .ckpt-12.old-77b1…/               for a moment, while a checkpoint is replaced
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
_HEAD = 400  # the first lines of an index, which say when it was saved


@dataclass(frozen=True)
class Found:
    """A complete checkpoint in a directory."""

    path: str
    number: int  # 12 of "ckpt-12"
    saved_at: float  # seconds since 1970


def numbered(prefix: str, number: int) -> str:
    """Returns the name of a checkpoint: "ckpt-12"."""
    return f"{prefix}-{number}"


def temporary(name: str, token: str) -> str:
    """Returns the name of a folder while it is being written."""
    return f".{name}.tmp-{token}"


def replaced(name: str, token: str) -> str:
    """Returns the name of a checkpoint that is about to be replaced by another of the same name."""
    return f".{name}.old-{token}"


def shard(rank: int, number: int) -> str:
    """Returns the name of the file of one worker."""
    return f"shard-{rank:05d}-of-{number:05d}.safetensors"


def is_shard(name: str) -> bool:
    """Returns whether `shard` makes such a name. Any other one could lead out of the checkpoint's directory."""
    return _SHARD.fullmatch(name) is not None


def is_checkpoint(path: str) -> bool:
    """Returns whether a directory has an index that kdist wrote, damaged or not."""
    try:
        with open(open_regular(os.path.join(path, INDEX)), "rb") as file:
            return not os.path.islink(path) and file.read(len(_BEGIN)) == _BEGIN
    except (OSError, CheckpointCorruptError):
        return False


def is_of_a_save(path: str) -> bool:
    """Returns whether a directory holds a checkpoint, or nothing but files that a save writes."""
    try:
        return is_checkpoint(path) or (
            not os.path.islink(path) and all(map(_OWN.fullmatch, os.listdir(path)))
        )
    except OSError:
        return False


def open_regular(path: str) -> int:
    """Opens a file for reading and returns its descriptor.

    Checkpoints may come from anywhere. A pipe in place of a file would never end, and a link could lead to any file of
    this machine.

    Raises:
        CheckpointCorruptError: `path` is not a regular file.
        OSError: It cannot be opened.
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
    """Returns the name of the file by which a worker says that its shard is on disk."""
    return f"shard-{rank:05d}.json"


def failure(rank: int) -> str:
    """Returns the name of the file by which a worker says that its shard could not be written."""
    return f"shard-{rank:05d}.failed"


def temporary_of(entry: str) -> str | None:
    """Returns the name that a temporary folder was written for; `None` for an entry of another kind."""
    match = _TEMPORARY.fullmatch(entry)
    return match["name"] if match else None


def replaced_of(entry: str) -> str | None:
    """Returns the name of a checkpoint that was moved aside; `None` for an entry of another kind."""
    match = _REPLACED.fullmatch(entry)
    return match["name"] if match else None


def find(directory: str | os.PathLike[str], prefix: str | None = None) -> list[Found]:
    """Returns the complete checkpoints of a directory, of one name or of all, the oldest first."""
    found: dict[str, Found] = {}
    try:
        entries = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in entries:  # names with a dot come first: a complete one replaces what was moved aside
        match = _NUMBERED.fullmatch(replaced_of(entry) or entry)
        if match is None or (entry.startswith(".") and replaced_of(entry) is None):
            continue
        path = os.path.join(directory, entry)
        saved_at = _saved_at(path)
        if saved_at is not None and prefix in (None, match["prefix"]):
            found[match[0]] = Found(path, int(match["number"]), saved_at)
    return sorted(found.values(), key=lambda item: (item.saved_at, item.number))


def latest_checkpoint(directory: str | os.PathLike[str], name: str | None = None) -> str | None:
    """Returns the path of the checkpoint that was saved last, or `None` where there is none.

    Only checkpoints that were written to their end count. Needs neither Keras nor a framework.

    Args:
        directory: Where checkpoints were saved.
        name: Only those with this name before their number; by default all.

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
        # One that is damaged counts, so that its error is seen and not an older checkpoint taken in silence.
        return float(match[1]) if match else os.path.getmtime(path)
    except ValueError:
        return os.path.getmtime(path)
    except (OSError, CheckpointCorruptError):
        return None
