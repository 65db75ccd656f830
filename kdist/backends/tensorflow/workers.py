"""Joins the workers of a cluster on TensorFlow, and exchanges values and messages between them."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy
from tensorflow.python.eager import context as eager_context

from kdist import unsupported
from kdist.backends import workers
from kdist.backends.tensorflow import rendezvous
from kdist.backends.tensorflow.collectives import SumsOfGraphs
from kdist.backends.workers import in_parts
from kdist.cluster import Cluster, choose_nccl_interface
from kdist.communication.options import CommunicationImplementation, CommunicationOptions
from kdist.control.channel import NOTICE_SECONDS, Channel
from kdist.control.joining import OpenChannel, join_once
from kdist.control.loss_reasons import DIED, REASONS, Loss
from kdist.errors import DeviceError, KdistError

if TYPE_CHECKING:
    import keras


_ENGINE = workers.folders_of_engine(tf.__file__, __file__)
# A pipeline that waits for its data does not wait for other workers.
_DATA = os.path.join(os.path.dirname(tf.__file__), "python", "data", "")
_SUMMABLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)

_OF_CONNECTIONS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
    tf.errors.DeadlineExceededError,
)
# The collectives of another worker have failed.
_ABORTED = "aborted by: "


class Workers(workers.Workers):
    """A single worker: this process."""

    sums_in_memory: SumsOfGraphs | None = None
    """Sums tensors if all workers are on one machine and each one has a CPU device."""

    def all_gather_rows(self, local: tf.Tensor, sizes: Sequence[int] | tf.Tensor) -> tf.Tensor:
        """Concatenates the rows of every worker; see `JoinedWorkers.all_gather_rows`."""
        return local

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        return value

    def of_chief(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the chief's value of an eager tensor. Its shape can differ from this worker's."""
        return tensor

    def broadcast(self, variables: Sequence[keras.Variable]) -> None:
        """Sends the chief's values of Keras variables to all workers."""


