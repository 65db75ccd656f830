"""The state of one parameter server: parts of variables, and the optimizers that update them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from kdist import keras_hooks
from kdist.arrays.memory import unchanging
from kdist.arrays.rows import to_host
from kdist.arrays.structures import merged
from kdist.backends.coordination import Engine
from kdist.coordinator import shipping
from kdist.coordinator.rpc import Message

_OK: Message = ({}, ())


@dataclasses.dataclass
class Part:
    """A part of a variable."""

    variable: keras.Variable  # with the path of the whole variable
    version: int  # the server's clock, a counter of writes, at the last write of the part


class ParameterStore:
    """The state of one server in one session. All methods are thread-safe.

    Each update names the closure that computed it, and is applied once. If a worker is lost and another one
    repeats its closure, the server ignores updates that it has already applied.
    """

    METHODS = ("hold", "drop", "assign", "optimize", "pull", "pull_rows", "commit")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parts: dict[str, Part] = {}
        self._optimizers: dict[str, keras.optimizers.Optimizer] = {}
        # Updates that were applied, of closures that can still be repeated.
        self._made: set[tuple[int, int]] = set()
        # Closures below this index are done. Their updates can still arrive late from a worker that was taken as lost.
        self._oldest = 0
        self._clock = 0
        self._lock = threading.Lock()

    def hold(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        with self._lock:
            for one, array in zip(header["parts"], arrays, strict=True):
                self._clock += 1
                variable = keras_hooks.variable_like(array, one["path"], one["trainable"])
                self._parts[one["key"]] = Part(variable, self._clock)
        return _OK

    def drop(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        """Removes parts, and optimizers without remaining variables."""
        with self._lock:
            for key in header["keys"]:
                self._parts.pop(key, None)
            left = {id(part.variable) for part in self._parts.values()}
            self._optimizers = {
                number: optimizer
                for number, optimizer in self._optimizers.items()
                if any(id(variable) in left for variable in optimizer.variables)
            }
        return _OK

    def assign(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        """Sets the values of parts."""
        with self._lock:
            self._clock += 1
            for key, array in zip(header["keys"], arrays, strict=True):
                self._write(key, array)
        return _OK

    def pull(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        """Returns the values of the parts whose version differs from the version of the caller."""
        with self._lock:
            parts = [self._parts[key] for key in header["keys"]]
            # The arrays must not change while they are being sent.
            found = [
                unchanging(to_host(part.variable.value))
                for part, version in zip(parts, header["versions"], strict=True)
                if part.version != version
            ]
            return {"versions": [part.version for part in parts]}, found

    def pull_rows(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        with self._lock:
            found = [
                to_host(self._parts[key].variable.value)[rows]
                for key, rows in zip(header["keys"], arrays, strict=True)
            ]
            return {}, found

    def optimize(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        """Adds an optimizer, which updates the parts on this server.

        The optimizer's own variables get the values that are already on this server.
        """
        with self._lock:
            optimizer, constraints = shipping.loads(arrays[0], None)
            trained = [self._parts[key].variable for key in header["trained"]]
            for key, variable in zip(header["trained"], trained, strict=True):
                variable.constraint = constraints.get(key)
            undecayed = [self._parts[key].variable for key in header["undecayed"]]
            keras_hooks.build_optimizer(optimizer, trained, undecayed)
            # Matched by name. Parts of a variable have the same name, and the same order in both lists.
            names: dict[str, list[str]] = {}
            for name, key in header["own"]:
                names.setdefault(name, []).append(key)
            for variable in optimizer.variables:
                part = self._parts[names[variable.name].pop(0)]
                variable.assign(part.variable)
                part.variable = variable
            self._optimizers[header["optimizer"]] = optimizer
        return _OK

    def commit(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        """Applies the updates of a closure once: gradients for optimizers, differences, and values.

        A value with a base is also a difference. However, it is exact if no other worker has changed the base.
        """
        closure = tuple(header["closure"])
        found = iter(arrays)
        with self._lock:
            if closure[0] < self._oldest or closure in self._made:
                return {"again": True}, ()
            gradients = [
                (one, [self._gradient(key, kind, found) for key, kind in one["keys"]])
                for one in header["gradients"]
            ]
            self._clock += 1
            for one, values in gradients:
                self._apply(one["optimizer"], [key for key, _ in one["keys"]], values)
            for key in header["differences"]:
                self._write(key, to_host(self._parts[key].variable.value) + next(found))
            bases = {key: next(found) for key in header["bases"]}
            for key in header["values"]:
                new = next(found)
                if (base := bases.get(key)) is not None:
                    now = to_host(self._parts[key].variable.value)
                    new = merged(np.where, now, base, new)
                self._write(key, new)
            self._made.add(closure)
            self._oldest = max(self._oldest, header["oldest"])
            self._made = {one for one in self._made if one[0] >= self._oldest}
            return {"again": False}, ()

    def _gradient(self, key: str, kind: str, found: Iterator[np.ndarray]) -> np.ndarray:
        if kind == "dense":
            return next(found)
        rows, values = next(found), next(found)
        gradient = np.zeros(tuple(self._parts[key].variable.shape), values.dtype)
        gradient[rows] = values  # row numbers are not repeated
        return gradient

    def _apply(self, name: str, keys: list[str], gradients: list[np.ndarray]) -> None:
        optimizer = self._optimizers[name]
        if keys:
            self._engine.apply(optimizer, gradients, [self._parts[key].variable for key in keys])
        else:  # no gradient is for a part on this server, but the step counters of all servers must agree
            keras_hooks.count_step(optimizer, self._engine.resets_all)
        overwritten = optimizer._trainable_variables if optimizer.ema_overwrite_frequency else []
        touched = {id(variable) for variable in [*optimizer.variables, *overwritten]}
        for key, part in self._parts.items():
            if key in keys or id(part.variable) in touched:
                part.version = self._clock

    def _write(self, key: str, array: np.ndarray) -> None:
        part = self._parts[key]
        part.variable.assign(array)
        part.version = self._clock
