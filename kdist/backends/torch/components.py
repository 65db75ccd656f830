"""The components of on-read variables: one for each local replica, from one `run` to the next."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kdist.backends.variables import share_of


@dataclass
class _Known:
    variable: weakref.ref[Any]
    parts: list[torch.Tensor]
    real: torch.Tensor
    version: int

    def is_valid(self, variable: Any) -> bool:
        real = variable._value
        return self.variable() is variable and self.real is real and self.version == real._version


class Components:
    """What the local replicas have of the variables that are aggregated when they are read.

    The real variable shows what the components aggregate to. If it was written since (`assign`, `fit`,
    `load_weights`), each replica starts with its share of that.

    Args:
        devices: Of the local replicas.
        replica_ids: Of the local replicas, over all workers.
        num_replicas: Number of replicas over all workers.
    """

    def __init__(
        self, devices: Sequence[torch.device], replica_ids: Sequence[int], num_replicas: int
    ) -> None:
        self._devices = devices
        self._replica_ids = replica_ids
        self._num_replicas = num_replicas
        self._known: dict[int, _Known] = {}
        self._changed: set[int] = set()

    def get(self, variable: Any, index: int) -> torch.Tensor:
        """Returns the component of a local replica."""
        known = self._known.get(id(variable))
        if known is None or not known.is_valid(variable):
            known = self._known[id(variable)] = self._split(variable)
        return known.parts[index]

    def write(self, variable: Any, index: int, value: Any) -> None:
        """Changes the component of a local replica."""
        self._changed.add(id(variable))
        self.get(variable, index).copy_(value)

    def show(self, variable: Any, total: Any) -> None:
        """Puts into the real variable what the components aggregate to."""
        known = self._known[id(variable)]
        known.real.detach().copy_(total)
        known.version = known.real._version
        self._changed.discard(id(variable))

    def forget_changed(self) -> None:
        """After an exception: forgets the components that were written and never aggregated."""
        for key in self._changed:
            self._known.pop(key, None)
        self._changed.clear()

    def _split(self, variable: Any) -> _Known:
        real = variable._value
        key = id(variable)
        ref = weakref.ref(variable, functools.partial(_forget, self._known, key))
        with torch.no_grad():
            parts = [
                share_of(variable, real.detach(), replica_id, self._num_replicas).to(device, copy=True)
                for replica_id, device in zip(self._replica_ids, self._devices, strict=True)
            ]
        return _Known(ref, parts, real, real._version)


def _forget(known: dict[int, _Known], key: int, ref: Any) -> None:
    if key in known and known[key].variable is ref:
        del known[key]
