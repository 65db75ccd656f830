"""`OwnCoordination`: kdist's own workers and servers, for backends without parameter servers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

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
from kdist.cluster.roles import ServerCluster
from kdist.cluster.secret import job_secret
from kdist.control.waiting import Waiting
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

if TYPE_CHECKING:
    from kdist.context import StrategyLike


_LOOK = 1.0  # seconds between two checks of all tasks
_GLANCE = 0.05  # seconds for a running task to answer
_PATIENCE = 0.2  # seconds between two checks of an idle thread


class OwnValues(PerWorkerValues):
    """One value per worker, stored on the worker."""

    def __init__(self, coordination: OwnCoordination, number: int) -> None:
        self._coordination = coordination
        self.number = number

    def __iter__(self) -> OwnValues:
        return self._coordination.own_values(_Iterated(self))

    def peek(self) -> object:
        """Returns the first element of one worker's dataset, as NumPy arrays."""
        return self._coordination.schedule(next, (iter(self),), {}).fetch()


class _Iterated:
    """Creates the iterator of a worker's dataset, on the worker."""

    def __init__(self, values: OwnValues) -> None:
        self._values = values

    def __call__(self) -> object:
        return iter(self._values)


class _Dataset:
    """Creates the dataset of a worker, on the worker. It yields tensors of the backend."""

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset

    def __call__(self) -> DistributedDataset:
        made = self._dataset() if callable(self._dataset) else self._dataset
        if isinstance(made, DistributedDataset):
            return made
        return get_strategy().distribute_datasets_from_function(lambda context: made)


class OwnCoordination(Coordination):
    """Drives each worker from a separate thread.

    Args:
        strategy: The strategy of the coordinator.
        engine: The functions of the backend.
        closures: The closures to run.
        cluster: The workers and servers.
        partitioner: Shards variables over the servers.
        synchronous: Whether all workers share each batch.
        timeout: Seconds to wait until all workers and servers have joined.
    """

    def __init__(
        self,
        strategy: StrategyLike,
        engine: Engine,
        closures: Closures,
        cluster: ServerCluster,
        partitioner: Callable[..., Sequence[int]] | None,
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
        # The keys are ids of functions. They stay valid because the values contain the functions.
        self._pickled = Recent()
        self._own: list[tuple[int, bytes]] = []
        self._lock = threading.RLock()
        # Separate from `_lock`, because the thread that pickles can call `give` while another has `_lock`.
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
        """Does nothing, because variables move to the servers at the end of the scope."""
        yield

    def give(self, variables: Sequence[keras.Variable]) -> None:
        """Moves new variables to the servers, except random seeds, because each worker has its own seeds."""
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

    def _stays(self, variable: keras.Variable) -> bool:
        # In the synchronous mode, all workers use the same random numbers, so seeds are on the servers.
        return not self._synchronous and keras_hooks.stays_local(variable)

    def dumps(self, value: object) -> bytes:
        """Pickles a value for the workers."""
        return shipping.dumps(value, self._strategy, self._reduce)

    def in_closure(self) -> bool:
        """Returns `False`, because closures run on workers, under their `WorkerStrategy`."""
        return False

    def run(self, strategy: object, fn: object, args: object, kwargs: object) -> NoReturn:
        """Never called: see `in_closure`."""
        raise NotImplementedError

    def schedule(
        self,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        done: Callable[[Any], None] | None = None,
    ) -> RemoteValue:
        """Schedules a call, after sending the coordinator's changes of variables to the servers."""
        self.served.drop_gone()
        self.served.tell_values(self.served.changed())
        return self.closures.add(fn, args, kwargs, done)

    def create_per_worker_dataset(self, dataset_fn: object) -> PerWorkerValues:
        """Calls the function on each worker, or sends a copy of the dataset to each worker."""
        return self.own_values(_Dataset(dataset_fn))

    def own_values(self, function: Callable[[], object]) -> OwnValues:
        """Creates a value on each worker before its next closure, also on workers that join later."""
        with self._lock:
            number = len(self._own)
            self._own.append((number, shipping.dumps(function, self._strategy, self._reduce)))
            return OwnValues(self, number)

    def close(self) -> None:
        """Stops the threads and closes the connections."""
        self.closures.close()
        for stop in self._watches:
            stop()
        for peer in [*self.served.servers, *self._workers]:
            peer.close()  # also ends the calls that wait for an answer
        join_threads(self._threads)

    def _lost_server(self, server: Peer) -> None:
        self.closures.fail(WorkerLostError(str(server.lost())))

    def function(self, fn: Callable[..., object]) -> tuple[str, bytes]:
        """Returns the name of a function on the workers and its pickle, which is created once."""
        with self._lock:
            if (known := self._pickled.get(id(fn))) is None:
                data = shipping.dumps(fn, self._strategy, self._reduce)
                known = fn, hashlib.sha256(data).hexdigest(), data
                self._pickled.put(id(fn), known)
            return known[1:]

    def _reduce(self, obj: object) -> object:
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
        """Builds an optimizer that a closure has used before it had variables."""
        with self._lock, self._strategy.scope():
            trained = [self.served.records[variable].variable() for variable in variables]
            self.optimizers.build(number, trained)
            self._pickled.clear()  # these functions contain the unbuilt optimizer

    def _drive(self, index: int) -> None:
        """Runs closures on one worker until the end of the job."""
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
    """A worker, with the functions and values that it has received."""

    def __init__(self, peer: Peer, index: int) -> None:
        self.peer = peer
        self.index = index
        self.is_ready = False
        self._session = ""
        self._functions = Recent()
        self._num_own = 0

    def begin(self, session: str, servers: Sequence[str], floatx: str, synchronous: bool = False) -> None:
        """Starts the session on the worker, which may be a restarted process."""
        self._session, self._functions, self._num_own = session, Recent(), 0
        self.peer.call(
            "begin",
            {"session": session, "index": self.index, "servers": list(servers), "floatx": floatx}
            | {"synchronous": synchronous},
        )
        self.is_ready = True

    def forget(self) -> None:
        """Marks the worker as lost."""
        self.is_ready = False

    def bring(self, own: Sequence[tuple[int, bytes]], name: str, data: bytes) -> None:
        """Sends a function and the per-worker values, unless the worker already has them."""
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
        """Calls a method of the worker with one pickle."""
        return self.peer.call(
            method, {"session": self._session} | dict(header), [np.frombuffer(data, np.uint8)]
        )


def _itself(value: object) -> object:
    return value


def _require(peers: Sequence[Peer], timeout: float) -> None:
    """Waits until all tasks have joined."""
    deadline = time.monotonic() + timeout
    waiting = Waiting([peer.name for peer in peers], timeout)
    missing = list(peers)
    # Waits for one task for a short time, then checks all tasks.
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
