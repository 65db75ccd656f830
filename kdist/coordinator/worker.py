"""Runs the closures that the coordinator sends to a worker, on variables of the servers."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from kdist import keras_hooks
from kdist.arrays.rows import to_host
from kdist.arrays.structures import is_sum
from kdist.backends import get_backend
from kdist.backends.coordination import Engine
from kdist.coordinator import shipping
from kdist.coordinator.closures import Recent
from kdist.coordinator.optimizers import NUMBER
from kdist.coordinator.rpc import Message, Peer, PeerLost
from kdist.coordinator.served import Home, Record, Served
from kdist.data.distributed_dataset import DistributedIterator
from kdist.errors import StrategyScopeError
from kdist.strategies.running import RunOptions
from kdist.strategies.strategy import Strategy
from kdist.topology import Topology
from kdist.values import Tensor


class NotBuilt(BaseException):
    """An optimizer is not built yet. The arguments are its number and the numbers of the variables that it trains.

    The coordinator builds it, and the closure runs again.
    """


class WorkerStrategy(Strategy):
    """The strategy inside closures, with one replica. Its gradients go to the servers."""

    def __init__(self, task: Task) -> None:
        backend = get_backend()
        super().__init__(backend.create_runtime(Topology(backend.list_devices()[:1])))
        self._task = task

    @property
    def tables(self) -> list[keras.Variable]:
        """The large variables, of which a program may need only the rows that it looks up."""
        records = self._task.served.records.values()
        return [
            record.variable() for record in records if record.variable() is not None and record.is_table()
        ]

    def run(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs a function on the newest values, and then sends its gradients and changes to the servers."""

        def taking(*args: object, **kwargs: object) -> tuple[object, list[dict[str, object]]]:
            taken: list[dict[str, object]] = []
            engine = self._task.served.engine
            with keras_hooks.taking_gradients(lambda *one: taken.append(_described(engine, *one))):
                return fn(*args, **kwargs), taken

        served = self._task.served
        self._task.commit(())
        served.generation += 1
        served.pull(list(served.touched.values()))
        served.in_replica = True
        try:
            result, gradients = super().run(taking, args, kwargs, options)
        finally:
            served.in_replica = False
        self._task.commit(gradients)
        return result


def _described(
    engine: Engine,
    optimizer: keras.optimizers.Optimizer,
    gradients: list[Tensor | None],
    variables: list[keras.Variable],
) -> dict[str, object]:
    """Returns an optimizer's gradients as a dictionary that a compiled function can return."""
    numbers = []
    for variable in variables:
        if (record := keras_hooks.record_of(variable)) is None:
            raise StrategyScopeError(
                "The optimizer trains a variable that was not created in the scope of the strategy.",
                received={"variable": variable.path},
                hint="Create the model inside `with strategy.scope():`.",
            )
        numbers.append(record.home.number)
    if not optimizer.built:
        raise NotBuilt(getattr(optimizer, NUMBER), numbers)
    present, rows, values = [], [], []
    for number, variable, gradient in zip(numbers, variables, gradients, strict=True):
        if gradient is not None:
            some = engine.by_rows(variable, gradient) or (None, gradient)
            present.append(number)
            rows.append(some[0])
            values.append(some[1])
    if not optimizer.gradient_accumulation_steps:
        # Missing rows are zeros, which do not change the norm.
        values = keras_hooks.clipped(optimizer, values)
    return {
        "optimizer": getattr(optimizer, NUMBER),
        "numbers": present,
        "gradients": values,
        "rows": rows,
    }


@dataclasses.dataclass(eq=False)
class SessionTask(ABC):
    """A worker in one session."""

    METHODS: ClassVar[tuple[str, ...]] = ()
    """The methods that the coordinator can call."""
    engine: Engine
    index: int
    address: str
    servers: Sequence[Peer]

    def __post_init__(self) -> None:
        self.strategy: Any = None
        self.served = Served(self.engine, self.servers, tells=False)
        self.own_values: dict[int, object] = {}
        self._variables: dict[int, keras.Variable] = {}

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def variable(self, number: int, spec: tuple[type, dict[str, Any], Home]) -> keras.Variable:
        """Returns the worker's variable with this number. Creates it on first use."""
        cls, state, home = spec
        if number not in self._variables:
            self._variables[number] = self._create(cls, state, home)
        variable = self._variables[number]
        if variable.trainable != state["_trainable"]:  # frozen since the last function that used it
            variable.trainable = state["_trainable"]
            if (record := keras_hooks.record_of(variable)) is not None:
                record.table = None  # depends on `trainable`
        return variable

    @abstractmethod
    def _create(self, cls: type, state: dict[str, Any], home: Home) -> keras.Variable:
        """Creates a variable whose value is on the servers."""


