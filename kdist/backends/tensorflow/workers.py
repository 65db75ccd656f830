"""Joining the workers of a cluster on TensorFlow, and what they tell each other."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy
from tensorflow.python.eager import context as eager_context

from kdist import gaps
from kdist.backends import stalls, whereabouts, workers
from kdist.backends.joining import join_once
from kdist.backends.mail import Mail
from kdist.backends.tensorflow import meeting
from kdist.backends.tensorflow.store import ServiceStore
from kdist.cluster import Cluster, choose_nccl_interface, liveness
from kdist.communication.options import CommunicationImplementation, CommunicationOptions
from kdist.errors import DeviceError

_HUNG = "kdist/hung"
_ENGINE = workers.folders_of_engine(tf.__file__, __file__)
# A pipeline waits for its data.
_DATA = os.path.join(os.path.dirname(tf.__file__), "python", "data", "")
_SHORT = 1024
_SUMMABLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)

# How long the server of a worker may take to answer that it is there: Python waits for it.
_HEALTH_MS = 200

_SERVICE = "CoordinationService"
_OF_CONNECTIONS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)
# Share of the heartbeat timeout in which a worker that is lost must be seen to be.
_NAMING = 0.2
_WHY = re.compile(r"aborted by: (.*)")


class Workers(workers.Workers):
    """This process alone."""

    def all_gather_rows(self, local: Any, sizes: Any) -> Any:
        """Concatenates the rows of every worker; see `JoinedWorkers.all_gather_rows`."""
        return local

    def sum(self, value: Any) -> Any:
        """Sums a tensor over the workers."""
        return value

    def of_chief(self, tensor: Any) -> Any:
        """Returns the chief's value of an eager tensor, whose shape may be another than this worker's."""
        return tensor

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Gives every worker the chief's values of Keras variables."""


