"""Names and paths of the files of a checkpoint.

directory/
  ckpt-12/                          a complete checkpoint. It got this name when all bytes were on disk.
    index.json
    shard-00000-of-00002.safetensors
    shard-00001-of-00002.safetensors
  .ckpt.tmp-0f3a…/                  a checkpoint being written, or left by a killed save
  .ckpt-12.old-77b1…/               the old checkpoint, briefly, while a new one replaces it

Object stores have no rename. There, all files of a save have their final directory from the beginning, and the
token of the save in their names. The index is written last: a checkpoint without an index does not exist.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from kdist.checkpoint import storage
from kdist.errors import CheckpointCorruptError
from kdist.whole_files import is_remote

INDEX = "index.json"
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.tmp-[0-9a-f]{16}")
_REPLACED = re.compile(r"\.(?P<name>.+)\.old-[0-9a-f]{16}")
_TAG = r"(?:-[0-9a-f]{16})?"
_SHARD = re.compile(rf"shard-[0-9]{{5,}}-of-[0-9]{{5,}}{_TAG}\.safetensors")
_OWN = re.compile(rf"shard-[0-9]{{5,}}(-of-[0-9]{{5,}}{_TAG}\.safetensors|{_TAG}\.(json|failed))(\.part)?")
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


def shard(rank: int, number: int, tag: str = "") -> str:
    """Returns the file name of one worker's shard."""
    return f"shard-{rank:05d}-of-{number:05d}{tag}.safetensors"


def is_shard(name: str) -> bool:
    """Returns whether `shard` can return this name. Other names could point outside the checkpoint."""
    return _SHARD.fullmatch(name) is not None


def is_own(name: str) -> bool:
    """Returns whether a save can write a file of this name, other than the index."""
    return _OWN.fullmatch(name) is not None


def shards_in(index: bytes) -> set[str]:
    """Returns the names of the shards that an index contains, even if the index is corrupt."""
    return set(_SHARD.findall(index.decode(errors="replace")))


def is_checkpoint(path: str) -> bool:
    """Returns whether a directory contains an index that kdist wrote, even if the rest is corrupt."""
    try:
        begin = storage.of(path).head(os.path.join(path, INDEX), len(_BEGIN))
        return not os.path.islink(path) and begin == _BEGIN
    except (OSError, CheckpointCorruptError):
        return False


def is_of_a_save(path: str) -> bool:
    """Returns whether a directory is a checkpoint, or contains only files that a save writes."""
    try:
        names = set(os.listdir(path))
        if INDEX in names and os.path.getsize(os.path.join(path, INDEX)) == 0:  # killed before the first byte
            names.remove(INDEX)
        return is_checkpoint(path) or (not os.path.islink(path) and all(map(is_own, names)))
    except OSError:
        return False


def report(rank: int, tag: str = "") -> str:
    """Returns the name of the file that a worker creates when its shard is on disk."""
    return f"shard-{rank:05d}{tag}.json"


def failure(rank: int, tag: str = "") -> str:
    """Returns the name of the file that a worker creates if it cannot write its shard."""
    return f"shard-{rank:05d}{tag}.failed"


def prefix_of(entry: str) -> str | None:
    """Returns the prefix of a name from `numbered`, such as "ckpt", or `None` for other names."""
    match = _NUMBERED.fullmatch(entry)
    return match["prefix"] if match else None


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
    path = storage.absolute(path)
    parent, name = os.path.split(path)
    if is_remote(path) or os.path.lexists(path):
        return path
    try:
        entries = os.listdir(parent)
    except OSError:
        return path
    hidden = [os.path.join(parent, entry) for entry in entries if replaced_of(entry) == name]
    return max(filter(is_checkpoint, hidden), key=lambda old: _saved_at(old) or 0.0, default=path)


def find(directory: str | os.PathLike[str], prefix: str | None = None) -> list[Found]:
    """Returns the complete checkpoints of a directory, oldest first. `prefix` selects checkpoints by name."""
    directory = storage.plain(directory)
    store = storage.of(directory)
    try:
        entries = sorted(store.names(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = []
    for entry in entries:  # hidden names sort first, so complete checkpoints override replaced ones
        match = _NUMBERED.fullmatch(replaced_of(entry) or entry)
        if match is None or (entry.startswith(".") and replaced_of(entry) is None):
            continue
        if prefix in (None, match["prefix"]):
            matches.append((match, os.path.join(directory, entry)))
    saved = store.map(_saved_at, [path for _, path in matches])
    found = {
        match[0]: Found(path, int(match["number"]), saved_at)
        for (match, path), saved_at in zip(matches, saved, strict=True)
        if saved_at is not None
    }
    return sorted(found.values(), key=lambda item: (item.saved_at, item.number))


def position(epoch: int, step: int) -> str:
    """Describes where `fit` resumes, counted from 1 as in Keras's output, from its completed epochs and steps.

    Example:

    >>> from kdist.checkpoint.layout import position
    >>> position(2, 120), position(2, 0)
    ('epoch 3, after step 120', 'epoch 3')
    """
    return f"epoch {epoch + 1}" + (f", after step {step}" if step else "")


def latest_checkpoint(directory: str | os.PathLike[str], name: str | None = None) -> str | None:
    """Returns the path of the last saved checkpoint, or `None` if there is none.

    Ignores unfinished saves. Imports neither Keras nor a backend.

    Args:
        directory: The directory of the checkpoints, or a URL such as `"s3://bucket/run"`.
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
    store, index = storage.of(path), os.path.join(path, INDEX)
    dated = index if is_remote(path) else path  # a store has no directories
    try:
        match = _SAVED_AT.search(store.head(index, _HEAD))
        # Include corrupt checkpoints, so that restoring raises an error instead of using an older checkpoint.
        return float(match[1]) if match else store.modified(dated)
    except ValueError:
        return store.modified(dated)
    except (OSError, CheckpointCorruptError):
        return None