class Task(SessionTask):
    """A worker that runs closures."""

    METHODS = ("ship", "own", "run")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strategy = WorkerStrategy(self)
        # Functions, each with the variables of its last call.
        self._functions = Recent()
        self._closure = (0, 0)
        self._commits = itertools.count()
        self._running = threading.Lock()

    def _create(self, cls: type, state: dict[str, Any], home: Home) -> keras.Variable:
        variable = keras_hooks.new_variable(cls, state)
        self.served.add(Record(self.served, variable, home))
        return variable

    def ship(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        """Receives a function. Later closures refer to it by name."""
        self._functions.put(header["function"], [shipping.loads(arrays[0], self), {}])
        return {}, ()

    @shipping.answers_errors
    def own(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        """Creates a per-worker value: the result of a function, or the iterator of an earlier value. Drops old ones.

        If this fails, the closures that use the value fail, but other closures still run.
        """
        value: object
        for number in header["gone"]:
            self.own_values.pop(number, None)
        with self._running, self.strategy.scope():
            try:
                value = shipping.loads(arrays[0], self)()
            except PeerLost:
                raise
            except Exception as error:
                value = shipping.Failed(error)
        self.own_values[header["number"]] = value
        return {}, ()

    @shipping.answers_errors
    def run(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        """Runs a closure, and answers with its result, its error, or the reason to repeat it."""
        with self._running:
            self._closure, self._commits = (header["closure"], header["oldest"]), itertools.count()
            known = self._functions.get(header["function"])
            iterators = [one for one in self.own_values.values() if isinstance(one, DistributedIterator)]
            for iterator in iterators:
                iterator.kept = []
            try:
                with self.strategy.scope():
                    self.served.generation += 1
                    # The variables of the function's last call are requested together, with one call per server.
                    self.served.touched = dict(known[1])
                    for record in self.served.records.values():
                        if record.is_changed():  # by a closure that failed
                            record.forget()
                    args, kwargs = shipping.loads(arrays[0], self)
                    result = known[0](*args, **kwargs)
                    self.commit(())
                    known[1] = self.served.touched
                return shipping.answer_result(result, self.strategy)
            except NotBuilt as missing:
                for iterator in iterators:  # the repeated closure, or the next one here, needs these batches
                    iterator.repeat()
                return {"build": missing.args}, ()
            except PeerLost as lost:
                return {"lost": str(lost)}, ()

    def commit(self, gradients: Sequence[Mapping[str, Any]]) -> None:
        """Sends gradients and other changes of variables to the servers."""
        changed = [(record, record.value()) for record in self.served.changed()]
        if not changed and not gradients:
            return
        told: dict[str, list[tuple[Home, np.ndarray]]] = {"differences": [], "bases": [], "values": []}
        for record, new in changed:
            base, home, variable = record.pulled, record.home, record.variable()
            assert base is not None and variable is not None
            # Booleans cannot be subtracted. Differences of weights are usually small, so rounding does not matter.
            if new.dtype != bool and is_sum(base, new, 0.01 if variable.trainable else 0.0).all():
                told["differences"].append((home, new - base))
                continue
            if new.dtype != bool:
                told["bases"].append((home, base))
            told["values"].append((home, new))
        closure = [self._closure[0], next(self._commits)]
        headers: list[dict[str, Any]] = [
            {"closure": closure, "oldest": self._closure[1], "gradients": []} for _ in self.servers
        ]
        sent: list[list[np.ndarray]] = [[] for _ in self.servers]
        for one in gradients:
            for header in headers:
                header["gradients"].append({"optimizer": one["optimizer"], "keys": []})
            for number, gradient, rows in zip(one["numbers"], one["gradients"], one["rows"], strict=True):
                record, which = self.served.records[number], None if rows is None else to_host(rows)
                for server, key, arrays in self.served.gradient_parts(record, to_host(gradient), which):
                    headers[server]["gradients"][-1]["keys"].append(key)
                    sent[server] += arrays
        for name, found in told.items():
            for server, (keys, parts) in enumerate(self.served.by_server(found)):
                headers[server][name] = keys
                sent[server] += parts
        calls = [
            peer.begin("commit", header, arrays)
            for peer, header, arrays in zip(self.servers, headers, sent, strict=True)
            if arrays or header["gradients"]
        ]
        for wait in calls:
            wait()
        for record, _ in changed:  # the servers' values can contain changes by other workers
            record.forget()
        self.served.generation += 1
