"""Reads checkpoints and checks every byte that is read. Needs neither Keras nor a framework."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kdist.checkpoint import layout
from kdist.checkpoint.checksums import crc32
from kdist.checkpoint.index import DTYPES, Index, Piece, Tensor, parse
from kdist.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

_CHUNK = 1 << 20  # what is summed is still in the cache
_THREADS = 4


def read_index(path: str | os.PathLike[str]) -> Index:
    """Reads the index of a checkpoint.

    Args:
        path: Of its folder.

    Raises:
        CheckpointNotFoundError: There is no complete checkpoint.
        CheckpointCorruptError: The index is damaged.
    """
    path = os.fspath(path)
    file = os.path.join(path, layout.INDEX)
    try:
        with open(file, "rb") as stream:
            data = stream.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(
            "The path must be that of a complete checkpoint, a folder with an index.json.",
            received={"path": path},
            hint=_instead(path),
        ) from error
    except OSError as error:
        raise CheckpointError("The checkpoint must be readable.", received={"error": str(error)}) from error
    try:
        return parse(data, file)
    except CheckpointError as error:
        raise with_offer(error, path) from error


def read_tensors(path: str, index: Index, wanted: Sequence[Tensor]) -> dict[str, Any]:
    """Reads tensors into memory, in several threads, and checks their sums.

    Args:
        path: Of the checkpoint.
        index: Its index.
        wanted: Which tensors.

    Returns:
        A NumPy array for each name.

    Raises:
        CheckpointCorruptError: A file is missing, short, or has other bytes than were saved.
    """
    import numpy as np

    arrays = {tensor.name: np.empty(tensor.num_bytes, np.uint8) for tensor in wanted}
    try:
        with _Files(path, index) as files, ThreadPoolExecutor(_THREADS) as pool:
            jobs = [
                pool.submit(files.read, tensor, piece, memoryview(arrays[tensor.name]))  # type: ignore[arg-type]
                for tensor in wanted
                for piece in tensor.pieces
            ]
            for job in jobs:
                job.result()
    except CheckpointError as error:
        raise with_offer(error, path) from error
    return {
        tensor.name: arrays[tensor.name].view(dtype_of(tensor.dtype)).reshape(tensor.shape)
        for tensor in wanted
    }


def dtype_of(name: str) -> Any:
    """Returns NumPy's dtype of a name; those of machine learning come from `ml_dtypes`."""
    import numpy as np

    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def verify(path: str | os.PathLike[str]) -> Index:
    """Reads a whole checkpoint and checks every byte, with little memory.

    Args:
        path: Of its folder.

    Returns:
        Its index.

    Raises:
        CheckpointError: As `read_index` and `read_tensors`.
    """
    index = read_index(path)
    path = os.fspath(path)
    try:
        with _Files(path, index) as files:
            for number in range(len(index.files)):
                files.check(number)
            for tensor in index.tensors:
                for piece in tensor.pieces:
                    files.read(tensor, piece, None)
    except CheckpointError as error:
        raise with_offer(error, path) from error
    return index


def with_offer(error: CheckpointError, path: str) -> CheckpointError:
    """Returns an error whose hint names the complete checkpoint before the broken one."""
    offer = _instead(path)
    return type(error)(error.rule, received=error.received, hint=" ".join(filter(None, [error.hint, offer])))


def _instead(path: str) -> str:
    path = os.path.abspath(path)
    found = layout.find(os.path.dirname(path))
    own = next((item.saved_at for item in found if item.path == path), float("inf"))
    for item in reversed(found):
        if item.path != path and item.saved_at <= own and _seems_whole(item.path):
            return f"The one before it is complete: checkpoint.restore({item.path!r})"
    return ""


def _seems_whole(path: str) -> bool:
    with contextlib.suppress(OSError, CheckpointError):
        with open(os.path.join(path, layout.INDEX), "rb") as stream:
            index = parse(stream.read(), path)
        return all(os.path.getsize(os.path.join(path, f.name)) == f.num_bytes for f in index.files)
    return False


class _Files:
    """The files of a checkpoint, each opened when it is first needed."""

    def __init__(self, path: str, index: Index) -> None:
        self._path = path
        self._index = index
        self._open: dict[int, int] = {}

    def __enter__(self) -> _Files:
        needed = {piece.file for tensor in self._index.tensors for piece in tensor.pieces}
        try:
            for number in sorted(needed | set(range(len(self._index.files)))):
                self._open[number] = self._opened(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for fd in self._open.values():
            os.close(fd)

    def _opened(self, number: int) -> int:
        file = self._index.files[number]
        path = os.path.join(self._path, file.name)
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise CheckpointCorruptError(
                "A checkpoint must have all its shards, but one is missing.",
                received={"file": path, "shards": len(self._index.files)},
            ) from error
        except OSError as error:
            raise CheckpointError(
                "The checkpoint must be readable.", received={"error": str(error)}
            ) from error
        size = os.fstat(fd).st_size
        if size != file.num_bytes:
            os.close(fd)
            raise CheckpointCorruptError(
                "A shard must have the length that it was saved with.",
                received={"file": path, "bytes": size, "saved": file.num_bytes},
            )
        return fd

    def check(self, number: int) -> None:
        """Checks what comes before the tensors of a file."""
        file = self._index.files[number]
        path = os.path.join(self._path, file.name)
        if crc32(os.pread(self._open[number], file.header_bytes, 0)) != file.header_crc32:
            raise CheckpointCorruptError(
                "A shard must have the bytes that it was saved with: its header is damaged.",
                received={"file": path},
            )

    def read(self, tensor: Tensor, piece: Piece, array: memoryview | None) -> None:
        """Reads a piece into its place in an array, or only checks its sum."""
        itemsize = DTYPES[tensor.dtype][0]
        num_bytes = (piece.last - piece.first) * itemsize
        start = piece.first * itemsize
        scratch = None if array is not None else memoryview(bytearray(min(num_bytes, _CHUNK)))
        crc = done = 0
        while done < num_bytes:
            size = min(num_bytes - done, _CHUNK)
            part = (
                array[start + done : start + done + size] if array is not None else scratch[:size]  # type: ignore[index]
            )
            got = os.preadv(self._open[piece.file], [part], piece.offset + done)
            if not got:
                break  # cut since it was opened: the sum says so
            crc = crc32(part[:got], crc)
            done += got
        if crc != piece.crc32:
            raise CheckpointCorruptError(
                "A shard must have the bytes that it was saved with: a tensor is damaged.",
                received={
                    "file": os.path.join(self._path, self._index.files[piece.file].name),
                    "tensor": tensor.name,
                    "offset": piece.offset,
                    "bytes": num_bytes,
                },
            )
