"""What a save writes: which tensors there are, and a copy of this worker's share of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kdist.checkpoint import plain, state
from kdist.checkpoint.index import DTYPES, Tensor
from kdist.checkpoint.shards import cut
from kdist.checkpoint.writing import Share
from kdist.errors import CheckpointError
from kdist.version import __version__

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime
    from kdist.checkpoint.folders import Folder
    from kdist.context import StrategyLike


@dataclass
class Contents:
    """What is to be saved."""

    parts: list[state.Part]
    sources: list[Any]  # for each tensor, the variable or array that it comes from
    tensors: list[Tensor]  # without their pieces
    values: dict[str, Any]  # plain ones, as JSON
    states: dict[str, Any]  # of this worker's objects, as JSON

    def facts(self) -> Any:
        """What must be equal on all workers."""
        return [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in self.tensors]


def scope_of(strategy: StrategyLike | None) -> contextlib.AbstractContextManager[Any]:
    """The scope in which variables are created and assigned."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def describe(objects: Mapping[str, Any], strategy: StrategyLike | None, random: bool) -> Contents:
    """Finds out what objects hold, without copying it."""
    with scope_of(strategy):
        parts = state.collect(objects)
    named: dict[str, Any] = {}
    values, states = {}, {}
    for part in parts:
        named.update(part.variables)
        if part.kind == "value":
            values[part.name] = plain.encode(part.name, part.owner, named.__setitem__)
        elif part.kind == "state":
            states[part.name] = plain.encode(part.name, part.owner.get_state())
    if random:
        states["random"] = plain.encode("random", state.random_state())
    tensors = [
        Tensor(name, _dtype(name, source), tuple(int(length) for length in source.shape))
        for name, source in named.items()
    ]
    return Contents(parts, list(named.values()), tensors, values, states)


def _dtype(name: str, source: Any) -> str:
    dtype = state.dtype_name(source)
    if dtype not in DTYPES:
        raise CheckpointError(
            "A variable must have a dtype that checkpoints know.", received={"name": name, "dtype": dtype}
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
    """Returns this worker's share, whose bytes are still those of the variables."""
    sources = contents.sources
    spans = cut([tensor.size for tensor in contents.tensors], folder.rank, len(folder.members))

    def read() -> Iterator[Any]:
        for span in spans:
            array = np.ascontiguousarray(state.to_host(sources[span.tensor])).reshape(-1)
            yield array[span.first : span.last].view(np.uint8)

    facts = {
        "id": save_id,
        "number": number,
        "saved_by": {
            "num_workers": runtime.num_workers if runtime is not None else 1,
            "backend": keras.backend.backend(),
            "keras": keras.__version__,
            "kdist": __version__,
        },
        "parts": {part.name: {"kind": part.kind, "aliases": list(part.aliases)} for part in contents.parts},
        "values": {**contents.values, "save_counter": counter},
        "configs": {p.name: state.config_of(p.owner) for p in contents.parts if p.kind == "model"}
        if folder.rank == 0
        else {},
    }
    return Share(contents.tensors, spans, read, facts, contents.states)


def copy(share: Share) -> None:
    """Copies a share into memory of its own: the next step changes the variables, or takes their memory (JAX)."""
    offsets = share.offsets()
    buffer = np.empty(offsets[-1], np.uint8)
    parts = [buffer[begin:end] for begin, end in itertools.pairwise(offsets)]
    for part, value in zip(parts, share.read(), strict=True):
        part[:] = value
    share.read = lambda: parts
