"""Runs the workers of `kdist.launch` on a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist.cluster import environment, join_address, timeouts
from kdist.cluster.keras_backends import check_backend_name
from kdist.errors import InvalidArgumentError, LaunchError, WorkerTimeoutError
from kdist.launch import shipping
from kdist.launch.linux import JOB_VARIABLE
from kdist.launch.options import is_auto, resolve_num_workers
from kdist.launch.output import LineStream, sinks
from kdist.launch.plan import THREADS, Place
from kdist.launch.ray_actor import WorkerActor
from kdist.launch.shipping import Call, Ended, Ending

# Exits within these seconds count as one failure, because reports need time to arrive.
_WINDOW = 0.5
_ENDING = 10.0  # seconds for workers to end, before Ray kills their actors
_PATIENCE = 2.0  # seconds for actors to terminate their workers
_FOREVER = float("inf")


def run(call: Call) -> Ending:
    """Runs a function in workers of a Ray cluster. Starts a cluster if there is none."""
    ray = _import_ray()
    check_backend_name(call.backend)
    deadline = _FOREVER if call.timeout is None else time.monotonic() + call.timeout
    payload = shipping.pack_call(call.fn, call.args, call.kwargs, None)
    # Checked here, so that an invalid number raises an error before a cluster is started.
    wanted = None if is_auto(call.num_workers) else resolve_num_workers(call.num_workers)
    with _connected(ray):
        needs = _needs(ray, call.resources)
        count = _count_workers(ray, wanted, needs)
        with _reserved(ray, count, needs, deadline) as group, _started(ray, group, count, needs) as workers:
            _run_all(workers, call, payload, needs, deadline)
            return _Job(ray, workers, deadline).run()


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InvalidArgumentError(
            'The package ray, which kdist.launch(…, on="ray") needs, is not installed.',
            received={"on": "ray"},
            hint="In your checkout of kdist, run: pip install '.[ray]'",
        ) from error


@contextlib.contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Connects to a cluster, or starts one, unless this process is already connected."""
    if ray.is_initialized():
        yield
        return
    # Ray does not restore either of these. It leaves a handler without effect, and its own debugger.
    handler = signal.getsignal(signal.SIGTERM)
    with environment.patched(PYTHONBREAKPOINT=environment.get("PYTHONBREAKPOINT")):
        try:
            # `ray.init` tries RAY_ADDRESS and a cluster on this machine before it starts a cluster.
            ray.init(include_dashboard=False, logging_level="error", log_to_driver=False)
            yield
        finally:
            ray.shutdown()
            if signal.getsignal(signal.SIGTERM) is not handler:
                signal.signal(signal.SIGTERM, handler)


def _needs(ray: Any, resources: Mapping[str, float] | None) -> dict[str, float]:
    if resources is None:
        return {"CPU": 1.0, "GPU": 1.0} if ray.cluster_resources().get("GPU") else {"CPU": 1.0}
    needs = {name: amount for name, amount in resources.items() if amount}
    if not needs or not all(isinstance(amount, (int, float)) and amount > 0 for amount in needs.values()):
        raise InvalidArgumentError(
            "`resources` does not map names of resources to positive amounts.",
            received={"resources": resources},
            hint='For example: resources={"CPU": 4, "GPU": 1}',
        )
    return needs


def _count_workers(ray: Any, wanted: int | None, needs: Mapping[str, float]) -> int:
    """Returns the number of workers; by default, all workers that fit on the cluster if it is otherwise idle."""
    room = sum(
        min(int(node["Resources"].get(name, 0.0) // amount) for name, amount in needs.items())
        for node in ray.nodes()
        if node["Alive"]
    )
    count = room if wanted is None else wanted
    if not count or count > room:
        raise InvalidArgumentError(
            "The Ray cluster is too small for all workers.",
            received={"num_workers": count, "resources": dict(needs), "room_for": room},
            hint="Start fewer workers, request less per worker (`resources=`), or add machines: ray start --address=…",
        )
    return count


@contextlib.contextmanager
def _reserved(ray: Any, count: int, needs: Mapping[str, float], deadline: float) -> Iterator[Any]:
    """Reserves resources for all workers at once, on few machines, because training needs all workers."""
    group = ray.util.placement_group([dict(needs)] * count, strategy="PACK")
    try:
        patience = min(timeouts.join_timeout(), max(0.0, deadline - time.monotonic()))
        if not group.wait(patience):
            raise WorkerTimeoutError(
                f"The Ray cluster had no room for all workers within {patience:.0f} s.",
                received={"num_workers": count, "resources": dict(needs), "free": ray.available_resources()},
                hint=f"Stop other jobs on the cluster, or wait longer: export {timeouts.JOIN_VARIABLE}=3600",
            )
        yield group
    finally:
        ray.util.remove_placement_group(group)


@dataclasses.dataclass
class _Worker:
    """The state of one worker in this process."""

    actor: Any
    place: Place
    address: str
    streams: dict[str, LineStream]
    ended: Ended | None = None
    unfinished: bool = False
    ended_at: float = 0.0


@contextlib.contextmanager
def _started(ray: Any, group: Any, count: int, needs: Mapping[str, float]) -> Iterator[list[_Worker]]:
    """Starts an actor for each worker, and reserves its port. The workers are numbered machine by machine."""
    machine_of = ray.util.placement_group_table(group)["bundles_to_node_id"]
    machines = list(dict.fromkeys(machine_of[bundle] for bundle in range(count)))
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    out, err = sinks()
    workers: list[_Worker] = []
    actors = []
    try:
        for number, machine in enumerate(machines):
            bundles = [bundle for bundle in range(count) if machine_of[bundle] == machine]
            actors += [
                (_actor(ray, group, bundle, needs), Place(0, local, len(bundles), number), hosts[machine])
                for local, bundle in enumerate(bundles)
            ]
        ports = _ports(ray, [actor.hold_port.remote(host) for actor, _, host in actors])
        for index, ((actor, place, host), port) in enumerate(zip(actors, ports, strict=True)):
            place = dataclasses.replace(place, index=index)
            prefix = f"[worker {index}] " if count > 1 else ""
            streams = {"out": LineStream(out, prefix, index == 0), "err": LineStream(err, prefix, index == 0)}
            workers.append(_Worker(actor, place, join_address(host, port), streams))
        yield workers
    finally:
        left = [worker.actor.end.remote() for worker in workers if worker.ended is None]
        if left:  # this process was interrupted, or a worker did not answer
            ray.wait(left, num_returns=len(left), timeout=_PATIENCE)
        for worker in workers:
            for stream in worker.streams.values():
                stream.close()
        for actor, *_ in actors:
            ray.kill(actor)


def _actor(ray: Any, group: Any, bundle: int, needs: Mapping[str, float]) -> Any:
    others = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=bundle
    )
    options = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0), "resources": others}
    # The actor must run the worker, report its news and end it concurrently.
    return (
        ray.remote(WorkerActor).options(**options, scheduling_strategy=strategy, max_concurrency=4).remote()
    )


