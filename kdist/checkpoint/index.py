"""The index of a checkpoint, `index.json`: its contents and the location of each piece, with a checksum."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kdist.checkpoint import layout
from kdist.checkpoint.shards import Size
from kdist.errors import CheckpointCorruptError, CheckpointError, malformed_as

# Both return the same value. With `isal` (the extra `fast`), checksums take a third of the time or less, because ISA-L
# uses the processor's instruction for polynomial multiplication.
try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

FORMAT = "kdist.checkpoint"
VERSION = 2  # if a tensor is stored along another axis than the first, otherwise 1
_LAST_SECOND = 1e11  # the limit of `saved_at`, so that it can be printed as a date

# For each dtype of a tensor: the bytes per element, and its name in a safetensors file. Dtypes without such a
# name are stored as bytes.
DTYPES: dict[str, tuple[int, str | None]] = {
    "bool": (1, "BOOL"),
    "int4": (1, None),
    "uint4": (1, None),
    "int8": (1, "I8"),
    "uint8": (1, "U8"),
    "int16": (2, "I16"),
    "uint16": (2, "U16"),
    "int32": (4, "I32"),
    "uint32": (4, "U32"),
    "int64": (8, "I64"),
    "uint64": (8, "U64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "bfloat16": (2, "BF16"),
    "float16": (2, "F16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "complex64": (8, None),
    "complex128": (16, None),
}
_FIRST_LINE = re.compile(
    rb'\{"format": "kdist\.checkpoint", "version": ([0-9]+), "crc32": "([0-9a-f]{8})",\n'
)


@dataclass(frozen=True)
class Piece:
    """A part of a tensor in one file."""

    file: int  # position in `Index.files`
    first: int  # its first element in the flat tensor
    last: int  # one past its last element
    offset: int  # bytes from the start of the file
    crc32: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint."""

    name: str  # such as `model/0/dense/kernel`
    dtype: str  # Keras's name
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()  # in the order of the elements
    # The axis whose index varies slowest in the stored elements. A worker can then write its part of the axis as one
    # piece. The other axes follow in their order.
    axis: int = 0

    @property
    def size(self) -> Size:
        """The number of elements and the bytes per element."""
        return Size(math.prod(self.shape), DTYPES[self.dtype][0])

    @property
    def num_bytes(self) -> int:
        return self.size.elements * self.size.itemsize

    def elements_of(self, start: int, stop: int) -> tuple[int, int]:
        row = self.size.elements // self.shape[self.axis]
        return start * row, stop * row

    def num_bytes_of(self, piece: Piece) -> int:
        return (piece.last - piece.first) * self.size.itemsize


