"""The synchronous mode: the workers form one group and communicate with the collectives of the backend.

The workers train as under `MultiWorkerMirroredStrategy`, so results match one device. Coordinator and workers
exchange variables through the servers. Workers read the variables that the coordinator has changed, and write
their results when the coordinator needs them.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from kdist import keras_hooks
from kdist.arrays import rows
from kdist.backends.contract import ReplicaBatches, StepFunction
from kdist.backends.coordination import Engine, on_worker
from kdist.cluster import ClusterSpec, SimpleClusterResolver
from kdist.cluster.addresses import free_ports, join_address, split_address
from kdist.coordinator import shipping
from kdist.coordinator.rpc import Handler, Message, Peer, PeerLost
from kdist.coordinator.served import Home, Served
from kdist.coordinator.steps import TrainStep
from kdist.data.agreement import split_batch
from kdist.errors import InvalidArgumentError, KdistError, WorkerLostError
from kdist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from kdist.training.session import session_of

if TYPE_CHECKING:
    import keras


_HINT = (
    "Restart the job, because synchronous training needs all workers. With kdist.callbacks.BackupAndRestore in "
    "`fit`, it resumes from the last backup."
)


class Group:
    """The workers of a synchronous job, which the coordinator calls together.

    Args:
        workers: The connections to the workers.
        session: The name of the current run of the job.
    """

    def __init__(self, workers: Sequence[Peer], session: str) -> None:
        self._workers = workers
        self._session = session
        self._has_joined = False
        self.sent: set[str] = set()

    def join(self) -> None:
        """Connects the workers to each other, on the first call only."""
        if not self._has_joined:
            tasks = [header for header, _ in self.call("place", {}, b"")]
            if len({task["process"] for task in tasks}) < len(tasks):
                raise InvalidArgumentError(
                    "Two workers of a synchronous job run in the same process.",
                    received={"synchronous": True, "workers": [peer.name for peer in self._workers]},
                    hint="Start each worker in its own process, or train asynchronously.",
                )
            self.call("join_group", {"workers": [task["place"] for task in tasks]}, b"")
            self._has_joined = True

    def call(
        self, method: str, header: Mapping[str, Any], data: bytes
    ) -> list[tuple[dict[str, Any], list[np.ndarray]]]:
        """Calls a method of every worker, and returns the answers in the order of the workers.

        If several workers fail, raises an error that is not about the loss of a worker, if there is one.
        """
        header = {"session": self._session} | dict(header)
        waits = [peer.begin(method, header, [np.frombuffer(data, np.uint8)]) for peer in self._workers]
        answers: list[Any] = [None] * len(waits)

        def wait(index: int) -> None:
            try:
                answers[index] = waits[index]()
            except KdistError as error:
                answers[index] = error

        with ThreadPoolExecutor(len(waits)) as pool:
            list(pool.map(wait, range(len(waits))))
        for answer in answers:
            if isinstance(answer, PeerLost):
                raise WorkerLostError(str(answer), hint=_HINT)
        errors: list[BaseException] = [answer for answer in answers if isinstance(answer, KdistError)]
        for peer, answer in zip(self._workers, answers, strict=True):
            if not isinstance(answer, KdistError) and "raised" in answer[0]:
                errors.append(shipping.load_error(answer[1][0].tobytes(), peer.name))
        # A worker that waits for a failed worker reports it as lost. Errors of the failed worker come first.
        for error in sorted(errors, key=lambda error: isinstance(error, (WorkerLostError, PeerLost))):
            raise error
        return answers


class GroupSteps(StepFunction):
    """Trains a model on all workers. Each worker computes its rows of every batch."""

    def __init__(self, coordination: Any, model: keras.Model) -> None:
        self._coordination = coordination
        self._step = TrainStep(model)  # a new one for each `compile`
        self._name = ""

    def __call__(self, batches: Sequence[ReplicaBatches]) -> object:
        """Runs one step per batch, and returns the last logs."""
        coordination, group = self._coordination, self._coordination.group
        group.join()
        changed = [record.home.number for record in coordination.served.changed()]
        coordination.served.tell_values([coordination.served.records[number] for number in changed])
        data = [rows.to_host(batch.parts[0]) for batch in batches]
        self._name, pickled = coordination.function(self._step)
        if self._name not in group.sent:
            group.call("take_model", {"model": self._name}, pickled)
            group.sent.add(self._name)
        coordination.served.before_pull = self.sync
        coordination.served.generation += 1
        answers = group.call("step", {"model": self._name, "changed": changed}, coordination.dumps(data))
        return shipping.loads(answers[0][1][0].tobytes(), coordination)

    def sync(self) -> None:
        """Makes the workers write their variables to the servers."""
        name, self._name = self._name, ""
        if name:
            self._coordination.group.call("write", {"model": name}, b"")
            self._coordination.served.generation += 1


class GroupTask:
    """A worker in a synchronous session.

    Args:
        engine: The functions of the backend.
        index: The index of the worker.
        address: The address of the worker.
        session: The name of the session.
        servers: The connections to the servers.
    """

    # Kept for the life of the process, because the backends cannot join a second group.
    _joined: tuple[int, int, MultiWorkerMirroredStrategy] | None = None
    _lock = threading.Lock()

    def __init__(
        self, engine: Engine, index: int, address: str, session: str, servers: Sequence[Peer]
    ) -> None:
        self.index = index
        self.strategy: Any = None
        self.own_values: dict[int, object] = {}
        self._address = address
        self._engine = engine
        self._served = Served(engine, servers, session, tells=False)
        self._variables: dict[int, tuple[keras.Variable, Home]] = {}
        self._models: dict[str, keras.Model] = {}
        self._working: StepFunction | None = None

    def close(self) -> None:
        """Closes the connections to the servers."""
        for server in self._served.servers:
            server.close()

    def variable(self, number: int, spec: tuple[type, dict[str, Any], Home]) -> keras.Variable:
        """Returns the worker's local variable with this number. Creates it on first use."""
        cls, state, home = spec
        if number not in self._variables:
            variable = keras_hooks.new_variable(cls, state, np.zeros(home.placement.shape, state["_dtype"]))
            self._variables[number] = variable, home
        variable = self._variables[number][0]
        if variable.trainable != state["_trainable"]:  # frozen since the last function that used it
            variable.trainable = state["_trainable"]
        return variable

    def handlers(self) -> dict[str, Handler]:
        """Returns the methods that the coordinator can call, by name."""
        names = ("place", "join_group", "take_model", "step", "write")
        return {name: self._caught(getattr(self, name)) for name in names}

    def place(self, header: Mapping[str, Any], data: bytes) -> Message:
        """Returns an address with a free port, at which the other workers connect, and the worker's process."""
        host, _ = split_address(self._address)
        return {"place": join_address(host, free_ports(1)[0]), "process": _token(os.getpid())}, ()

    def join_group(self, header: Mapping[str, Any], data: bytes) -> Message:
        """Connects to the other workers, or reuses the strategy of an earlier session."""
        workers = header["workers"]
        with self._lock:
            if GroupTask._joined is None or GroupTask._joined[:2] != (self.index, len(workers)):
                resolver = SimpleClusterResolver(
                    ClusterSpec({"worker": workers}), task_type="worker", task_id=self.index
                )
                GroupTask._joined = self.index, len(workers), MultiWorkerMirroredStrategy(resolver)
            self.strategy = GroupTask._joined[2]
        return {}, ()

    def take_model(self, header: Mapping[str, Any], data: bytes) -> Message:
        """Receives a model, and reads its new variables from the servers."""
        known = set(self._variables)
        self._models[header["model"]] = shipping.loads(data, self).model
        self._read([number for number in self._variables if number not in known])
        return {}, ()

    def step(self, header: Mapping[str, Any], data: bytes) -> Message:
        """Trains on global batches, together with the other workers, and returns the logs."""
        model = self._models[header["model"]]
        function = session_of(self.strategy, model).function("train")
        if header["changed"]:
            self._leave()
            self._read(header["changed"])
        if self._working is not function:
            self._leave()
            self._working = function.__enter__()
        batches = [split_batch(self.strategy.runtime, batch) for batch in shipping.loads(data, self)]
        return {}, [_bytes(shipping.dumps(shipping.to_host(function(batches)), self.strategy))]

    def write(self, header: Mapping[str, Any], data: bytes) -> Message:
        """Writes the model's variables to the servers. Each worker does this for some of the servers."""
        self._leave()
        model = self._models[header["model"]]
        mine = {id(variable): number for number, (variable, _) in self._variables.items()}
        number_of_workers = self.strategy.runtime.num_workers
        sent: dict[int, tuple[list[str], list[np.ndarray]]] = {}
        for variable in keras_hooks.all_variables(model):
            number = mine[id(variable)]
            _, home = self._variables[number]
            parts = home.placement.cut(np.array(variable))
            for part, server, key in home.keys_to_write(len(self._served.servers)):
                if server % number_of_workers == self.index:
                    keys, arrays = sent.setdefault(server, ([], []))
                    keys.append(key)
                    arrays.append(parts[part])
        for server, (keys, arrays) in sent.items():
            self._served.call(server, "assign", {"keys": keys}, arrays)
        return {}, ()

    def _leave(self) -> None:
        working, self._working = self._working, None
        if working is not None:
            working.__exit__()

    def _read(self, numbers: Sequence[int]) -> None:
        """Reads the values of variables from the servers."""
        for number in numbers:
            variable, home = self._variables[number]
            variable.assign(self._served.value(home))

    def _caught(self, method: Callable[[Mapping[str, Any], bytes], Message]) -> Handler:
        def handle(header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
            try:
                with on_worker(self.index):
                    return method(header, arrays[0].tobytes())
            except BaseException as error:
                return {"raised": True}, [_bytes(shipping.dump_error(error))]

        return handle


@functools.cache
def _token(pid: int) -> str:
    """Returns a random name of this process, because numbers of processes repeat on other machines."""
    return secrets.token_hex(8)


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
