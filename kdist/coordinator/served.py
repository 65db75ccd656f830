"""Variables on the servers: the copies in this task, and the changes that it has not sent yet."""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from kdist import keras_hooks
from kdist.arrays import rows
from kdist.arrays.memory import unchanging
from kdist.backends.coordination import Engine
from kdist.coordinator.placement import Placement, Rows
from kdist.coordinator.rpc import Peer


@dataclasses.dataclass(frozen=True)
class Home:
    """The location of a variable on the servers."""

    number: int  # of the variable in the job
    placement: Placement
    is_everywhere: bool = False  # every server has a copy, for example of the learning rate of an optimizer

    def keys_to_read(self) -> list[tuple[int, str]]:
        """Returns the server of each part and the key of the part there, for reads."""
        return [(server, f"{self.number}.{part}") for part, server in enumerate(self.placement.servers)]

    def keys_to_write(self, num_servers: int) -> list[tuple[int, int, str]]:
        """Returns the part, the server and the key of each copy of each part, for writes."""
        if self.is_everywhere:
            return [(0, server, f"{self.number}.0") for server in range(num_servers)]
        return [(part, server, key) for part, (server, key) in enumerate(self.keys_to_read())]


_SMALL = 1 << 14  # elements, up to which a variable is read as a whole, even if only a few rows are needed


