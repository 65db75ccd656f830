"""Reads checkpoints and checks every byte that it reads. Imports neither Keras nor a backend."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kdist.checkpoint import layout, storage
from kdist.checkpoint.index import File, Index, Piece, Tensor, crc32, parse
from kdist.checkpoint.progress import progress
from kdist.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    import numpy as np


_MOST_OPEN = 256  # files; usual limits of a process are 1,024 and more
_LARGEST_INDEX = 1 << 30  # 4,096 workers write about 50 MB
_ANOTHER = "Restore another checkpoint, or a copy of this checkpoint."


def read_index(path: str | os.PathLike[str]) -> Index:
    """Reads the index of a checkpoint.

    Raises:
        CheckpointNotFoundError: If the path is not a complete checkpoint.
        CheckpointCorruptError: If the index is corrupt.
    """
    path = storage.plain(path)
    file = os.path.join(path, layout.INDEX)
    try:
        data = _read(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        exists = storage.of(path).exists(path)
        raise CheckpointNotFoundError(
            "The path is not a complete checkpoint: it contains no index.json."
            if exists
            else "The checkpoint does not exist.",
            received={"path": path},
            hint=_instead(path)
            or (
                "If the path is a directory of checkpoints, restore the newest: "
                f"checkpoint.restore(kdist.latest_checkpoint({path!r}))"
                if exists and layout.latest_checkpoint(path)
                else "Check the path. `BackupAndRestore` deletes its backup when training ends. To keep it, pass "
                "delete_checkpoint=False."
            ),
        ) from error
    except OSError as error:
        raise _unreadable(file, error) from error
    with _offering_another(path):
        return parse(data, file)


def _read(path: str) -> bytes:
    with contextlib.closing(storage.of(path).opener(path)(layout.INDEX)) as file:
        if file.num_bytes > _LARGEST_INDEX:
            raise CheckpointCorruptError(
                f"The checkpoint is corrupt: its index has more than {_LARGEST_INDEX:,} bytes.",
                received={"file": os.path.join(path, layout.INDEX)},
                hint=_ANOTHER,
            )
        data = bytearray(file.num_bytes)
        return bytes(memoryview(data)[: file.read_into(memoryview(data), 0)])


def read_tensors(
    path: str, index: Index, wanted: Sequence[Tensor], shown: bool = False
) -> dict[str, np.ndarray]:
    """Reads whole tensors; see `read_ranges`. Returns NumPy arrays by name."""
    found = read_ranges(path, index, [Range(tensor, 0, tensor.size.elements) for tensor in wanted], shown)
    return {tensor.name: in_shape(array, tensor) for tensor, array in zip(wanted, found, strict=True)}


class Range(NamedTuple):
    """A range of the stored elements of a tensor."""

    tensor: Tensor
    first: int
    last: int


def read_ranges(path: str, index: Index, ranges: Sequence[Range], shown: bool = False) -> list[np.ndarray]:
    """Reads ranges of tensors in several threads, verifies all checksums, and returns flat NumPy arrays.

    If `shown` is true, a progress line appears when reading takes long.

    Raises:
        CheckpointCorruptError: If a file is missing, or its size or bytes have changed since the save.
    """
    import numpy as np

    jobs = [
        (piece.file, piece.offset, number, piece)
        for number, (tensor, first, last) in enumerate(ranges)
        for piece in tensor.pieces
        if piece.first < last and first < piece.last
    ]
    num_bytes = sum(ranges[number].tensor.num_bytes_of(piece) for *_, number, piece in jobs)
    with (
        _offering_another(path),
        contextlib.ExitStack() as kept,
        progress(f"reading {path}", num_bytes, shown) as add,
        ThreadPoolExecutor(storage.of(path).threads) as pool,
    ):
        shards = _shards(path, index)
        for count, file in enumerate(sorted({file for file, *_ in jobs})):
            if count < _MOST_OPEN:
                kept.enter_context(shards[file].kept_open())
            else:
                with shards[file].opened():  # checks its size
                    pass
        # Allocate only now: the file sizes match the index, and the tensors in the index fit into the files.
        arrays: list[Any] = [
            np.empty((last - first) * t.size.itemsize, np.uint8) for t, first, last in ranges
        ]
        running = [
            pool.submit(shards[file].read, ranges[number], piece, memoryview(arrays[number]), add)
            for file, _, number, piece in sorted(jobs)
        ]
        for job in running:
            job.result()
    return [array.view(dtype_of(tensor.dtype)) for array, (tensor, *_) in zip(arrays, ranges, strict=True)]


def in_shape(stored: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Returns stored elements with the axes of the tensor. A part of its stored axis is enough."""
    import numpy as np

    if not tensor.shape or not tensor.size.elements:
        return stored.reshape(tensor.shape)
    others = [length for axis, length in enumerate(tensor.shape) if axis != tensor.axis]
    return np.moveaxis(stored.reshape((-1, *others)), 0, tensor.axis)


def dtype_of(name: str) -> np.dtype:
    """Returns NumPy's dtype for a name, also for a dtype of `ml_dtypes` such as "bfloat16"."""
    import ml_dtypes  # noqa: F401  # registers its dtypes with NumPy
    import numpy as np

    return np.dtype(name)