@dataclass(frozen=True)
class File:
    """The file of one shard."""

    name: str
    num_bytes: int
    header_bytes: int  # the part of `num_bytes` before the tensors
    header_crc32: int


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint."""

    saved_at: float  # Seconds since 1970. Larger than in all earlier checkpoints of the directory.
    id: str  # Shared by all directories that one save has written.
    number: int | None  # The number in the name, or `None`.
    saved_by: Mapping[str, Any]  # worker count, backend, versions
    workers: Sequence[int]  # indices of the workers that wrote to this directory
    # The kind and the aliases of each object, and the positions of the weights that an optimizer trains.
    parts: Mapping[str, Mapping[str, Any]]
    tensors: Sequence[Tensor]
    files: Sequence[File]
    values: Mapping[str, object] = field(default_factory=dict)  # plain values by name
    # For each object with `get_state`: one state per worker in `workers`, or a single state if all are equal.
    states: Mapping[str, Sequence[object]] = field(default_factory=dict)
    # The Keras configuration of each model, or `None` if it cannot be converted to JSON.
    configs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def dump(index: Index, version: int | None = None) -> bytes:
    """Returns the bytes of `index.json`, which older versions of kdist can read if possible."""
    if version is None:
        version = VERSION if any(tensor.axis for tensor in index.tensors) else 1
    fields = {
        **vars(index),
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "pieces": [[p.file, p.first, p.last, p.offset, f"{p.crc32:08x}"] for p in tensor.pieces],
                **({"axis": tensor.axis} if tensor.axis else {}),
            }
            for tensor in index.tensors
        ],
        "files": [{**vars(file), "header_crc32": f"{file.header_crc32:08x}"} for file in index.files],
    }
    lines = []
    for name, value in fields.items():
        if name in ("tensors", "files") and value:
            listed = ",\n".join(json.dumps(item) for item in value)
            lines.append(f"{json.dumps(name)}: [\n{listed}\n]")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    body = (",\n".join(lines) + "}\n").encode()
    head = f'{{"format": "{FORMAT}", "version": {version}, "crc32": "{checksum_of(version, body):08x}",\n'
    return head.encode() + body


def checksum_of(version: int, body: bytes) -> int:
    """Returns the checksum of the version and of everything after the first line."""
    return crc32(body, version)


def parse(data: bytes, path: str) -> Index:
    """Parses the bytes of an index. Error messages contain `path`.

    Raises:
        CheckpointCorruptError: If the bytes are invalid or have changed since the save.
        CheckpointError: If the index has another format version.
    """
    match = _FIRST_LINE.match(data)
    if match is None:
        raise CheckpointCorruptError(
            "The checkpoint is corrupt: its index does not begin with format, version and checksum.",
            received={"file": path, "begins": data[:60]},
        )
    version = int(match[1])
    body = data[match.end() :]
    if checksum_of(version, body) != int(match[2], 16):
        raise CheckpointCorruptError(
            "The checkpoint is corrupt: the checksum of its index does not match.",
            received={"file": path, "bytes": len(data)},
        )
    if not 1 <= version <= VERSION:
        raise CheckpointError(
            f"Cannot read the checkpoint: this version of kdist only reads format versions up to {VERSION}.",
            received={"file": path, "version": version},
            hint="Use a newer version of kdist. In your checkout of kdist, run: git pull && pip install .",
        )
    with malformed_as(
        lambda error: CheckpointCorruptError(
            "The checkpoint is corrupt: fields of its index are missing or invalid.",
            received={"file": path, "error": error},
        )
    ):
        return _from_json(json.loads(data))


def _from_json(fields: dict[str, Any]) -> Index:
    """Creates an index from JSON. The file may come from an untrusted source, so this checks every field."""
    for name in ("format", "version", "crc32"):
        del fields[name]
    files = [File(**{**f, "header_crc32": int(f["header_crc32"], 16)}) for f in _list(fields.pop("files"))]
    for file in files:
        _need(layout.is_shard(file.name), "name of a file")
        _need(_is_count(file.num_bytes) and _is_count(file.header_bytes), f"bytes of {file.name}")
        _need(file.header_bytes <= file.num_bytes, f"header of {file.name}")
    tensors = [_tensor(item, files) for item in _list(fields.pop("tensors"))]
    _need(len({tensor.name for tensor in tensors}) == len(tensors), "names of tensors")
    places = sorted((p.file, p.offset, p.offset + t.num_bytes_of(p)) for t in tensors for p in t.pieces)
    for (file_before, _, end), (file_after, begin, _) in itertools.pairwise(places):
        _need(file_before != file_after or end <= begin, "pieces: two of them overlap")
    index = Index(tensors=tensors, files=files, **fields)
    _check_facts(index)
    return index


def _check_facts(index: Index) -> None:
    saved_at = index.saved_at
    _need(type(saved_at) in (int, float) and 0 <= saved_at < _LAST_SECOND, "saved_at")
    _need(isinstance(index.id, str) and (index.number is None or _is_count(index.number)), "id or number")
    _need(all(_is_count(worker) for worker in _list(index.workers)), "workers")
    for name in ("saved_by", "parts", "values", "states", "configs"):
        _need(isinstance(getattr(index, name), dict), name)
    for name, part in index.parts.items():
        _need(all(isinstance(text, str) for text in (part["kind"], *_list(part["aliases"]))), f"part {name}")
        _need(all(map(_is_count, _list(part.get("trained", [])))), f"part {name}")
    _need(all(_list(states) for states in index.states.values()), "states")


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"invalid {what}")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a list was expected, not {type(value).__name__}")
    return value


def _tensor(item: dict[str, Any], files: Sequence[File]) -> Tensor:
    pieces = tuple(
        Piece(file, first, last, offset, int(crc32, 16))
        for file, first, last, offset, crc32 in _list(item["pieces"])
    )
    axis = item.get("axis", 0)
    tensor = Tensor(item["name"], item["dtype"], tuple(_list(item["shape"])), pieces, axis)
    _need(isinstance(tensor.name, str), "name of a tensor")
    _need(all(_is_count(length) for length in tensor.shape), f"shape of {tensor.name}")
    _need(_is_count(axis) and axis < max(1, len(tensor.shape)), f"axis of {tensor.name}")
    end = 0
    for piece in pieces:
        _need(
            all(map(_is_count, (piece.file, piece.first, piece.last, piece.offset)))
            and piece.first == end < piece.last
            and piece.file < len(files)
            and files[piece.file].header_bytes <= piece.offset
            and piece.offset + tensor.num_bytes_of(piece) <= files[piece.file].num_bytes,
            f"pieces of {tensor.name}",
        )
        end = piece.last
    _need(end == tensor.size.elements, f"elements of {tensor.name}")
    return tensor