class Record:
    """The state of one variable in this task. The variable reads and writes its native value here."""

    def __init__(self, served: Served, variable: keras.Variable, home: Home, held: Any = None) -> None:
        self.served = served
        self.home = home
        self.variable = weakref.ref(variable)
        self.dtype: str = variable.dtype
        self.held: Any = held
        self.generation = -1  # of the last request for the value
        self.versions: list[int] = [-1] * home.placement.num_shards
        self.parts: list[np.ndarray] = []
        self.pulled: np.ndarray | None = None
        self.mark: object = None
        self.table: object = None  # replaces the value in replicas that look up rows

    def is_table(self) -> bool:
        """Returns whether the variable is large enough to request single rows."""
        shape = self.home.placement.shape
        return len(shape) == 2 and math.prod(shape) > _SMALL and keras.backend.is_float_dtype(self.dtype)

    def read(self) -> object:
        """Returns the native value, or its substitute in a replica."""
        if self.served.in_replica and self.is_table():
            if self.table is None:
                self.table = self.served.engine.table(self)
            if self.table is not None:
                return self.table
        return self.whole()

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Returns the current values of some rows from the servers."""
        found, keys = self.home.placement.rows_by_shard(ids), self.home.keys_to_read()
        answers = []
        for one in found:
            server, key = keys[one.shard]
            answers.append(self.served.servers[server].begin("pull_rows", {"keys": [key]}, [one.rows]))
        parts = [wait()[1][0] for wait in answers]
        return self.home.placement.join_rows(found, parts, parts[0].dtype if parts else keras.config.floatx())

    def is_here(self) -> bool:
        """Returns whether the whole value is here and was requested in the current generation."""
        return self.generation == self.served.generation

    def whole(self) -> object:
        """Returns the native value of the current generation. Requests it from the servers if needed."""
        self.served.touched[self.home.number] = self
        if not self.is_here():
            self.served.pull([self])
        return self.held

    def write(self, value: object) -> None:
        """Sets the native value here. It is sent to the servers later."""
        self.held = value

    def is_changed(self) -> bool:
        """Returns whether the value here differs from the last known value of the servers."""
        if self.pulled is None or not self.served.engine.is_changed(self.held, self.mark):
            return False
        if not np.array_equal(self.value(), self.pulled):
            return True
        self.mark = self.served.engine.mark(self.held)  # avoids another comparison
        return False

    def value(self) -> np.ndarray:
        """Returns the value here as a NumPy array."""
        return rows.to_host(self.held)

    def forget(self) -> None:
        """Discards the value here, so that the next read requests it from the servers."""
        self.versions = [-1] * len(self.versions)
        self.pulled = None
        self.generation = -1

    def take(self, value: np.ndarray) -> None:
        """Stores a value received from the servers."""
        self.pulled = value
        self.held = self.served.engine.load(self.variable(), self.held, value)
        self.mark = self.served.engine.mark(self.held)


@dataclasses.dataclass(eq=False)
class Served:
    """The variables of one job, as seen by one task."""

    engine: Engine
    servers: Sequence[Peer]
    tells: bool  # `pull` sends changed values to the servers before it reads; true on the coordinator

    def __post_init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.generation = 0
        """A counter. If it increases, all values that were requested before may be stale."""
        self.touched: dict[int, Record] = {}
        self.before_pull: Callable[[], None] = lambda: None
        """Called before each `pull`. In the synchronous mode, it makes the workers write their variables."""
        self.in_replica = False
        """Whether a replica function runs, in which substitutes can replace large variables."""
        self._numbers = 0
        # Parts without a variable in this task, which the servers can drop.
        self._gone: list[tuple[int, int, str]] = []
        self._lock = threading.RLock()

    def add(self, record: Record) -> None:
        """Adds a variable. From then on, it reads and writes its value in its record."""
        variable = record.variable()
        self.records[record.home.number] = record
        weakref.finalize(variable, self._forget, record)
        keras_hooks.serve(variable, record)

    def _forget(self, record: Record) -> None:
        self.records.pop(record.home.number, None)
        self._gone += record.home.keys_to_write(len(self.servers))

    def drop_gone(self) -> None:
        """Drops variables on the servers that no longer exist here, because no function refers to them."""
        gone, self._gone = self._gone, []
        for number in sorted({server for _, server, _ in gone}):
            keys = [key for _, server, key in gone if server == number]
            self.servers[number].call("drop", {"keys": keys})

    def new_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def hold(self, record: Record, home: Home) -> None:
        """Stores a variable on the servers at a new location, with its value from here."""
        value, variable = unchanging(record.value()), record.variable()
        assert variable is not None
        parts = home.placement.cut(value)
        for part, server, key in home.keys_to_write(len(self.servers)):
            spec = {"key": key, "path": variable.path, "trainable": bool(variable.trainable)}
            self.servers[server].call("hold", {"parts": [spec]}, [parts[part]])
        with self._lock:
            if self.records.pop(record.home.number, record).home != home:
                self._gone += record.home.keys_to_write(len(self.servers))
            self.records[home.number] = record
            record.home, record.versions, record.parts = home, [-1] * home.placement.num_shards, []
            record.generation = self.generation
            record.pulled, record.mark = value, self.engine.mark(record.held)

    def value(self, home: Home) -> np.ndarray:
        parts = []
        for server, key in home.keys_to_read():
            _, found = self.servers[server].call("pull", {"keys": [key], "versions": [-1]})
            parts += found
        return home.placement.join(parts)

    def pull(self, records: Sequence[Record]) -> None:
        """Requests the values of variables from the servers, which send only changed parts."""
        self.before_pull()
        with self._lock:
            # Read first, because a closure that ends before the answers arrive makes them stale.
            generation = self.generation
            if self.tells:
                self.tell_values([record for record in records if record.is_changed()])
            wanted: dict[int, list[tuple[Record, int, str]]] = {}
            for record in records:
                for part, (server, key) in enumerate(record.home.keys_to_read()):
                    wanted.setdefault(server, []).append((record, part, key))
            answers = []
            for server, parts in wanted.items():
                request = {
                    "keys": [key for _, _, key in parts],
                    "versions": [r.versions[p] for r, p, _ in parts],
                }
                answers.append((parts, self.servers[server].begin("pull", request)))
            changed: dict[int, Record] = {}
            for parts, wait in answers:
                header, arrays = wait()
                found = iter(arrays)
                for (record, part, _), version in zip(parts, header["versions"], strict=True):
                    if version != record.versions[part]:
                        record.versions[part] = version
                        record.parts = record.parts or [None] * len(record.versions)  # type: ignore[list-item]
                        record.parts[part] = next(found)
                        changed[record.home.number] = record
            for record in changed.values():
                record.take(record.home.placement.join(record.parts))
                if len(record.parts) == 1:
                    record.parts = []
            for record in records:
                record.generation = generation

    def changed(self) -> Iterator[Record]:
        """Returns the variables whose values here differ from the last known values of the servers."""
        return (
            record
            for record in list(self.records.values())
            if record.variable() is not None and record.is_changed()
        )

    def tell_values(self, records: Iterable[Record]) -> None:
        """Sends the values of variables from this task to the servers."""
        values = {record: record.value() for record in records}
        self.assign([(record.home, value) for record, value in values.items()])
        for record, value in values.items():
            record.pulled = unchanging(value)
            record.mark = self.engine.mark(record.held)

    def assign(self, values: Iterable[tuple[Home, np.ndarray]], share: int = 0, num_shares: int = 1) -> None:
        """Sets values on the servers `share`, `share + num_shares` and so on."""
        calls = [
            self.servers[server].begin("assign", {"keys": keys}, arrays)
            for server, (keys, arrays) in enumerate(self.by_server(values))
            if keys and server % num_shares == share
        ]
        for wait in calls:
            wait()

    def by_server(
        self, values: Iterable[tuple[Home, np.ndarray]]
    ) -> list[tuple[list[str], list[np.ndarray]]]:
        """Splits arrays with the shapes of variables, and returns the keys and parts for each server."""
        found: list[tuple[list[str], list[np.ndarray]]] = [([], []) for _ in self.servers]
        for home, value in values:
            parts = home.placement.cut(value)
            for part, server, key in home.keys_to_write(len(self.servers)):
                found[server][0].append(key)
                found[server][1].append(parts[part])
        return found

    def gradient_parts(
        self, record: Record, values: np.ndarray, rows: np.ndarray | None
    ) -> Iterator[tuple[int, list[str], list[np.ndarray]]]:
        """Splits a gradient. Yields the server of each part, its key and kind, and its arrays.

        `rows` are the row numbers of the values, without repetitions; `None` for all rows. Negative numbers are
        ignored.
        """
        placement, keys = record.home.placement, record.home.keys_to_read()
        if rows is None:
            for (server, key), part in zip(keys, placement.cut(values), strict=True):
                yield server, [key, "dense"], [part]
            return
        values, rows = values[rows >= 0], rows[rows >= 0]
        found = {one.shard: one for one in placement.rows_by_shard(rows)}
        for shard, (server, key) in enumerate(keys):
            one = found.get(shard) or Rows(shard, *[np.zeros(0, np.int64)] * 2)
            yield server, [key, "rows"], [one.rows, values[one.positions]]