class JoinedWorkers(workers.JoinedWorkers, Workers):
    """The workers of a cluster, joined by `tf.distribute.MultiWorkerMirroredStrategy`.

    The native strategy's collectives carry what is waited for at once. A message that is begun may take
    `timeout_seconds`; `None` for as long as its sender is there.
    """

    def __init__(
        self, cluster: Cluster, native: tf.distribute.Strategy, timeout_seconds: float | None
    ) -> None:
        super().__init__(cluster, ServiceStore())
        self._others = set(range(self.num_workers)) - {self.worker_index}
        self.native = native
        self._per_worker = len(native.extended.worker_devices)
        self._sums: dict[Any, Any] = {}
        self._sick: dict[int, tuple[float, int]] = {}  # since when, and how often it was seen
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

    def all_gather_rows(self, local: Any, sizes: Any) -> Any:
        """Concatenates the rows of every worker, of given numbers (a list, or a tensor); also in a graph."""
        padding = tf.reduce_max(sizes) - sizes[self.worker_index]
        everyone = self._gather(tf.pad(local, [[0, padding]] + [[0, 0]] * (len(local.shape) - 1)))
        return tf.concat([everyone[i][: sizes[i]] for i in range(self.num_workers)], axis=0)

    def _gather_pieces(self, data: bytes) -> list[bytes]:
        """Gathers short messages in one collective, with their lengths in front."""
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

    def begin_gather_bytes(self, data: bytes) -> Callable[[], list[bytes]]:
        """Gathers in a thread, which asks for the messages while this one goes on.

        Not with a collective, which would have to take its turn among those of steps.
        """
        return self.mail.begin(data)

    def waits_in(self, filename: str) -> bool:
        """Says whether the main thread is inside TensorFlow."""
        return filename.startswith(_ENGINE) and not filename.startswith(_DATA)

    def farewell(self, text: str) -> None:
        """Leaves word in the store."""
        self.store.set(f"{_HUNG}/{self.worker_index}", text.encode())

    def lost(self) -> frozenset[int]:
        """Returns the workers whose heartbeats the coordination service misses."""
        # TensorFlow waits for the service without end, and holds Python's lock meanwhile.
        if self.worker_index != 0 and self._health(0) is None:
            return frozenset()
        try:
            states = eager_context.context().get_task_states([("worker", self.num_workers)])
        except tf.errors.OpError:  # the service has ended with the chief
            return frozenset({0} - {self.worker_index})
        return frozenset(index for index, error in enumerate(states) if error is not None)

    def _health(self, index: int) -> str | None:
        """Asks the server of a worker, which answers whatever Python does there.

        Returns:
            Nothing if it is there, an error if there is nobody, and `None` if it does not answer.
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
        """Gathers as many bytes from each worker, as 32-bit words: collectives know no shorter numbers."""
        words = np.frombuffer(data.ljust(-(-size // 4) * 4, b"\0"), np.int32)
        return [row.tobytes() for row in self._gather(tf.constant(words)).numpy()]

    def _gather(self, value: Any) -> Any:
        """Stacks a tensor of the same shape from each worker.

        A sum in which every worker fills its own row and leaves the others zero: unlike the gathering of
        `tf.distribute`, it is traced once and not at every call.
        """
        rows = [value if i == self.worker_index else tf.zeros_like(value) for i in range(self.num_workers)]
        return self.sum(tf.stack(rows))

    def sum(self, value: Any) -> Any:
        """Sums a tensor over the workers."""
        sent = value if value.dtype in _SUMMABLE else tf.cast(value, tf.int64)
        if not tf.executing_eagerly():
            # TensorFlow gives a function that is called twice in another one the same key for both collectives.
            return tf.cast(self._sum_over_workers(sent), value.dtype)
        key = (sent.dtype, len(sent.shape))
        if key not in self._sums:
            signature = [tf.TensorSpec([None] * len(sent.shape), sent.dtype)]
            self._sums[key] = tf.function(self._sum_over_workers, input_signature=signature)
        return tf.cast(self._sums[key](sent), value.dtype)

    def _sum_over_workers(self, value: Any) -> Any:
        @tf.autograph.experimental.do_not_convert
        def replica() -> Any:
            context = tf.distribute.get_replica_context()
            speaks = tf.get_static_value(context.replica_id_in_sync_group) % self._per_worker == 0
            # A tensor made here lies on the replica's device, from which TensorFlow takes where to reduce.
            mine = tf.identity(value) if speaks else tf.zeros_like(value)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

        return self.native.experimental_local_results(self.native.run(replica))[0]

    def of_chief(self, tensor: Any) -> Any:
        """Returns the chief's value of an eager tensor, whose shape may be another than this worker's."""
        mine = tf.io.serialize_tensor(tensor).numpy() if self.worker_index == 0 else b""
        return tf.io.parse_tensor(self.all_gather_bytes(mine)[0], tensor.dtype)

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Gives every worker the chief's values of Keras variables: one collective a dtype."""
        groups: dict[Any, list[Any]] = {}
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
        """Returns a `WorkerLostError` for an engine error about another worker."""
        text = str(error)
        named = {int(task) for task in meeting.TASK.findall(text)} & self._others
        says_so = isinstance(error, _OF_CONNECTIONS)
        if self.worker_index != 0 and isinstance(error, tf.errors.DeadlineExceededError) and _SERVICE in text:
            named, says_so = {0}, True  # the service is the chief's, which answers no more
        if not (named or says_so):
            return error
        why = _WHY.search(text)
        if not says_so or not (named or why):
            # A layer, a pipeline or a callback may fail with such words, too: only if somebody is gone is it that.
            named = self._find_lost()
            if not named:
                return error
        return self._lost_error(named, why[1] if why else text)

    def _find_lost(self) -> set[int]:
        """Returns the workers that nobody finds at their addresses, giving them some time to go."""
        deadline = time.monotonic() + self._patience * _NAMING
        while not (lost := {index for index in self._others if self._health(index)}):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return lost

    def _lost_error(self, indices: Collection[int], said: str) -> BaseException:
        lost = {index: self._last_words(index) or stalls.DIED for index in indices}
        return stalls.lost_error(self.names, self.worker_index, lost, said)

    def _last_words(self, index: int) -> str | None:
        """Returns what a worker has said of itself before it ended, if anything and if the chief is there."""
        with contextlib.suppress(tf.errors.OpError):
            return self.look_up(f"{_HUNG}/{index}")
        return None

    def check(self, awaited: int) -> None:
        """Raises if a worker is lost: if nobody is at its address, or has not answered for too long.

        Args:
            awaited: The one that is waited for. It may itself be waiting for another, so all are asked for.
        """
        now = time.monotonic()
        for index in self._others:
            health = self._health(index)
            if health == "":
                self._sick.pop(index, None)
                continue
            since, times = self._sick.get(index, (now, 0))
            self._sick[index] = since, times + 1
            if (health and times) or now - since > self._patience:  # one failure may be an accident
                raise self._lost_error([index], health or "no response")


def join(
    cluster: Cluster, options: CommunicationOptions, devices: Sequence[str]
) -> tuple[tf.distribute.Strategy, JoinedWorkers]:
    """Waits for all workers of the cluster and returns the native strategy and the workers.

    Raises:
        WorkerTimeoutError: A worker did not come in time.
        ClusterConfigError: The address of this worker is taken.
        StrategyScopeError: It is too late, or this process has joined another cluster.
        DeviceError: Several CPU devices a worker, which `tf.distribute` cannot do.
    """
    if len(devices) > 1 and devices[0].startswith("cpu:"):
        gap = gaps.find("MultiWorkerMirroredStrategy", "tensorflow", "devices")
        assert gap is not None
        raise gap.error({"devices": tuple(devices)}, DeviceError)

    def connect(timeout: float) -> JoinedWorkers:
        native = _connect(cluster, options, devices, timeout)
        joined = JoinedWorkers(cluster, native, options.timeout_seconds)
        rings = options.implementation is CommunicationImplementation.RING
        joined.communication = "nccl" if devices[0].startswith("gpu:") and not rings else "grpc"
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

    `tf.distribute` broadcasts each value as the variable is created: a collective a variable, which waits
    forever if workers do not create the same ones. kdist compares the models first, and then broadcasts
    all values at once. For the replicas of one worker, the method of the base class is right.
    """
    extended = native.extended
    method = mirrored_strategy.MirroredExtended._get_variable_creator_initial_value
    extended._get_variable_creator_initial_value = method.__get__(extended)


def _restore_sigterm() -> None:
    """Takes SIGTERM back from TensorFlow, whose preemption notifier only makes a note of it: workers are to end."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
