"""Reads checkpoints and checks every byte that it reads. Imports neither Keras nor a backend."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kdist.checkpoint import layout
from kdist.checkpoint.checksums import crc32
from kdist.checkpoint.index import File, Index, Piece, Tensor, parse
from kdist.checkpoint.progress import progress
from kdist.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    import numpy as np


_CHUNK = 1 << 20  # small enough that the bytes are still in the processor's cache for the checksum
_THREADS = 4
_LARGEST_INDEX = 1 << 30  # 4,096 workers write about 50 MB
_ANOTHER = "Restore another checkpoint, or a copy of this checkpoint."


def read_index(path: str | os.PathLike[str]) -> Index:
    """Reads the index of a checkpoint.

    Raises:
        CheckpointNotFoundError: If the path is not a complete checkpoint.
        CheckpointCorruptError: If the index is corrupt.
    """
    path = os.fspath(path)
    file = os.path.join(path, layout.INDEX)
    try:
        data = _read(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(
            "The path is not a complete checkpoint: it contains no index.json."
            if os.path.exists(path)
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


def _read(file: str) -> bytes:
    with open(layout.open_regular(file), "rb") as stream:
        if os.fstat(stream.fileno()).st_size > _LARGEST_INDEX:
            raise CheckpointCorruptError(
                f"The checkpoint is corrupt: its index has more than {_LARGEST_INDEX:,} bytes.",
                received={"file": file},
                hint=_ANOTHER,
            )
        return stream.read()


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
        ThreadPoolExecutor(_THREADS) as pool,
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
    path = os.fspath(path)
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
    path = os.path.abspath(path)
    found = layout.find(os.path.dirname(path))
    own = next((item.saved_at for item in found if item.path == path), float("inf"))
    for item in reversed(found):
        if item.path != path and item.saved_at <= own and _seems_whole(item.path):
            return f"Restore a complete checkpoint: checkpoint.restore({item.path!r})"
    return ""


def _seems_whole(path: str) -> bool:
    with contextlib.suppress(OSError, CheckpointError):
        index = parse(_read(os.path.join(path, layout.INDEX)), path)
        return all(os.path.getsize(os.path.join(path, f.name)) == f.num_bytes for f in index.files)
    return False


@contextlib.contextmanager
def _opened(path: str, index: Index) -> Iterator[list[_Shard]]:
    """Opens all files of a checkpoint and checks their sizes."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_Shard(path, file, len(index.files))) for file in index.files]


class _Shard:
    """A file of a checkpoint, open for reading."""

    def __init__(self, path: str, file: File, num_shards: int) -> None:
        self._path = os.path.join(path, file.name)
        self._file = file
        try:
            self._fd = layout.open_regular(self._path)
        except FileNotFoundError as error:
            raise CheckpointCorruptError(
                "The checkpoint is corrupt: a shard is missing.",
                received={"file": self._path, "shards": num_shards},
            ) from error
        except OSError as error:
            raise _unreadable(self._path, error) from error
        size = os.fstat(self._fd).st_size
        if size != file.num_bytes:
            os.close(self._fd)
            raise CheckpointCorruptError(
                "The checkpoint is corrupt: the size of a shard has changed since the save.",
                received={"file": self._path, "bytes": size, "saved": file.num_bytes},
            )

    def __enter__(self) -> _Shard:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)

    def check_header(self) -> None:
        """Verifies the checksum of the bytes before the tensors."""
        if crc32(os.pread(self._fd, self._file.header_bytes, 0)) != self._file.header_crc32:
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
        scratch = memoryview(bytearray(min(num_bytes, _CHUNK) if array is None else 0))
        crc = done = 0
        while done < num_bytes:
            size = min(num_bytes - done, _CHUNK)
            start = piece.first * itemsize + done
            part = scratch[:size] if array is None else array[start : start + size]
            got = os.preadv(self._fd, [part], piece.offset + done)
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
