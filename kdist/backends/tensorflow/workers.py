"""Joins the workers of a cluster on TensorFlow, and exchanges values and messages between them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy
from tensorflow.python.eager import context as eager_context

from kdist import gaps
from kdist.backends import stalls, whereabouts, workers
from kdist.backends.joining import join_once
from kdist.backends.mail import Mail
from kdist.backends.tensorflow import meeting
from kdist.backends.tensorflow.collectives import SumsOfGraphs
from kdist.backends.tensorflow.store import ServiceStore
from kdist.cluster import Cluster, choose_nccl_interface, liveness
from kdist.communication.options import CommunicationImplementation, CommunicationOptions
from kdist.errors import DeviceError, KdistError

if TYPE_CHECKING:
    import keras


_HUNG = "kdist/hung"
_LOST = "kdist/lost"
_ENGINE = workers.folders_of_engine(tf.__file__, __file__)
# A pipeline that waits for its data does not wait for other workers.
_DATA = os.path.join(os.path.dirname(tf.__file__), "python", "data", "")
_SHORT = 1024
_SUMMABLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)

# Milliseconds to wait for the answer of a worker's server. The call blocks Python.
_HEALTH_MS = 200

_SERVICE = "CoordinationService"
_OF_CONNECTIONS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)
# The fraction of the heartbeat timeout in which a lost worker must be found.
_NAMING = 0.2
_WHY = re.compile(r"aborted by: (.*)")


class Workers(workers.Workers):
    """A single worker: this process."""

    sums_in_memory: SumsOfGraphs | None = None
    """Sums tensors if all workers are on one machine and each one has a CPU device."""

    def all_gather_rows(self, local: tf.Tensor, sizes: Sequence[int] | tf.Tensor) -> tf.Tensor:
        """Concatenates the rows of every worker; see `JoinedWorkers.all_gather_rows`."""
        return local

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """Sums a tensor over the workers."""
        return value

    def of_chief(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the chief's value of an eager tensor. Its shape can differ from this worker's."""
        return tensor

    def broadcast(self, variables: Sequence[keras.Variable]) -> None:
        """Sends the chief's values of Keras variables to all workers."""


