"""`OwnCoordination`: workers and servers of kdist's own, for engines that have none."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kdist import keras_hooks
from kdist.backends.coordination import (
    Coordination,
    Engine,
    PerWorkerValues,
    RemoteValue,
    after_lost_server,
    join_threads,
)
from kdist.backends.waiting import Waiting
from kdist.cluster.roles import ServerCluster
from kdist.cluster.secret import job_secret
from kdist.coordinator import shipping
from kdist.coordinator.closures import Closure, Closures
from kdist.coordinator.group import Group
from kdist.coordinator.optimizers import Optimizers
from kdist.coordinator.placement import place
from kdist.coordinator.recent import Recent
from kdist.coordinator.rpc import Peer, PeerLost
from kdist.coordinator.served import Home, Record, Served
from kdist.data.distributed_dataset import DistributedDataset
from kdist.errors import WorkerLostError, WorkerTimeoutError
from kdist.strategies.default import get_strategy

_LOOK = 1.0  # seconds between two looks at who is missing
_GLANCE = 0.05  # seconds in which a task that is there says so
_PATIENCE = 0.2  # seconds after which an idle thread looks around


class OwnValues(PerWorkerValues):
    """A value for each worker, which is there and not here."""

    def __init__(self, coordination: OwnCoordination, number: int) -> None:
        self._coordination = coordination
        self.number = number

    def __iter__(self) -> OwnValues:
        return self._coordination.own_values(_Iterated(self))

    def peek(self) -> Any:
        """Asks some worker."""
        return self._coordination.schedule(next, (iter(self),), {}).fetch()


class _Iterated:
    """Makes the iterator of a worker's own dataset, there."""

    def __init__(self, values: OwnValues) -> None:
        self._values = values

    def __call__(self) -> Any:
        return iter(self._values)


