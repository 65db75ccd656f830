"""Reads checkpoints and checks every byte that it reads. Imports neither Keras nor a backend."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kdist.checkpoint import layout, storage
from kdist.checkpoint.checksums import crc32
from kdist.checkpoint.index import File, Index, Piece, Tensor, parse
from kdist.checkpoint.progress import progress
from kdist.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    import numpy as np


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
        raise CheckpointNotFoundError(
            "The path is not a complete checkpoint: it contains no index.json."
            if storage.of(path).exists(path)
            else "The checkpoint does not exist.",
            received={"path": path},
            hint=_instead(path)
            or "If the path is a directory of checkpoints, restore the newest: "
            f"checkpoint.restore(kdist.latest_checkpoint({path!r}))",
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
    """Reads tensors in several threads, verifies their checksums, and returns NumPy arrays by name.

    If `shown` is true, a progress line appears when reading takes long.

    Raises:
        CheckpointCorruptError: If a file is missing, or its size or bytes have changed since the save.
    """
    import numpy as np

    num_bytes = sum(tensor.num_bytes for tensor in wanted)
    with (
        _offering_another(path),
        _opened(path, index) as shards,
        progress(f"reading {path}", num_bytes, shown) as add,
        ThreadPoolExecutor(storage.of(path).threads) as pool,
    ):
        # Allocate only now: the file sizes match the index, and the tensors in the index fit into the files.
        arrays: dict[str, Any] = {tensor.name: np.empty(tensor.num_bytes, np.uint8) for tensor in wanted}
        jobs = [
            pool.submit(shards[piece.file].read, tensor, piece, memoryview(arrays[tensor.name]), add)
            for tensor in wanted
            for piece in tensor.pieces
        ]
        for job in jobs:
            job.result()
    return {
        tensor.name: arrays[tensor.name].view(dtype_of(tensor.dtype)).reshape(tensor.shape)
        for tensor in wanted
    }


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
        _opened(path, index) as shards,
        progress(f"checking {path}", index.num_bytes) as add,
    ):
        for shard in shards:
            shard.check_header()
        for tensor in index.tensors:
            for piece in tensor.pieces:
                shards[piece.file].read(tensor, piece, None, add)
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


@contextlib.contextmanager
def _opened(path: str, index: Index) -> Iterator[list[_Shard]]:
    """Opens all files of a checkpoint and checks their sizes."""
    open_file = storage.of(path).opener(path)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_Shard(path, file, index, open_file)) for file in index.files]


class _Shard:
    """A file of a checkpoint, open for reading."""

    def __init__(
        self,
        path: str,
        file: File,
        index: Index,
        open_file: Callable[[str], storage.LocalFile | storage.RemoteFile],
    ) -> None:
        self._path = os.path.join(path, file.name)
        self._file = file
        try:
            self._open = open_file(file.name)
        except FileNotFoundError as error:
            raise CheckpointCorruptError(
                "The checkpoint is corrupt: a shard is missing.",
                received={"file": self._path, "shards": len(index.files)},
            ) from error
        except OSError as error:
            raise _unreadable(self._path, error) from error
        size = self._open.num_bytes
        if size != file.num_bytes:
            self._open.close()
            raise CheckpointCorruptError(
                "The checkpoint is corrupt: the size of a shard has changed since the save.",
                received={"file": self._path, "bytes": size, "saved": file.num_bytes},
            )

    def __enter__(self) -> _Shard:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def check_header(self) -> None:
        """Verifies the checksum of the bytes before the tensors."""
        header = memoryview(bytearray(self._file.header_bytes))
        if crc32(header[: self._open.read_into(header, 0)]) != self._file.header_crc32:
            raise CheckpointCorruptError(
                "The checkpoint is corrupt: the checksum of a shard's header does not match.",
                received={"file": self._path},
            )

    def read(
        self, tensor: Tensor, piece: Piece, array: memoryview | None, add: Callable[[int], None]
    ) -> None:
        """Reads a piece, into `array` if given, and verifies its checksum. Reports progress to `add`."""
        itemsize = tensor.size.itemsize
        num_bytes = tensor.num_bytes_of(piece)
        scratch = memoryview(bytearray(min(num_bytes, self._open.chunk) if array is None else 0))
        crc = done = 0
        while done < num_bytes:
            size = min(num_bytes - done, self._open.chunk)
            start = piece.first * itemsize + done
            part = scratch[:size] if array is None else array[start : start + size]
            got = self._open.read_into(part, piece.offset + done)
            if not got:
                break  # truncated after the size check: the checksum will not match
            crc = crc32(part[:got], crc)
            done += got
            add(got)
        if crc != piece.crc32:
            raise CheckpointCorruptError(
                f"The checkpoint is corrupt: the checksum of tensor {tensor.name!r} does not match.",
                received={"file": self._path, "offset": piece.offset, "bytes": num_bytes},
            )