class JoinedWorkers(workers.JoinedWorkers, Workers):
    """The workers of a cluster, joined by `tf.distribute.MultiWorkerMirroredStrategy`.

    Blocking exchanges use the native strategy's collectives. A message in the background can take up to
    `timeout_seconds`. With `None`, it can take as long as its sender is alive.
    """

    def __init__(
        self, cluster: Cluster, native: tf.distribute.Strategy, timeout_seconds: float | None
    ) -> None:
        super().__init__(cluster, ServiceStore())
        self._others = set(range(self.num_workers)) - {self.worker_index}
        self.native = native
        self._per_worker = len(native.extended.worker_devices)
        self._sums: dict[tuple[tf.DType, int], Callable[[tf.Tensor], tf.Tensor]] = {}
        self._sick: dict[int, tuple[float, int]] = {}  # time of the first failure, number of failures
        self._patience = liveness.heartbeat_timeout()
        self.mail = Mail(
            self.store,
            self.names,
            self.worker_index,
            timeout_seconds,
            check=self.check,
            explain=self.explain_failure,
        )
        self._stalls.start()

    def share_memory(self, is_wanted: bool) -> None:
        """Connects the memory of all workers if all of them want it."""
        self.connect_memory(is_wanted)
        if self.memory is not None:
            self.memory.check_others = self._check_all
            self.sums_in_memory = SumsOfGraphs(self.memory, self.native)

    def _check_all(self) -> None:
        if lost := self.lost():
            raise self._lost_error(lost, "it sent no heartbeat")
        self.check(0)

    def all_gather_rows(self, local: tf.Tensor, sizes: Sequence[int] | tf.Tensor) -> tf.Tensor:
        """Concatenates the rows of all workers, also in a graph. `sizes` has each worker's row count."""
        padding = tf.reduce_max(sizes) - sizes[self.worker_index]
        everyone = self._gather(tf.pad(local, [[0, padding]] + [[0, 0]] * (len(local.shape) - 1)))
        return tf.concat([everyone[i][: sizes[i]] for i in range(self.num_workers)], axis=0)

    def _gather_pieces(self, data: bytes) -> list[bytes]:
        """Gathers messages with their lengths. Short messages need only one collective."""
        with whereabouts.inside("an exchange of messages"):
            head = len(data).to_bytes(4, "little") + data[: _SHORT - 4]
            heads = self._gather_words(head, _SHORT)
            lengths = [int.from_bytes(message[:4], "little") for message in heads]
            longest = max(lengths)
            if longest <= _SHORT - 4:
                messages = [message[4:] for message in heads]
            else:
                messages = self._gather_words(data, longest)
        return [message[:length] for message, length in zip(messages, lengths, strict=True)]

    def waits_in(self, filename: str) -> bool:
        """Returns whether a thread in this file waits inside TensorFlow, but not for data."""
        return filename.startswith(_ENGINE) and not filename.startswith(_DATA)

    def farewell(self, text: str) -> None:
        """Writes the reason why this worker ends to the store."""
        self.store.set(f"{_HUNG}/{self.worker_index}", text.encode())

    def lost(self) -> frozenset[int]:
        """Returns the workers that the coordination service reports as failed."""
        # Otherwise, TensorFlow could wait for the service forever while it holds the GIL.
        if self.worker_index != 0 and self._health(0) is None:
            return frozenset()
        try:
            states = eager_context.context().get_task_states([("worker", self.num_workers)])
        except tf.errors.OpError:  # the service has ended with the chief
            return frozenset({0} - {self.worker_index})
        return frozenset(index for index, error in enumerate(states) if error is not None)

    def _health(self, index: int) -> str | None:
        """Checks the server of a worker, which answers even if Python is busy there.

        Returns:
            An empty string if it is healthy, an error text if it is gone, and `None` if it does not answer.
        """
        name = f"/job:worker/replica:0/task:{index}"
        try:
            eager_context.context().check_collective_ops_peer_health(name, timeout_in_ms=_HEALTH_MS)
        except tf.errors.DeadlineExceededError:
            return None
        except tf.errors.OpError as error:
            return str(error.message) or type(error).__name__
        return ""

    def _gather_words(self, data: bytes, size: int) -> list[bytes]:
        """Gathers `size` bytes per worker, as 32-bit words because collectives lack shorter integers."""
        words = np.frombuffer(data.ljust(-(-size // 4) * 4, b"\0"), np.int32)
        return [row.tobytes() for row in self._gather(tf.constant(words)).numpy()]

    def _gather(self, value: tf.Tensor) -> tf.Tensor:
        """Stacks tensors of the same shape, one per worker.

        Every worker fills its own row, and a sum combines the rows. Unlike `tf.distribute`'s all-gather,
        TensorFlow traces this only once and not in every call.
        """
        rows = [value if i == self.worker_index else tf.zeros_like(value) for i in range(self.num_workers)]
        return self.sum(tf.stack(rows))

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """Sums a tensor over the workers."""
        sent = value if value.dtype in _SUMMABLE else tf.cast(value, tf.int64)
        if self.sums_in_memory is not None and self.sums_in_memory.can_sum(sent.dtype):
            return tf.cast(self.sums_in_memory([sent])[0], value.dtype)
        if not tf.executing_eagerly():
            # If a graph calls a function twice, TensorFlow gives both collectives the same key.
            return tf.cast(self._sum_over_workers(sent), value.dtype)
        key = (sent.dtype, len(sent.shape))
        if key not in self._sums:
            signature = [tf.TensorSpec([None] * len(sent.shape), sent.dtype)]
            self._sums[key] = tf.function(self._sum_over_workers, input_signature=signature)
        return tf.cast(self._sums[key](sent), value.dtype)

    def _sum_over_workers(self, value: tf.Tensor) -> tf.Tensor:
        @tf.autograph.experimental.do_not_convert
        def replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            speaks = tf.get_static_value(context.replica_id_in_sync_group) % self._per_worker == 0
            # A new tensor is on the replica's device, and TensorFlow reduces on the device of its input.
            mine = tf.identity(value) if speaks else tf.zeros_like(value)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

        return self.native.experimental_local_results(self.native.run(replica))[0]

    def of_chief(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the chief's value of an eager tensor. Its shape can differ from this worker's."""
        mine = tf.io.serialize_tensor(tensor).numpy() if self.worker_index == 0 else b""
        return tf.io.parse_tensor(self.all_gather_bytes(mine)[0], tensor.dtype)

    def broadcast(self, variables: Sequence[keras.Variable]) -> None:
        """Sends the chief's values of Keras variables to all workers, with one collective per dtype."""
        groups: dict[tf.DType, list[keras.Variable]] = {}
        for variable in variables:
            groups.setdefault(tf.as_dtype(variable.dtype), []).append(variable)
        for members in groups.values():
            values = [tf.convert_to_tensor(variable.value) for variable in members]
            flat = tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)
            flat = self.sum(flat if self.worker_index == 0 else tf.zeros_like(flat))
            sizes = [int(tf.size(value)) for value in values]
            for variable, value, part in zip(members, values, tf.split(flat, sizes), strict=True):
                variable.assign(tf.reshape(part, value.shape))

    def explain_failure(self, error: BaseException) -> BaseException:
        """Returns a `WorkerLostError` for a TensorFlow error about another worker."""
        text = str(error)
        if self.sums_in_memory is not None and (failure := self.sums_in_memory.failure_of(text)) is not None:
            if isinstance(failure, KdistError):
                return failure
            return self._lost_error(self._find_lost(), str(failure))
        named = {int(task) for task in meeting.TASK.findall(text)} & self._others
        says_so = isinstance(error, _OF_CONNECTIONS)
        if self.worker_index != 0 and isinstance(error, tf.errors.DeadlineExceededError) and _SERVICE in text:
            named, says_so = {0}, True  # the service runs on the chief, which does not answer
        if not (named or says_so):
            return error
        why = _WHY.search(text)
        if not says_so or not (named or why):
            # A layer, pipeline or callback can raise similar errors, so check whether a worker is lost.
            named = self._find_lost()
            if not named:
                return error
        return self._lost_error(named, why[1] if why else text)

    def _find_lost(self) -> set[int]:
        """Returns the workers that are gone. Waits a moment, because a worker may still be exiting."""
        deadline = time.monotonic() + self._patience * _NAMING
        while not (lost := {index for index in self._others if self._health(index)}):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return lost

    def _lost_error(self, indices: Collection[int], said: str) -> BaseException:
        causes = self._causes(indices) if self.num_workers > 2 else set(indices)
        lost = {index: self._last_words(index) or stalls.DIED for index in causes}
        return stalls.lost_error(self.names, self.worker_index, lost, said)

    def _causes(self, indices: Collection[int]) -> set[int]:
        """Replaces workers that ended because they had lost others by these others, and notes the result.

        A busy worker notices a loss later, when more workers have ended for the same reason.
        """
        causes: set[int] = set()
        with contextlib.suppress(tf.errors.OpError):  # the store has ended with the chief
            for index in indices:
                noted = {int(cause) for cause in (self.look_up(f"{_LOST}/{index}") or str(index)).split(",")}
                causes |= noted & self._others
            self.store.set(f"{_LOST}/{self.worker_index}", ",".join(map(str, sorted(causes))).encode())
        return causes or set(indices)

    def _last_words(self, index: int) -> str | None:
        """Returns the reason that a worker wrote before it ended, if there is one and the chief is alive."""
        with contextlib.suppress(tf.errors.OpError):
            return self.look_up(f"{_HUNG}/{index}")
        return None

    def check(self, awaited: int) -> None:
        """Raises an error if a worker is gone or has not answered for too long.

        Args:
            awaited: The worker that this process waits for. All are checked, because it may wait for others.
        """
        now = time.monotonic()
        for index in self._others:
            health = self._health(index)
            if health == "":
                self._sick.pop(index, None)
                continue
            since, times = self._sick.get(index, (now, 0))
            self._sick[index] = since, times + 1
            if (health and times) or now - since > self._patience:  # a single failure may be temporary
                raise self._lost_error([index], health or "no response")


def join(
    cluster: Cluster, options: CommunicationOptions, devices: Sequence[str]
) -> tuple[tf.distribute.Strategy, JoinedWorkers]:
    """Waits for all workers of the cluster and returns the native strategy and the workers.

    Raises:
        WorkerTimeoutError: If a worker does not join in time.
        ClusterConfigError: If the address of this worker is in use.
        StrategyScopeError: If TensorFlow has already started, or this process has joined another cluster.
        DeviceError: If a worker has several CPU devices, which `tf.distribute` does not support.
    """
    if len(devices) > 1 and devices[0].startswith("cpu:"):
        gap = gaps.find("MultiWorkerMirroredStrategy", "tensorflow", "devices")
        assert gap is not None
        raise gap.error({"devices": tuple(devices)}, DeviceError)

    def connect(timeout: float) -> JoinedWorkers:
        native = _connect(cluster, options, devices, timeout)
        joined = JoinedWorkers(cluster, native, options.timeout_seconds)
        rings = options.implementation is CommunicationImplementation.RING
        is_gpu = devices[0].startswith("gpu:")
        joined.communication = "nccl" if is_gpu and not rings else "grpc"
        joined.share_memory(not is_gpu and not rings)
        return joined

    joined = join_once(cluster, options.timeout_seconds, connect)
    return joined.native, joined


def _connect(
    cluster: Cluster, options: CommunicationOptions, devices: Sequence[str], timeout: float
) -> tf.distribute.Strategy:
    addresses = meeting.meet(cluster, timeout)
    if devices[0].startswith("gpu:"):
        choose_nccl_interface(cluster)
    meeting.configure_heartbeats(len(addresses), timeout)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(addresses)}),
        task_type="worker",
        task_id=cluster.worker_index,
        rpc_layer=cluster.rpc_layer or "grpc",
        num_accelerators={"GPU": len(devices)} if devices[0].startswith("gpu:") else None,
    )
    native_options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=options.bytes_per_pack,
        timeout_seconds=options.timeout_seconds,
        implementation=tf.distribute.experimental.CommunicationImplementation[options.implementation.name],
    )
    try:
        native = tf.distribute.MultiWorkerMirroredStrategy(resolver, native_options)
    except (RuntimeError, tf.errors.OpError) as error:
        raise meeting.joining_error(error, cluster, timeout) from error
    _create_variables_alone(native)
    _restore_sigterm()
    return native


def _create_variables_alone(native: tf.distribute.Strategy) -> None:
    """Lets each worker create variables without the others, as on the other backends.

    `tf.distribute` broadcasts each new variable with one collective, which hangs if workers create different
    ones. kdist first compares the models, and then broadcasts all values at once. For the replicas of one
    worker, the method of the base class is correct.
    """
    extended = native.extended
    method = mirrored_strategy.MirroredExtended._get_variable_creator_initial_value
    extended._get_variable_creator_initial_value = method.__get__(extended)


def _restore_sigterm() -> None:
    """Restores Python's SIGTERM handler, because TensorFlow's preemption notifier does not end the worker."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