class _Dataset:
    """Makes a worker's dataset, there: one that gives tensors of the backend, as distributed datasets do."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self) -> Any:
        made = self._dataset() if callable(self._dataset) else self._dataset
        if isinstance(made, DistributedDataset):
            return made
        return get_strategy().distribute_datasets_from_function(lambda context: made)


class OwnCoordination(Coordination):
    """Drives each worker from a thread.

    Args:
        strategy: The coordinator's strategy.
        engine: What the backend adds.
        closures: What is to be run.
        cluster: The workers and the servers.
        partitioner: Divides variables among the servers.
        synchronous: Whether all workers share each batch.
        timeout: Seconds in which all of them must have come.
    """

    def __init__(
        self,
        strategy: Any,
        engine: Engine,
        closures: Closures,
        cluster: ServerCluster,
        partitioner: Callable[..., Any] | None,
        synchronous: bool,
        timeout: float,
    ) -> None:
        self.num_workers, self.num_servers = len(cluster.workers), len(cluster.servers)
        self._strategy = strategy
        self._partitioner = partitioner
        self._synchronous = synchronous
        self._session = uuid.uuid4().hex
        secret = job_secret([*cluster.workers, *cluster.servers])
        self._cluster = cluster
        peers = [
            Peer(*task, secret, after_lost_server)
            for task in zip(cluster.server_names, cluster.servers, strict=True)
        ]
        self._workers = [
            Peer(*task, secret) for task in zip(cluster.worker_names, cluster.workers, strict=True)
        ]
        _require([*peers, *self._workers], timeout)
        self.served = Served(engine, peers, self._session, tells=True)
        for peer in peers:
            peer.call("begin", {"session": self._session, "floatx": keras.config.floatx()})
        self._watches = [peer.watch(functools.partial(self._lost_server, peer)) for peer in peers]
        self.closures = closures
        self.optimizers = Optimizers(strategy, self.served, self.give)
        self._num_parts = 0
        # By identity, which is the function's as long as it is kept.
        self._pickled = Recent()
        self._own: list[tuple[int, bytes]] = []
        self._lock = threading.RLock()
        # Another one: who pickles, which is a thread of its own, finds variables that are to be given.
        self._giving = threading.Lock()
        self.group = Group(self._workers, self._session)
        self._threads = (
            []
            if synchronous
            else [
                threading.Thread(target=self._drive, args=(i,), name=f"kdist {peer.name}", daemon=True)
                for i, peer in enumerate(self._workers)
            ]
        )
        if synchronous:
            for i, peer in enumerate(self._workers):
                _Worker(peer, i).begin(self._session, cluster.servers, keras.config.floatx(), synchronous)
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Nothing is to be entered: variables go to the servers when the scope is left."""
        yield

    def give(self, variables: Sequence[Any]) -> None:
        """Gives variables to the servers, if they are not there and are to be: seeds are each worker's own."""
        with self._giving:
            for variable in variables:
                if keras_hooks.record_of(variable) is None and not self._stays(variable):
                    shape = tuple(variable.shape)
                    dtype = keras.backend.standardize_dtype(variable.dtype)
                    divided = None if variable.constraint is not None else self._partitioner
                    placement = place(shape, dtype, divided, self.num_servers, self._num_parts)
                    self._num_parts += placement.num_shards
                    home = Home(self.served.new_number(), placement)
                    record = Record(self.served, variable, home, keras_hooks.native_value(variable))
                    self.served.add(record)
                    self.served.hold(record, home)

    def _stays(self, variable: Any) -> bool:
        # In the synchronous mode the random numbers are those of all workers, too.
        return not self._synchronous and keras_hooks.stays_local(variable)

    def dumps(self, value: Any) -> bytes:
        """Pickles a value for the workers."""
        return shipping.dumps(value, self._strategy, self._reduce)

    def in_closure(self) -> bool:
        """Closures run on workers, where the strategy is another one."""
        return False

    def run(self, strategy: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        """Never called: see `in_closure`."""
        raise NotImplementedError

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        done: Callable[[Any], None] | None = None,
    ) -> RemoteValue:
        """Adds a call to those that wait for a worker."""
        self.served.drop_gone()
        self.served.tell_values(self.served.changed())
        return self.closures.add(fn, args, kwargs, done)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerValues:
        """Calls the function on each worker, or sends each a copy of the dataset."""
        return self.own_values(_Dataset(dataset_fn))

    def own_values(self, function: Callable[[], Any]) -> OwnValues:
        """Makes a value on each worker, before it runs another closure, and again where one is replaced."""
        with self._lock:
            number = len(self._own)
            self._own.append((number, shipping.dumps(function, self._strategy, self._reduce)))
            return OwnValues(self, number)

    def close(self) -> None:
        """Ends the threads and the connections."""
        self.closures.close()
        for stop in self._watches:
            stop()
        for peer in [*self.served.servers, *self._workers]:
            peer.close()  # who waits for an answer has none now
        join_threads(self._threads)

    def _lost_server(self, server: Peer) -> None:
        self.closures.fail(WorkerLostError(str(server.lost())))

    def function(self, fn: Callable[..., Any]) -> tuple[str, bytes]:
        """Returns a function's name among the workers, and its pickle. It is pickled once, as it is then."""
        with self._lock:
            if (known := self._pickled.get(id(fn))) is None:
                data = shipping.dumps(fn, self._strategy, self._reduce)
                known = fn, hashlib.sha256(data).hexdigest(), data
                self._pickled.put(id(fn), known)
            return known[1:]

    def _reduce(self, obj: Any) -> Any:
        if isinstance(obj, keras.Variable):
            self.give([obj])
            return shipping.reduced_variable(obj)
        if isinstance(obj, OwnValues):
            return shipping.own_value_here, (obj.number,)
        if isinstance(obj, RemoteValue):
            return _itself, (obj.fetch(),)
        if isinstance(obj, keras.optimizers.Optimizer) and not self._synchronous:
            return self.optimizers.reduced(obj)
        return NotImplemented

    def _build(self, number: int, variables: Sequence[int]) -> None:
        """Lets an optimizer make its variables, which a closure has asked for."""
        with self._lock, self._strategy.scope():
            trained = [self.served.records[variable].variable() for variable in variables]
            self.optimizers.build(number, trained)
            self._pickled.clear()  # functions know it without variables

    def _drive(self, index: int) -> None:
        """Runs closures on one worker, as long as the job lasts."""
        worker = _Worker(self._workers[index], index)
        closure: Closure | None = None
        while not self.closures.is_closed:
            try:
                if not worker.is_ready:
                    if not worker.peer.is_there(_PATIENCE):
                        continue
                    worker.begin(self._session, self._cluster.servers, keras.config.floatx())
                if (closure := self.closures.take(_PATIENCE)) is None:
                    continue
                self._run(worker, closure)
            except PeerLost:
                worker.forget()
                if closure is not None:
                    self.closures.again(closure)
            except BaseException as error:
                if closure is None:
                    self.closures.fail(error)
                else:
                    self.closures.end(closure, error=error)
            closure = None

    def _run(self, worker: _Worker, closure: Closure) -> None:
        name, data = self.function(closure.fn)
        worker.bring(self._own, name, data)
        arguments = shipping.dumps((tuple(closure.args), dict(closure.kwargs)), self._strategy, self._reduce)
        header = {"closure": closure.index, "oldest": self.closures.oldest(), "function": name}
        answer, arrays = worker.call("run", header, arguments)
        self.served.generation += 1
        if "build" in answer:
            self._build(*answer["build"])
            self.closures.again(closure)
        elif "lost" in answer:
            self.closures.again(closure)
            self.closures.fail(WorkerLostError(answer["lost"], hint=after_lost_server()))
        elif "raised" in answer:
            raise shipping.load_error(arrays[0].tobytes(), worker.peer.name)
        else:
            self.closures.end(closure, shipping.loads(arrays[0].tobytes(), self))