def _ports(ray: Any, asked: Sequence[Any]) -> list[int]:
    try:
        return ray.get(list(asked), timeout=timeouts.join_timeout())
    except ray.exceptions.RayError as error:
        raise LaunchError(
            "A worker could not start on the Ray cluster.",
            hint=f"Install kdist on all machines of the cluster. In a checkout of kdist, run: pip install .\n{error}",
        ) from error


def _run_all(
    workers: Sequence[_Worker],
    call: Call,
    payload: bytes,
    needs: Mapping[str, float],
    deadline: float,
) -> None:
    # Ray's processes do not inherit the environment of this process. Each worker gets one thread per core.
    told = {name: str(max(1, int(needs.get("CPU", 1)))) for name in THREADS}
    told |= {name: value for name, value in os.environ.items() if name.startswith("KDIST_")}
    told.pop(JOB_VARIABLE, None)
    told[environment.TOKEN_VARIABLE] = environment.cluster_token() or secrets.token_hex(16)
    backend = call.backend or environment.get("KERAS_BACKEND") or None
    addresses = [worker.address for worker in workers]
    timeout = None if deadline == _FOREVER else max(0.1, deadline - time.monotonic())
    for worker in workers:
        worker.actor.run.remote(payload, addresses, worker.place, backend, told | dict(call.env), timeout)


@dataclasses.dataclass
class _Job:
    """Passes on the output of the workers, and terminates all workers if one of them fails."""

    ray: Any
    workers: Sequence[_Worker]  # running
    deadline: float  # at which the actors terminate workers that are still running

    def __post_init__(self) -> None:
        self._asked = {worker.actor.news.remote(): worker for worker in self.workers}
        self._judge_at = _FOREVER
        self._give_up_at = self.deadline + _ENDING
        self._failed: _Worker | None = None

    def run(self) -> Ending:
        while self._asked and time.monotonic() < self._give_up_at:
            patience = min(0.25, max(0.0, self._judge_at - time.monotonic()))
            ready, _ = self.ray.wait(list(self._asked), timeout=patience)
            for reference in ready:
                self._hear(self._asked.pop(reference), reference)
            for worker in self.workers:
                for stream in worker.streams.values():
                    stream.tick()
            if time.monotonic() >= self._judge_at:
                self._end_all()
        if self._failed is None:
            self._judge()
        ended = [worker.ended or Ended(worker.place.index, None, [], None) for worker in self.workers]
        slow = [
            one
            for worker, one in zip(self.workers, ended, strict=True)
            if worker.unfinished or (not worker.ended and self._failed is None)
        ]
        return Ending(ended, self._failed.ended if self._failed else None, slow)

    def _hear(self, worker: _Worker, reference: Any) -> None:
        try:
            news = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:  # the actor died, possibly with its machine
            lines = str(error).splitlines()
            lost = Ended(worker.place.index, -signal.SIGKILL, lines, None)
            news = [Ending([lost], lost)]
        for one in news:
            if isinstance(one, Ending):
                self._note_end(worker, one)
            else:
                stream, data = one
                worker.streams[stream].feed(data)
        if worker.ended is None:
            self._asked[worker.actor.news.remote()] = worker

    def _note_end(self, worker: _Worker, ending: Ending) -> None:
        (worker.ended,) = ending.workers
        worker.unfinished = bool(ending.unfinished)
        worker.ended_at = time.monotonic()
        if ending.failed is not None and not worker.unfinished and self._failed is None:
            self._judge_at = min(self._judge_at, time.monotonic() + _WINDOW)

    def _judge(self) -> None:
        """Finds the worker that failed first. A worker that lost another one counts only if all did."""
        failed = [worker for worker in self.workers if worker.ended and worker.ended.exit_code != 0]
        failed = [worker for worker in failed if not worker.unfinished]
        own = [worker for worker in failed if worker.ended and not worker.ended.has_lost_another]
        self._failed = min(own or failed, key=lambda worker: worker.ended_at, default=None)

    def _end_all(self) -> None:
        self._judge_at = _FOREVER
        self._judge()
        self._give_up_at = time.monotonic() + _ENDING
        for worker in self.workers:
            if worker.ended is None:
                worker.actor.end.remote()
