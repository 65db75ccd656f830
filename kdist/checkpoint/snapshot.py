"""Collects the tensors to save, and copies this worker's share of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kdist.checkpoint import plain, state
from kdist.checkpoint.index import DTYPES, Tensor
from kdist.checkpoint.shards import Span, cut, number_of_shards
from kdist.checkpoint.writing import Share
from kdist.errors import CheckpointError, InvalidArgumentError
from kdist.version import __version__

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime
    from kdist.checkpoint.folders import Folder
    from kdist.context import StrategyLike

# The size up to which sharded variables are gathered together. A larger variable is gathered by itself.
_GROUP_BYTES = 64 << 20


@dataclass
class Contents:
    """The contents of a checkpoint to save."""

    parts: list[state.Part]
    sources: list[keras.Variable | np.ndarray]  # the variable or array of each tensor
    tensors: list[Tensor]  # without pieces
    values: dict[str, object]  # plain values, as JSON
    states: dict[str, object]  # the states of this worker's objects, as JSON

    def facts(self) -> list[list[object]]:
        """Returns the properties that must be equal on all workers."""
        return [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in self.tensors]


def scope_of(strategy: StrategyLike | None) -> contextlib.AbstractContextManager[object]:
    """Returns the scope in which to create and assign variables."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def describe(objects: Mapping[str, object], strategy: StrategyLike | None, random: bool) -> Contents:
    """Returns the contents of objects, without copying variables."""
    with scope_of(strategy):
        parts = state.collect(objects)
    named: dict[str, Any] = {}

    def store(name: str, array: np.ndarray) -> None:
        if name in named:
            raise InvalidArgumentError(
                "Two arrays in the checkpoint have the same name.",
                received={"name": name},
                hint='Rename the keys of the dictionary, for example 1 and "1".',
            )
        named[name] = array

    values, states = {}, {}
    for part in parts:
        named.update(part.variables)
        if part.kind == "value":
            values[part.name] = plain.encode(part.name, part.owner, store)
        elif part.kind == "state":
            states[part.name] = plain.encode(part.name, part.owner.get_state())
    if random:
        states["random"] = plain.encode("random", state.random_state())
    tensors = [
        Tensor(name, _dtype(name, source), tuple(int(length) for length in source.shape))
        for name, source in named.items()
    ]
    return Contents(parts, list(named.values()), tensors, values, states)


def _dtype(name: str, source: keras.Variable | np.ndarray) -> str:
    dtype = state.dtype_name(source)
    if dtype not in DTYPES:
        raise CheckpointError(
            f"Cannot save variable {name!r}: checkpoints do not support its dtype.",
            received={"name": name, "dtype": dtype},
            hint="Create the variable with another dtype, such as float32.",
        )
    return dtype


def take(
    contents: Contents,
    folder: Folder,
    runtime: Runtime | None,
    save_id: str,
    number: int | None,
    counter: int,
) -> Share:
    """Returns this worker's share. It refers to the variables, and only copies sharded variables."""
    sizes = [tensor.size for tensor in contents.tensors]
    num_bytes = sum(size.elements * size.itemsize for size in sizes)
    num_shards = number_of_shards(num_bytes, len(folder.members))
    spans = cut(sizes, folder.rank, num_shards) if folder.rank < num_shards else []

    check = (lambda: None) if runtime is None else runtime.group.check_intact
    read: Callable[[], Iterable[np.ndarray]] = functools.partial(_read, contents.sources, spans, check)
    if runtime is not None and runtime.divides_over_workers:
        parts = _gather(contents, spans, runtime)
        read = functools.partial(iter, parts)

    facts = {
        "id": save_id,
        "number": number,
        "saved_by": {
            "num_workers": runtime.num_workers if runtime is not None else 1,
            "backend": keras.backend.backend(),
            "keras": keras.__version__,
            "kdist": __version__,
        },
        "parts": {
            part.name: {"kind": part.kind, "aliases": list(part.aliases), "trained": list(part.trained)}
            for part in contents.parts
        },
        "values": {**contents.values, "save_counter": counter},
        "configs": {p.name: state.config_of(p.owner) for p in contents.parts if p.kind == "model"}
        if folder.rank == 0
        else {},
    }
    return Share(contents.tensors, spans, num_shards, read, facts, contents.states)


def _read(
    sources: Sequence[keras.Variable | np.ndarray], spans: Sequence[Span], check: Callable[[], None]
) -> Iterator[np.ndarray]:
    for span in spans:
        yield _bytes_of(sources[span.tensor], span)
    check()


def _bytes_of(source: keras.Variable | np.ndarray, span: Span) -> np.ndarray:
    array = np.ascontiguousarray(state.to_host(source)).reshape(-1)
    return array[span.first : span.last].view(np.uint8)


def _gather(contents: Contents, spans: Sequence[Span], runtime: Runtime) -> list[np.ndarray]:
    """Gathers groups of sharded variables on all workers, and copies this worker's spans of each group."""
    variables = [source for source in contents.sources if isinstance(source, keras.Variable)]
    place = {id(source): number for number, source in enumerate(contents.sources)}
    found: dict[Span, np.ndarray] = {}
    for some in _in_groups(variables, contents.tensors, place):
        numbers = {place[id(variable)] for variable in some}
        with runtime.kept_whole(some):
            found |= {
                s: _bytes_of(contents.sources[s.tensor], s).copy() for s in spans if s.tensor in numbers
            }
    return [
        found[span] if span in found else _bytes_of(contents.sources[span.tensor], span) for span in spans
    ]


def _in_groups(
    variables: Sequence[keras.Variable], tensors: Sequence[Tensor], place: Mapping[int, int]
) -> Iterator[list[keras.Variable]]:
    some: list[keras.Variable] = []
    size = 0
    for variable in variables:
        of_this = tensors[place[id(variable)]].size
        if some and size + of_this.elements * of_this.itemsize > _GROUP_BYTES:
            yield some
            some, size = [], 0
        some.append(variable)
        size += of_this.elements * of_this.itemsize
    if some:
        yield some


def copy(share: Share) -> None:
    """Copies a share, because the next step changes the variables or, on JAX, takes over their memory."""
    offsets = share.offsets()
    buffer = np.empty(offsets[-1], np.uint8)
    parts = [buffer[begin:end] for begin, end in itertools.pairwise(offsets)]
    for part, value in zip(parts, share.read(), strict=True):
        part[:] = value
    share.read = lambda: parts
