"""The synchronous mode: the workers form one group and communicate with the collectives of the backend.

The workers train as under `MultiWorkerMirroredStrategy`, so results match one device. Coordinator and workers
exchange variables through the servers. Workers read the variables that the coordinator has changed, and write
their results when the coordinator needs them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from kdist import keras_hooks
from kdist.arrays import rows
from kdist.backends.contract import ReplicaBatches, StepFunction
from kdist.cluster import ClusterSpec, SimpleClusterResolver
from kdist.cluster.addresses import free_ports, join_address, split_address
from kdist.coordinator import shipping
from kdist.coordinator.rpc import Message, Peer, PeerLost
from kdist.coordinator.served import Home
from kdist.coordinator.steps import TrainStep
from kdist.coordinator.worker import SessionTask
from kdist.data.agreement import split_batch
from kdist.errors import InvalidArgumentError, KdistError, WorkerLostError
from kdist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from kdist.training.session import session_of

_HINT = (
    "Restart the job, because synchronous training needs all workers. With kdist.callbacks.BackupAndRestore in "
    "`fit`, it resumes from the last backup."
)


@dataclasses.dataclass(eq=False)
class Group:
    """The workers of a synchronous job, which the coordinator calls together."""

    workers: Sequence[Peer]

    def __post_init__(self) -> None:
        self._has_joined = False
        self.sent: set[str] = set()

    def join(self) -> None:
        """Connects the workers to each other, on the first call only."""
        if not self._has_joined:
            tasks = [header for header, _ in self.call("place", {})]
            if len({task["process"] for task in tasks}) < len(tasks):
                raise InvalidArgumentError(
                    "Two workers of a synchronous job run in the same process.",
                    received={"synchronous": True, "workers": [peer.name for peer in self.workers]},
                    hint="Start each worker in its own process, or train asynchronously.",
                )
            new = [peer for peer, task in zip(self.workers, tasks, strict=True) if not task["has_joined"]]
            if new and len(new) < len(tasks):
                raise WorkerLostError(
                    "Some workers of a synchronous job were restarted, but the others wait for the earlier processes.",
                    received={"restarted": new},
                    hint="Restart all workers and the coordinator.",
                )
            self.call("join_group", {"workers": [task["place"] for task in tasks]})
            self._has_joined = True

    def call(
        self, method: str, header: Mapping[str, Any], *arrays: np.ndarray
    ) -> list[tuple[dict[str, Any], list[np.ndarray]]]:
        """Calls a method of every worker, and returns the answers in the order of the workers.

        If several workers fail, raises an error that is not about the loss of a worker, if there is one.
        """
        waits = [peer.begin(method, header, arrays) for peer in self.workers]

        def outcome(wait: Callable[[], Any]) -> Any:
            try:
                return wait()
            except KdistError as error:
                return error

        with ThreadPoolExecutor(len(waits)) as pool:
            answers = list(pool.map(outcome, waits))
        for answer in answers:
            if isinstance(answer, PeerLost):
                raise WorkerLostError(str(answer), hint=_HINT)
        errors: list[BaseException] = [answer for answer in answers if isinstance(answer, KdistError)]
        for peer, answer in zip(self.workers, answers, strict=True):
            if not isinstance(answer, KdistError) and "raised" in answer[0]:
                errors.append(shipping.load_error(answer[1][0], peer.name))
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
        return shipping.loads(answers[0][1][0], coordination)

    def sync(self) -> None:
        name, self._name = self._name, ""
        if name:
            self._coordination.group.call("write", {"model": name})
            self._coordination.served.generation += 1


class GroupTask(SessionTask):
    """A worker that trains together with the other workers."""

    METHODS = ("place", "join_group", "take_model", "step", "write")
    # Kept for the life of the process, because the backends cannot join a second group.
    _joined: tuple[int, int, MultiWorkerMirroredStrategy] | None = None
    _lock = threading.Lock()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._homes: dict[int, Home] = {}  # by the ids of variables
        self._models: dict[str, keras.Model] = {}
        self._working: StepFunction | None = None

    def _create(self, cls: type, state: dict[str, Any], home: Home) -> keras.Variable:
        variable = keras_hooks.new_variable(cls, state, np.zeros(home.placement.shape, state["_dtype"]))
        self._homes[id(variable)] = home
        return variable

    @shipping.answers_errors
    def place(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        """Returns a free address for the other workers, the worker's process, and whether it is in a group."""
        host, _ = split_address(self.address)
        return {
            "place": join_address(host, free_ports(1)[0]),
            "process": _token(os.getpid()),
            "has_joined": GroupTask._joined is not None,
        }, ()

    @shipping.answers_errors
    def join_group(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
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

    @shipping.answers_errors
    def take_model(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        known = set(self._variables)
        self._models[header["model"]] = shipping.loads(arrays[0], self).model
        self._read([number for number in self._variables if number not in known])
        return {}, ()

    @shipping.answers_errors
    def step(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        """Trains on global batches, together with the other workers, and returns the logs."""
        model = self._models[header["model"]]
        function = session_of(self.strategy, model).function("train")
        if header["changed"]:
            self._leave()
            self._read(header["changed"])
        if self._working is not function:
            self._leave()
            self._working = function.__enter__()
        batches = [split_batch(self.strategy.runtime, batch) for batch in shipping.loads(arrays[0], self)]
        return shipping.answer_result(function(batches), self.strategy)

    @shipping.answers_errors
    def write(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        """Writes the model's variables to the servers. Each worker does this for some of the servers."""
        self._leave()
        variables = keras_hooks.all_variables(self._models[header["model"]])
        values = [(self._homes[id(variable)], np.array(variable)) for variable in variables]
        self.served.assign(values, self.index, self.strategy.runtime.num_workers)
        return {}, ()

    def _leave(self) -> None:
        working, self._working = self._working, None
        if working is not None:
            working.__exit__()

    def _read(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            variable = self._variables[number]
            variable.assign(self.served.value(self._homes[id(variable)]))


@functools.cache
def _token(pid: int) -> str:
    """Returns a random name of this process, because numbers of processes repeat on other machines."""
    return secrets.token_hex(8)
