"""Collects the tensors to save, and copies this worker's share of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kdist.backends.contract import Runtime
from kdist.checkpoint import plain, sharded, state
from kdist.checkpoint.folders import Folder
from kdist.checkpoint.index import DTYPES, Tensor
from kdist.checkpoint.shards import Span, cut, number_of_shards
from kdist.checkpoint.writing import Share
from kdist.context import StrategyLike
from kdist.errors import CheckpointError, InvalidArgumentError
from kdist.version import __version__


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
    """Returns this worker's share. It refers to the variables, and only copies gathered variables."""
    num_shards = number_of_shards(sum(tensor.num_bytes for tensor in contents.tensors), len(folder.members))
    tensors = contents.tensors
    spans: list[Span] = []
    known: dict[Span, Callable[[], np.ndarray]] = {}
    if runtime is not None and runtime.divides_over_workers:
        tensors, spans, known = sharded.divide(
            contents.sources, tensors, folder.rank, len(folder.members), num_shards, runtime
        )
    elif folder.rank < num_shards:
        spans = cut([tensor.size for tensor in tensors], folder.rank, num_shards)
    check = (lambda: None) if runtime is None else runtime.group.check_intact
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
    read = functools.partial(_read, contents.sources, spans, known, check)
    return Share(tensors, spans, num_shards, read, facts, contents.states)


def _read(
    sources: Sequence[keras.Variable | np.ndarray],
    spans: Sequence[Span],
    known: Mapping[Span, Callable[[], np.ndarray]],
    check: Callable[[], None],
) -> Iterator[np.ndarray]:
    for span in spans:
        yield known[span]() if span in known else state.bytes_of(sources[span.tensor], span)
    check()


def copy(share: Share) -> None:
    """Copies a share, because the next step changes the variables or, on JAX, takes over their memory."""
    offsets = share.offsets()
    buffer = np.empty(offsets[-1], np.uint8)
    parts = [buffer[begin:end] for begin, end in itertools.pairwise(offsets)]
    for part, value in zip(parts, share.read(), strict=True):
        part[:] = value
    share.read = lambda: parts