def verify(path: str | os.PathLike[str]) -> Index:
    """Reads a whole checkpoint in small chunks, checks every byte, and returns the index.

    Raises:
        CheckpointError: As in `read_index` and `read_tensors`.
    """
    index = read_index(path)
    path = storage.plain(path)
    with (
        _offering_another(path),
        contextlib.ExitStack() as kept,
        progress(f"checking {path}", index.num_bytes) as add,
    ):
        shards = _shards(path, index)
        for shard in shards[:_MOST_OPEN]:
            kept.enter_context(shard.kept_open())
        for shard in shards:
            shard.check_header()
        for tensor in index.tensors:
            for piece in tensor.pieces:
                shards[piece.file].read(Range(tensor, 0, 0), piece, memoryview(b""), add)
    return index


def _unreadable(file: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Cannot read the checkpoint: {error.strerror or error}.",
        received={"file": file},
        hint="Check that the worker can read the file.",
    )


@contextlib.contextmanager
def _offering_another(path: str) -> Iterator[None]:
    """Adds the previous complete checkpoint to the hint of an error."""
    try:
        yield
    except CheckpointError as error:
        hint = "\n".join(filter(None, [error.hint, _instead(path)])) or _ANOTHER
        raise type(error)(error.problem, received=error.received, hint=hint) from error


def _instead(path: str) -> str:
    path = storage.absolute(path)
    found = layout.find(storage.split(path)[0])
    own = next((item.saved_at for item in found if item.path == path), float("inf"))
    for item in reversed(found):
        if item.path != path and item.saved_at <= own and _seems_whole(item.path):
            return f"Restore a complete checkpoint: checkpoint.restore({item.path!r})"
    return ""


def _seems_whole(path: str) -> bool:
    with contextlib.suppress(OSError, CheckpointError):
        index = parse(_read(path), path)
        sizes = dict(storage.of(path).sizes(path))
        return all(sizes.get(file.name) == file.num_bytes for file in index.files)
    return False


def _shards(path: str, index: Index) -> list[_Shard]:
    open_file = storage.of(path).opener(path)
    return [_Shard(os.path.join(path, file.name), file, len(index.files), open_file) for file in index.files]


@dataclass(eq=False)
class _Shard:
    """A file of a checkpoint. There can be thousands, so not all of them stay open."""

    path: str
    file: File
    num_shards: int
    open_file: Callable[[str], storage.LocalFile | storage.RemoteFile]
    kept: storage.LocalFile | storage.RemoteFile | None = None

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keeps the file open, so that all reads see it even if it is deleted or replaced in the meantime."""
        with self.opened() as self.kept:
            try:
                yield
            finally:
                self.kept = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[storage.LocalFile | storage.RemoteFile]:
        """Opens the file and checks its size, unless the file is already open."""
        if self.kept is not None:
            yield self.kept
            return
        try:
            found = self.open_file(self.file.name)
        except FileNotFoundError as error:
            directory = storage.split(self.path)[0]
            is_there = storage.of(directory).exists(os.path.join(directory, layout.INDEX))
            raise CheckpointCorruptError(
                "The checkpoint is corrupt: a shard is missing."
                if is_there
                else "The checkpoint was deleted while kdist read it, for example because of `max_to_keep`.",
                received={"file": self.path, "shards": self.num_shards},
            ) from error
        except OSError as error:
            raise _unreadable(self.path, error) from error
        with contextlib.closing(found):
            if found.num_bytes != self.file.num_bytes:
                raise CheckpointCorruptError(
                    "The checkpoint is corrupt: the size of a shard has changed since the save.",
                    received={"file": self.path, "bytes": found.num_bytes, "saved": self.file.num_bytes},
                )
            yield found

    def check_header(self) -> None:
        """Verifies the checksum of the bytes before the tensors."""
        header = memoryview(bytearray(self.file.header_bytes))
        with self.opened() as file:
            num_bytes = file.read_into(header, 0)
        if crc32(header[:num_bytes]) != self.file.header_crc32:
            raise CheckpointCorruptError(
                "The checkpoint is corrupt: the checksum of a shard's header does not match.",
                received={"file": self.path},
            )

    def read(self, wanted: Range, piece: Piece, array: memoryview, add: Callable[[int], None]) -> None:
        """Reads a piece and verifies its checksum. Copies the elements in the range to `array`."""
        tensor = wanted.tensor
        num_bytes = tensor.num_bytes_of(piece)
        before = (piece.first - wanted.first) * tensor.size.itemsize  # from the start of `array` to the piece
        crc = done = 0
        with self.opened() as file:
            is_within = before >= 0 and before + num_bytes <= len(array)
            scratch = memoryview(bytearray(0 if is_within else min(num_bytes, file.chunk)))
            while done < num_bytes:
                size, start = min(num_bytes - done, file.chunk), before + done
                part = scratch[:size] or array[start : start + size]
                got = file.read_into(part, piece.offset + done)
                if not got:
                    break  # truncated after the size check: the checksum will not match
                if scratch:
                    first, last = max(start, 0), min(start + got, len(array))
                    if first < last:
                        array[first:last] = part[first - start : last - start]
                crc = crc32(part[:got], crc)
                done += got
                add(got)
        if crc != piece.crc32:
            raise CheckpointCorruptError(
                f"The checkpoint is corrupt: the checksum of tensor {tensor.name!r} does not match.",
                received={"file": self.path, "offset": piece.offset, "bytes": num_bytes},
            )