class _Worker:
    """What a worker has been sent."""

    def __init__(self, peer: Peer, index: int) -> None:
        self.peer = peer
        self.index = index
        self.is_ready = False
        self._session = ""
        self._functions = Recent()
        self._num_own = 0

    def begin(self, session: str, servers: Sequence[str], floatx: str, synchronous: bool = False) -> None:
        """Lets the worker take part, which may be another process than before."""
        self._session, self._functions, self._num_own = session, Recent(), 0
        self.peer.call(
            "begin",
            {"session": session, "index": self.index, "servers": list(servers), "floatx": floatx}
            | {"synchronous": synchronous},
        )
        self.is_ready = True

    def forget(self) -> None:
        """Notes that it is gone."""
        self.is_ready = False

    def bring(self, own: Sequence[tuple[int, bytes]], name: str, data: bytes) -> None:
        """Sends what it lacks of a function, and of what each worker has of its own."""
        for number, made in own[self._num_own :]:
            answer, arrays = self.call("own", {"number": number}, made)
            if "raised" in answer:
                raise shipping.load_error(arrays[0].tobytes(), self.peer.name)
            self._num_own += 1
        if not self._functions.get(name):
            self.call("ship", {"function": name}, data)
            self._functions.put(name, True)

    def call(
        self, method: str, header: Mapping[str, Any], data: bytes
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Calls a method with one pickle."""
        return self.peer.call(
            method, {"session": self._session} | dict(header), [np.frombuffer(data, np.uint8)]
        )


def _itself(value: Any) -> Any:
    return value


def _require(peers: Sequence[Peer], timeout: float) -> None:
    """Waits until all tasks are there."""
    deadline = time.monotonic() + timeout
    waiting = Waiting([peer.name for peer in peers], timeout)
    missing = list(peers)
    # One is waited for, for a moment; then all are looked at.
    while missing and (left := deadline - time.monotonic()) > 0:
        missing[0].is_there(min(left, _LOOK))
        missing = [peer for peer in missing if not peer.is_there(_GLANCE)]
        waiting.note([peers.index(peer) for peer in missing])
    if missing:
        for peer in peers:
            peer.close()
        raise WorkerTimeoutError(
            f"These workers or servers did not join within {timeout:g} s: {', '.join(map(str, missing))}.",
            hint="Start the script for these tasks as well. There, it must call `kdist.Server(...).join()`.",
        )