class JoinedWorkers(workers.JoinedWorkers, Workers):
    """The workers of a cluster, joined by `tf.distribute.MultiWorkerMirroredStrategy`.

    Tensors use the native strategy's collectives.
    """

    def __init__(self, cluster: Cluster, native: tf.distribute.Strategy, channel: Channel) -> None:
        super().__init__(cluster, channel)
        self.native = native
        self._per_worker = len(native.extended.worker_devices)
        self._sums: dict[tuple[tf.DType, int], Callable[[tf.Tensor], tf.Tensor]] = {}
        channel.on_loss(self._abort)
        self._stalls.start()

    def share_memory(self, is_wanted: bool) -> None:
        """Connects the memory of all workers if all of them want it."""
        self.connect_memory(is_wanted)
        if self.memory is not None:
            self.sums_in_memory = SumsOfGraphs(self.memory, self.native)

    def _abort(self, index: int, loss: Loss) -> None:
        """Ends collectives that wait for a lost worker, so that all backends report it at the same time."""
        if loss.is_cause:
            eager_context.context().abort_collective_ops(
                tf.errors.UNAVAILABLE, f"{self.names[index]}: {loss.reason}"
            )

    def all_gather_rows(self, local: tf.Tensor, sizes: Sequence[int] | tf.Tensor) -> tf.Tensor:
        """Concatenates the rows of all workers, also in a graph. `sizes` has each worker's row count."""
        padding = tf.reduce_max(sizes) - sizes[self.worker_index]
        everyone = self._gather(tf.pad(local, [[0, padding]] + [[0, 0]] * (len(local.shape) - 1)))
        return tf.concat([everyone[i][: sizes[i]] for i in range(self.num_workers)], axis=0)

    def waits_in(self, filename: str) -> bool:
        """Returns whether a thread in this file waits inside TensorFlow, but not for data."""
        return filename.startswith(_ENGINE) and not filename.startswith(_DATA)

    def _gather(self, value: tf.Tensor) -> tf.Tensor:
        """Stacks tensors of the same shape, one per worker.

        Every worker fills its own row, and a sum combines the rows. Unlike `tf.distribute`'s all-gather,
        TensorFlow traces this only once and not in every call.
        """
        rows = [value if i == self.worker_index else tf.zeros_like(value) for i in range(self.num_workers)]
        return self.sum(tf.stack(rows))

    def sum(self, value: tf.Tensor) -> tf.Tensor:
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
        mine = tf.io.serialize_tensor(tensor).numpy() if self.worker_index == 0 else b""
        return tf.io.parse_tensor(self.all_gather_bytes(mine)[0], tensor.dtype)

    def broadcast(self, variables: Sequence[keras.Variable]) -> None:
        groups: dict[tf.DType, list[keras.Variable]] = {}
        for variable in variables:
            groups.setdefault(tf.as_dtype(variable.dtype), []).append(variable)
        for members in itertools.chain.from_iterable(
            in_parts(group, _num_bytes) for group in groups.values()
        ):
            values = [tf.convert_to_tensor(variable.value) for variable in members]
            flat = tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)
            flat = self.sum(flat if self.worker_index == 0 else tf.zeros_like(flat))
            sizes = [int(tf.size(value)) for value in values]
            for variable, value, part in zip(members, values, tf.split(flat, sizes), strict=True):
                variable.assign(tf.reshape(part, value.shape))

    def explain_failure(self, error: BaseException) -> BaseException:
        text = str(error)
        failure = None if self.sums_in_memory is None else self.sums_in_memory.failure_of(text)
        if isinstance(failure, KdistError):
            return failure
        others = set(range(self.num_workers)) - {self.worker_index}
        named = {int(task) for task in rendezvous.TASK.findall(text)} & others
        is_of_connections = isinstance(error, _OF_CONNECTIONS)
        if failure is None and not (named or is_of_connections):
            return error
        # A layer, pipeline or callback can raise similar errors, so check whether a worker is lost.
        lost = self.channel.wait_for_loss(NOTICE_SECONDS)
        is_certain = is_of_connections and (named or _ABORTED in text)
        if not lost and is_certain:
            lost = dict.fromkeys(named, REASONS[DIED])
        return self.channel.lost_error(lost, str(failure or error)) if lost or is_certain else error


def _num_bytes(variable: keras.Variable) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def join(
    cluster: Cluster, options: CommunicationOptions, devices: Sequence[str]
) -> tuple[tf.distribute.Strategy, JoinedWorkers]:
    """Waits for all workers; see `Backend.create_runtime`. Returns the native strategy and the workers."""
    if len(devices) > 1 and devices[0].startswith("cpu:"):
        gap = unsupported.find("MultiWorkerMirroredStrategy", "tensorflow", "devices")
        assert gap is not None
        raise gap.error({"devices": tuple(devices)}, DeviceError)

    def connect(open_channel: OpenChannel, timeout: float) -> JoinedWorkers:
        addresses, channel = rendezvous.open_channel(cluster, open_channel)
        native = _connect(cluster, addresses, options, devices, timeout)
        joined = JoinedWorkers(cluster, native, channel)
        rings = options.implementation is CommunicationImplementation.RING
        is_gpu = devices[0].startswith("gpu:")
        joined.communication = "nccl" if is_gpu and not rings else "grpc"
        joined.share_memory(not is_gpu and not rings)
        return joined

    joined = join_once(cluster, options.timeout_seconds, connect)
    return joined.native, joined


def _connect(
    cluster: Cluster,
    addresses: Sequence[str],
    options: CommunicationOptions,
    devices: Sequence[str],
    timeout: float,
) -> tf.distribute.Strategy:
    if devices[0].startswith("gpu:"):
        choose_nccl_interface(cluster)
    rendezvous.configure_heartbeats(len(addresses), timeout)
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
        raise rendezvous.joining_error(error, cluster, timeout) from error
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
