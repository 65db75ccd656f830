"""Joins the workers of a cluster with `torch.distributed`, exchanges data and detects lost workers."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from kdist import keras_hooks
from kdist.backends import workers
from kdist.backends.torch.devices import abort_nccl, backend_of, flat_array, torch_device
from kdist.backends.torch.rendezvous import compare_devices, describe_devices, open_store
from kdist.cluster import Cluster, choose_nccl_interface, environment, interface_towards, timeouts
from kdist.communication import interrupts
from kdist.communication.options import CommunicationImplementation, CommunicationOptions, hint_ignored
from kdist.communication.shared_memory import Sum
from kdist.control import whereabouts
from kdist.control.channel import NOTICE_SECONDS, Channel
from kdist.control.joining import OpenChannel, join_once
from kdist.control.loss_reasons import Loss
from kdist.errors import KdistError, StrategyScopeError, WorkerTimeoutError, check_equal_arrays

_ENGINE = workers.folders_of_engine()
# The interval at which a waiting worker checks whether the others are alive.
_LOOK = timedelta(seconds=1)


class Workers(workers.Workers):
    """A single process without other workers."""

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Sums a tensor over all workers, or over the workers of a group, in place."""
        self.start_all_reduce(tensor, group)()

    def start_all_reduce(
        self, tensor: torch.Tensor, group: object = None, result: torch.Tensor | None = None
    ) -> Callable[[], None]:
        """Starts `all_reduce`, in place or into a contiguous `result`. Returns a function that waits for the sum."""
        return lambda: None

    def broadcast(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Sends the chief's values to every worker, in place; see `JoinedWorkers.broadcast`."""

    def gather_rows(self, leaves: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Concatenates the rows of every worker, per tensor; see `JoinedWorkers.gather_rows`."""
        return list(leaves)

    def gather_uneven(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Returns the rows of all workers, and the index of this worker's first row. Counts can differ."""
        return rows, 0


class JoinedWorkers(workers.JoinedWorkers, Workers):
    """The workers of a cluster, joined in a process group.

    Args:
        nccl: Whether NCCL connects the GPUs. Otherwise, gloo connects all devices.
        owns_group: Whether kdist created the process group and destroys it at the end, or the user owns it.
        cpu_group: The group for tensors on the CPU, if the default group does not support them.
        shares_memory: Whether workers on one machine may sum in shared memory.
    """

    def __init__(
        self,
        cluster: Cluster,
        channel: Channel,
        nccl: bool,
        owns_group: bool = True,
        cpu_group: dist.ProcessGroup | None = None,
        shares_memory: bool = True,
    ) -> None:
        super().__init__(cluster, channel)
        self._nccl = nccl
        self.communication = "nccl" if nccl else "gloo"
        self._owns_group = owns_group
        keras_hooks.claim_process_group(owns_group)
        self._cpu_group = cpu_group
        self.connect_memory(shares_memory)
        self._stuck = False
        self._pending: dist.Work | Sum | None = None  # the unfinished collective
        self._aborted = False
        if nccl:
            channel.on_loss(self._abort)
        self._stalls.start()

    def start_all_reduce(
        self, tensor: torch.Tensor, group: object = None, result: torch.Tensor | None = None
    ) -> Callable[[], None]:
        """Starts `all_reduce`; a worker can start several of them before it waits."""
        total = tensor if result is None else result
        with self._explained("all_reduce"):
            memory = None if group is not None else self.memory
            works: list[dist.Work | Sum] = []
            source, target = (None, None) if memory is None else (flat_array(tensor), flat_array(total))
            if memory and source is not None and target is not None and memory.can_sum(source.dtype):
                pieces = zip(memory.pieces_of(source), memory.pieces_of(target), strict=True)
                works += [memory.start([a], [b], f"{(*tensor.shape,)}") for a, b in pieces]
            else:
                total.copy_(tensor)
                works.append(dist.all_reduce(total, group=group or self._group(total), async_op=True))

        def finish() -> None:
            with self._explained("all_reduce"):
                for work in works:
                    self._finish(work, total)

        return finish

    def reduce_scatter(self, parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
        """Sums tensors of equal shapes over a group. Each worker gets the sum for its position."""
        total = torch.empty_like(parts[0])
        with self._explained("reduce_scatter"):
            self._finish(dist.reduce_scatter(total, list(parts), group=group, async_op=True), total)
        return total

    def broadcast(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Sends the chief's values to every worker, in place, with one collective for all tensors."""
        packet = torch.cat([_bytes_of(tensor).to(device) for tensor in tensors])
        with self._explained("broadcast"):
            self._finish(dist.broadcast(packet, 0, group=self._group(packet), async_op=True), packet)
        with torch.no_grad():
            for tensor in tensors:
                size = tensor.numel() * tensor.element_size()
                tensor.copy_(packet[:size].clone().view(tensor.dtype).reshape(tensor.shape))
                packet = packet[size:]

    def all_gather(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
        """Gathers tensors of equal shapes from all workers, or from a group, in the order of the workers."""
        group = group or self._group(tensor)
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        with self._explained("all_gather"):
            self._finish(dist.all_gather(parts, tensor, group=group, async_op=True), tensor)
        return parts

    def begin_gather_bytes(self, data: bytes, timeout: float | None = None) -> Callable[[], list[bytes]]:
        begun = super().begin_gather_bytes(data, timeout)

        def finish() -> list[bytes]:
            self._finish_sums()
            return begun()

        return finish

    def waits_in(self, filename: str) -> bool:
        """Returns whether the main thread waits for messages, or a collective is unfinished."""
        is_pending = self._pending is not None and not self._pending.is_completed()
        return is_pending or filename.startswith(_ENGINE)

    def limit_time(self, seconds: float | None) -> None:
        """Sets the timeout of messages. PyTorch sets it for collectives when a process group is created."""
        super().limit_time(seconds)
        if seconds is not None:
            said = "the first strategy of this process set the limit."
            hint_ignored(f"timeout_seconds={seconds}", said, self.worker_index)

    def gather_rows(self, leaves: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Concatenates the rows of every worker, with one collective for all tensors.

        `sizes` contains the number of rows of each worker. A tensor can have several entries per row.
        """
        mine, largest = sizes[self.worker_index], max(sizes)
        packets = []
        for leaf in leaves:
            entries = len(leaf) // mine if mine else 1
            row_bytes = entries * math.prod(leaf.shape[1:]) * leaf.element_size()
            packets.append(torch.nn.functional.pad(_bytes_of(leaf), (0, (largest - mine) * row_bytes)))
        everyone = self.all_gather(torch.cat(packets))
        results, start = [], 0
        for leaf, packet in zip(leaves, packets, strict=True):
            row_bytes = packet.numel() // max(largest, 1)
            parts = []
            for size, theirs in zip(sizes, everyone, strict=True):
                rows = theirs[start : start + size * row_bytes].clone().view(leaf.dtype)
                parts.append(rows.reshape(-1, *leaf.shape[1:]))
            results.append(torch.cat(parts))
            start += packet.numel()
        return results

    def gather_uneven(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        mine = f"{len(rows)} rows of {rows.dtype} {tuple(rows.shape[1:])}"
        everyone = [data.decode().split(" ", 1) for data in self.all_gather_bytes(mine.encode())]
        check_equal_arrays([form for _, form in everyone])
        sizes = [int(size) for size, _ in everyone]
        (whole,) = self.gather_rows([rows], sizes)
        return whole, sum(sizes[: self.worker_index])

    def explain_failure(self, error: BaseException) -> BaseException:
        """Returns the kdist error that caused `error`, if any, because Keras may have wrapped it."""
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, KdistError):
                return seen
            seen = seen.__cause__ or seen.__context__
        return self._lost_error() if self._aborted else error

    def check_intact(self, finishes: bool = False) -> None:
        if finishes and self._nccl:
            torch.cuda.synchronize()
        if self._aborted:
            raise self._lost_error()

    def _lost_error(self) -> Exception:
        return self.channel.lost_error(self.channel.wait_for_loss(0.0))

    def _abort(self, index: int, loss: Loss) -> None:
        if loss.is_sudden:
            # Set this first, because later results may lack the contribution of the lost worker.
            self._aborted = True
            abort_nccl()

    def close(self) -> None:
        """Leaves the group, without an error on workers that continue."""
        super().close()
        # gloo cannot cancel an operation, and its destructor would wait for it, for example after Ctrl-C.
        if self._stuck or (interrupts.is_pressed and self.waits_in("")):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + signal.SIGINT if interrupts.is_pressed else 1)
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
            keras_hooks.claim_process_group(False)

    def _group(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        return None if tensor.is_cuda else self._cpu_group

    def _is_queued(self, tensor: torch.Tensor) -> bool:
        """Returns whether the device waits for a collective while Python continues."""
        return self._nccl and tensor.is_cuda

    def _finish(self, work: dist.Work | Sum, tensor: torch.Tensor) -> None:
        if isinstance(work, Sum):
            self._finish_sum(work)
            return
        self._finish_sums()
        self._pending = work
        if self._is_queued(tensor):
            work.wait()  # returns once it is enqueued
            self.check_intact()
            return
        while True:
            try:
                work.wait(_LOOK)
                break
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises PyTorch's error, unless the collective finished after the timeout
                    break
            self._stuck = True
            self.check_others()  # PyTorch detects a process that died, but not a process that hangs
            self._stuck = False
        self._pending = None

    def _finish_sum(self, work: Sum) -> None:
        self._pending = work
        work.wait()
        self._pending = None  # it refers to the tensor

    def _finish_sums(self) -> None:
        """Finishes sums in shared memory, which progress only here. Another worker may wait for one."""
        while self.memory is not None and self.memory.unfinished:
            self._finish_sum(self.memory.unfinished[0])

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        with whereabouts.inside(what):
            try:
                yield
            except RuntimeError as error:
                explained = error if isinstance(error, KdistError) else self._explanation(error)
                if explained is error:
                    raise
                raise explained from error

    def _explanation(self, error: RuntimeError) -> Exception:
        if "imed out" in str(error):
            return WorkerTimeoutError(
                f"A collective timed out. Some workers did not reach {whereabouts.describe_wait()}.",
                received={"this_worker": self.names[self.worker_index], "error": str(error)[:200]},
                hint="Read the logs of the other workers, or allow more time: "
                "kdist.experimental.CommunicationOptions(timeout_seconds=3600)",
            )
        lost = self.channel.wait_for_loss(NOTICE_SECONDS)
        return self.channel.lost_error(lost) if lost else error


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def join(cluster: Cluster, devices: Sequence[str], options: CommunicationOptions) -> JoinedWorkers:
    """Waits until all workers have joined; see `Backend.create_runtime`. Later calls return the same object."""

    def connect(open_channel: OpenChannel, timeout: float) -> JoinedWorkers:
        if dist.is_initialized():
            return _adopt(cluster, devices, open_channel)
        return _join(cluster, devices, options, open_channel, timeout)

    return join_once(cluster, options.timeout_seconds, connect)


def _join(
    cluster: Cluster,
    devices: Sequence[str],
    options: CommunicationOptions,
    open_channel: OpenChannel,
    timeout: float,
) -> JoinedWorkers:
    _, channel = open_channel(None if cluster.coordinator_taken else cluster.coordinator)
    store, nccl = open_store(cluster, devices, timeout, channel.gather_json)
    rings = options.implementation is CommunicationImplementation.RING
    if rings and nccl:
        nccl = False
        why = "gloo connects the GPUs and chooses its algorithm."
        hint_ignored("implementation=RING", why, cluster.worker_index)
    _set_current_gpu(devices)
    if nccl:
        choose_nccl_interface(cluster)
    # A user's choice of the interface has priority.
    interface = environment.get("GLOO_SOCKET_IFNAME") or interface_towards(cluster)
    with environment.patched(GLOO_SOCKET_IFNAME=interface):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=store,
            rank=cluster.worker_index,
            world_size=cluster.num_workers,
            timeout=timedelta(seconds=options.timeout_seconds or timeouts.engine_timeout()),
            device_id=torch_device(devices[0]) if nccl else None,
        )
    return JoinedWorkers(cluster, channel, nccl, shares_memory=not rings)


def _adopt(cluster: Cluster, devices: Sequence[str], open_channel: OpenChannel) -> JoinedWorkers:
    """Uses the process group that the user has created."""
    if (dist.get_rank(), dist.get_world_size()) != (cluster.worker_index, cluster.num_workers):
        raise StrategyScopeError(
            "The existing process group does not match the cluster of the strategy.",
            received={
                "rank": dist.get_rank(),
                "world_size": dist.get_world_size(),
                "cluster": cluster.worker_names,
                "worker_index": cluster.worker_index,
            },
            hint="Remove your call of `torch.distributed.init_process_group`: kdist calls it.",
        )
    _, channel = open_channel(None)
    compare_devices(cluster, channel.gather_json(describe_devices(devices)))
    _set_current_gpu(devices)
    # `get_backend` would return "undefined" for a group that was created without a backend name.
    group = dist.distributed_c10d._get_default_group()
    cpu, gpu = (backend_of(kind, group) for kind in ("cpu", "cuda"))
    cpu_group = None if cpu is not None else dist.new_group(backend="gloo")
    nccl = gpu is not None and gpu.name() == "nccl"
    return JoinedWorkers(cluster, channel, nccl, False, cpu_group=cpu_group)


def _set_current_gpu(devices: Sequence[str]) -> None:
    if devices[0].startswith("gpu:"):
        torch.cuda.set_device(torch_device(devices[0]))
