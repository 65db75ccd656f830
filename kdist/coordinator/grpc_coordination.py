"""`GrpcCoordination`: kdist's workers and servers over gRPC, for backends without parameter servers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
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
    wait_for_tasks,
)
from kdist.cluster.roles import ServerCluster
from kdist.cluster.secret import job_secret
from kdist.context import StrategyLike
from kdist.coordinator import shipping
from kdist.coordinator.closures import Closure, Closures, NotDone, Recent, Result
from kdist.coordinator.group import Group
from kdist.coordinator.optimizers import Optimizers
from kdist.coordinator.placement import place
from kdist.coordinator.rpc import Peer, PeerLost
from kdist.coordinator.served import Home, Record, Served
from kdist.data.distributed_dataset import DistributedDataset
from kdist.errors import KdistError, WorkerLostError
from kdist.strategies.default import get_strategy

_LOOK = 1.0  # seconds to wait for one task between two checks of all tasks
_GLANCE = 0.05  # seconds for a running task to answer
_PATIENCE = 0.2  # seconds between two checks of an idle thread


class OwnValues(PerWorkerValues):
    """One value per worker, stored on the worker."""

    def __init__(self, coordination: GrpcCoordination, number: int, function: Callable[[], object]) -> None:
        self._coordination = coordination
        self.number = number
        self._function = function  # an iterator keeps its dataset, because workers that join later need both

    def __iter__(self) -> OwnValues:
        # Each worker calls this with the dataset instead of `self`.
        return self._coordination.own_values(functools.partial(iter, self))

    def peek(self) -> object:
        return self._coordination.schedule(next, (iter(self),), {}).fetch()


def _dataset(dataset: object) -> DistributedDataset:
    """Creates the dataset of a worker, on the worker. It yields tensors of the backend."""
    made = dataset() if callable(dataset) else dataset
    if isinstance(made, DistributedDataset):
        return made
    return get_strategy().distribute_datasets_from_function(lambda context: made)


class GrpcCoordination(Coordination):
    """Drives each worker from a separate thread. Waits `timeout` seconds until all workers and servers have joined."""

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
        session, secret = uuid.uuid4().hex, job_secret([*cluster.workers, *cluster.servers])
        servers = [
            Peer(*task, secret, after_lost_server, session)
            for task in zip(cluster.server_names, cluster.servers, strict=True)
        ]
        peers = [
            Peer(*task, secret, session=session)
            for task in zip(cluster.worker_names, cluster.workers, strict=True)
        ]
        self._peers = everyone = [*servers, *peers]
        try:
            wait_for_tasks(
                [peer.name for peer in everyone],
                lambda index: everyone[index].is_there(_GLANCE),
                lambda index, left: everyone[index].is_there(min(left, _LOOK)),
                timeout,
            )
        except KdistError:
            for peer in everyone:
                peer.close()
            raise
        self.served = Served(engine, servers, tells=True)
        for server in servers:
            server.call("begin", {"floatx": keras.config.floatx()})
        self._watches = [server.watch(functools.partial(self._lost_server, server)) for server in servers]
        self.closures = closures
        self.optimizers = Optimizers(strategy, self.served, self.give)
        self._num_parts = 0
        # The keys are ids of functions. They stay valid because the values contain the functions.
        self._pickled = Recent()
        self._own: dict[int, np.ndarray] = {}
        self._own_numbers = itertools.count()
        self._lock = threading.RLock()
        # Separate from `_lock`, because the thread that pickles can call `give` while another has `_lock`.
        self._giving = threading.Lock()
        self.group = Group(peers)
        self._threads: list[threading.Thread] = []
        for index, peer in enumerate(peers):
            begin = {"index": index, "servers": cluster.servers, "synchronous": synchronous}
            worker = _Worker(peer, begin)
            if synchronous:
                worker.begin()
            else:
                thread = threading.Thread(
                    target=self._drive, args=(worker,), name=f"kdist {peer.name}", daemon=True
                )
                self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def give(self, variables: Sequence[keras.Variable]) -> None:
        """Moves new variables to the servers, except random seeds, because each worker has its own seeds."""
        with self._giving:
            for variable in variables:
                # In the synchronous mode, all workers use the same random numbers.
                stays = not self._synchronous and keras_hooks.stays_local(variable)
                if keras_hooks.record_of(variable) is None and not stays:
                    shape = tuple(variable.shape)
                    dtype = keras.backend.standardize_dtype(variable.dtype)
                    divided = None if variable.constraint is not None else self._partitioner
                    placement = place(shape, dtype, divided, self.num_servers, self._num_parts)
                    self._num_parts += placement.num_shards
                    home = Home(self.served.new_number(), placement)
                    record = Record(self.served, variable, home, keras_hooks.native_value(variable))
                    self.served.add(record)
                    self.served.hold(record, home)

    def dumps(self, value: object) -> np.ndarray:
        """Pickles a value for the workers."""
        return shipping.dumps(value, self._strategy, self._reduce)

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
        return self.own_values(functools.partial(_dataset, dataset_fn))

    def own_values(self, function: Callable[[], object]) -> OwnValues:
        """Creates a value on each worker before its next closure, also on workers that join later."""
        with self._lock:
            values = OwnValues(self, next(self._own_numbers), function)
            self._own[values.number] = self.dumps(function)
            weakref.finalize(values, self._own.pop, values.number).atexit = False
            return values

    def close(self) -> None:
        self.closures.close()
        for stop in self._watches:
            stop()
        for peer in self._peers:
            peer.close()  # also ends the calls that wait for an answer
        join_threads(self._threads)

    def _lost_server(self, server: Peer) -> None:
        self.closures.fail(WorkerLostError(str(server.lost())))

    def function(self, fn: Callable[..., object]) -> tuple[str, np.ndarray]:
        """Returns the name of a function on the workers and its pickle, which is created once."""
        with self._lock:
            if (known := self._pickled.get(id(fn))) is None:
                held: list[OwnValues] = []  # a worker that joins later needs the values in the pickle
                data = shipping.dumps(fn, self._strategy, functools.partial(self._reduce, held=held))
                known = (fn, held), hashlib.sha256(data.data).hexdigest(), data
                self._pickled.put(id(fn), known)
            return known[1:]

    def _reduce(self, obj: object, held: list[OwnValues] | None = None) -> object:
        if isinstance(obj, keras.Variable):
            self.give([obj])
            return shipping.reduced_variable(obj)
        if isinstance(obj, OwnValues):
            if held is not None:
                held.append(obj)
            return shipping.own_value_here, (obj.number,)
        if isinstance(obj, RemoteValue):
            if isinstance(obj, Result) and not obj.is_done:
                raise NotDone(obj)  # this thread may have to compute it
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

    def _drive(self, worker: _Worker) -> None:
        """Runs closures on one worker until the end of the job."""
        closure: Closure | None = None
        while not self.closures.is_closed:
            try:
                if not worker.is_ready:
                    if not worker.peer.is_there(_PATIENCE):
                        continue
                    worker.begin()
                if (closure := self.closures.take(_PATIENCE)) is None:
                    continue
                self._run(worker, closure)
            except PeerLost:
                worker.is_ready = False
                if closure is not None:
                    self.closures.again(closure)
            except NotDone as error:
                assert closure is not None
                closure.needs = error.result
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
        arguments = self.dumps((tuple(closure.args), dict(closure.kwargs)))
        header = {"closure": closure.index, "oldest": self.closures.oldest(), "function": name}
        try:
            answer, arrays = worker.call("run", header, arguments)
        finally:
            self.served.generation += 1
        if "build" in answer:
            self._build(*answer["build"])
            self.closures.again(closure)
        elif "lost" in answer:
            self.closures.again(closure)
            self.closures.fail(WorkerLostError(answer["lost"], hint=after_lost_server()))
        else:
            self.closures.end(closure, shipping.loads(arrays[0], self))


@dataclasses.dataclass(eq=False)
class _Worker:
    """A worker, with the functions and values that it has received."""

    peer: Peer
    header: Mapping[str, Any]  # of the call that starts the session, without the default dtype

    def __post_init__(self) -> None:
        self.is_ready = False
        self._functions = Recent()
        self._own: set[int] = set()

    def begin(self) -> None:
        """Starts the session on the worker, which may be a restarted process."""
        self._functions, self._own = Recent(), set()
        self.peer.call("begin", {**self.header, "floatx": keras.config.floatx()})
        self.is_ready = True

    def bring(self, own: Mapping[int, np.ndarray], name: str, data: np.ndarray) -> None:
        """Sends a function and the per-worker values, unless the worker already has them."""
        for number in list(own):
            # Python can free values at any time.
            if number not in self._own and (made := own.get(number)) is not None:
                gone = [one for one in self._own if one not in own]
                self.call("own", {"number": number, "gone": gone}, made)
                self._own = {number, *self._own.difference(gone)}
        if not self._functions.get(name):
            self.call("ship", {"function": name}, data)
            self._functions.put(name, True)

    def call(
        self, method: str, header: Mapping[str, Any], data: np.ndarray
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Calls a method of the worker with one pickle. Raises the error that the worker answers."""
        answer, arrays = self.peer.call(method, header, [data])
        if "raised" in answer:
            raise shipping.load_error(arrays[0], self.peer.name)
        return answer, arrays


def _itself(value: object) -> object:
    return value
