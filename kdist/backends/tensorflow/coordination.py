"""`NativeCoordination`: training with TensorFlow's parameter servers, controlled by one coordinator."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import executor as eager_executor

from kdist import keras_hooks
from kdist.arrays.types import Args, Function, Kwargs
from kdist.backends.coordination import Coordination, PerWorkerValues, RemoteValue, join_threads
from kdist.backends.tensorflow import scheduled, tasks
from kdist.backends.tensorflow.effects import ClosureScope
from kdist.backends.tensorflow.functions import converted
from kdist.backends.tensorflow.per_worker import Values, per_worker
from kdist.backends.tensorflow.served import Placement
from kdist.cluster import environment, logs
from kdist.cluster.roles import ServerCluster
from kdist.context import ReplicaContext, StrategyLike, cross_replica
from kdist.errors import WorkerLostError


class _Lost(Exception):
    """Raised if a worker is lost, or another process has replaced it."""


class NativeCoordination(Coordination):
    """Controls each worker from one thread. TensorFlow runs the functions and transfers the tensors.

    The argument `synchronous` is always `False`; see `SynchronousRuntime`.
    """

    end_of_data = tf.errors.OutOfRangeError
    places_variables = True

    def __init__(
        self,
        strategy: StrategyLike,
        closures: Any,
        cluster: ServerCluster,
        partitioner: Callable[..., Sequence[int]] | None,
        synchronous: bool,
        timeout: float,
    ) -> None:
        environment.set_default("GRPC_FAIL_FAST", "use_caller")
        self._strategy = strategy
        self.closures = closures
        self._workers, self._servers = tasks.of(cluster)
        self.num_workers, self.num_servers = len(self._workers), len(self._servers)
        tasks.require([*self._workers, *self._servers], timeout)
        # Only connects to the tasks. This class schedules and retries functions itself.
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver
        with logs.keeping_root_handlers():  # the strategy's first log message adds one
            self.native = tf.distribute.ParameterServerStrategy(
                resolver(tasks.native_spec(cluster), rpc_layer="grpc")
            )
        self.placement = Placement([server.device for server in self._servers], partitioner)
        self._commits = threading.Lock()
        self._recovery = threading.Lock()
        self.incarnations = [0] * self.num_workers
        """How many times each worker was replaced."""
        self._threads = [
            threading.Thread(target=self._drive, args=(i,), name=f"kdist {task.name}", daemon=True)
            for i, task in enumerate(self._workers)
        ]
        self._threads.append(threading.Thread(target=self._watch, name="kdist servers", daemon=True))
        for thread in self._threads:
            thread.start()

    def scope(self) -> AbstractContextManager[None]:
        return self.placement.scope()

    def in_closure(self) -> bool:
        return isinstance(keras_hooks.stateless_scope(), ClosureScope)

    def run(self, strategy: StrategyLike, fn: Function, args: Args, kwargs: Kwargs) -> object:
        if hasattr(fn, "python_function"):
            fn = fn.python_function
        with ReplicaContext(strategy, 0):
            return converted(fn)(*args, **kwargs)

    def schedule(
        self,
        fn: Function,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        done: Callable[[Any], None] | None = None,
    ) -> RemoteValue:
        call = scheduled.Call(fn, tuple(args), dict(kwargs))
        program: scheduled.Compiled | Exception
        try:
            program = scheduled.compiled(self, fn, call.signature)
        except Exception as error:  # an error of the function, handled like an error on a worker
            program = error
        return self.closures.add(program, call.tensors, {}, done)

    @contextlib.contextmanager
    def trace(self) -> Iterator[ClosureScope]:
        """A context manager for tracing. It yields the scope that records the function's changes."""
        with ClosureScope(self._initialize) as scope, keras_hooks.taking_gradients(self._take):
            yield scope

    def _take(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices | None],
        variables: list[keras.Variable],
    ) -> None:
        if not optimizer.built:
            with self._outside():
                keras_hooks.build_optimizer(optimizer, variables)
        scope: Any = keras_hooks.stateless_scope()
        scope.take_gradients(optimizer, grads, variables)

    def _initialize(self, variable: keras.Variable) -> None:
        """Initializes a variable that a scheduled function created, because Keras defers it."""
        with self._outside(), keras.StatelessScope():
            pass

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        with (
            keras_hooks.without_scope(),
            tf.init_scope(),
            cross_replica(self._strategy),
            self.placement.scope(),
        ):
            yield

    def create_per_worker_dataset(self, dataset_fn: object) -> PerWorkerValues:
        return per_worker(dataset_fn, self.num_workers)

    def close(self) -> None:
        self.closures.close()
        join_threads(self._threads)

    def _drive(self, index: int) -> None:
        """Runs scheduled functions on one worker until the job ends."""
        executor = eager_executor.new_executor(enable_async=False)
        while not self.closures.is_closed:
            closure = self.closures.take(tasks.PATIENCE)
            if closure is None:
                continue
            try:
                with eager_context.executor_scope(executor):
                    value = self._execute(index, closure.fn, closure.args)
                self.closures.end(closure, value)
            except _Lost:
                self.closures.again(closure)
                self._recover(index)
            except BaseException as error:
                self.closures.end(closure, error=error)

    def _execute(
        self, index: int, compiled: scheduled.Compiled | Exception, tensors: Sequence[tf.Tensor | Values]
    ) -> object:
        """Runs a function on a worker, and commits its changes after all of them have left the worker."""
        if isinstance(compiled, Exception):
            raise compiled
        try:
            with tf.device(self._workers[index].device):
                inputs = [t.on(self, index) if isinstance(t, Values) else t for t in tensors]
                outputs, messages = compiled.program(tf.constant(index), *inputs)
            with tf.device(tasks.COORDINATOR):
                outputs = [np.array(tf.identity(output)) for output in outputs]
            staged = []
            for message, device in zip(messages, compiled.plan.devices, strict=True):
                with tf.device(device):
                    staged.append(tf.identity(message))
        except tf.errors.OpError as error:
            raise self._explained(index, error) from error
        if staged:
            with self._commits, tf.device(tasks.COORDINATOR):
                try:
                    compiled.plan.commit(staged)
                except tf.errors.OpError as error:
                    raise self._lost_soon() or error from error
        return compiled.packed(outputs)

    def _explained(self, index: int, error: tf.errors.OpError) -> BaseException:
        """Returns the error of a lost server, a `_Lost` error of the worker, or the function's own error."""
        text = str(error)
        if "/job:ps" in text or isinstance(error, tf.errors.UnavailableError):
            lost = self._lost_server()
            if lost is not None:
                return lost
        of_connection = isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError))
        if of_connection or any(word in text for word in _REPLACED) or not self._workers[index].answers():
            return _Lost(text)
        return error

    def _lost_server(self) -> WorkerLostError | None:
        lost = tasks.lost(self._servers)
        return tasks.lost_error(lost) if lost else None

    def _lost_soon(self) -> WorkerLostError | None:
        """Returns the error for a server that is exiting. Its connections close before its port does."""
        for _ in range(_MOMENTS):
            if (lost := self._lost_server()) is not None:
                return lost
            time.sleep(tasks.PATIENCE)
        return None

    def _watch(self) -> None:
        """Fails the job if a server is lost, even if no call uses the server."""
        while not self.closures.is_closed:
            time.sleep(1.0)
            lost = self._lost_server()
            if lost is not None:
                self.closures.fail(lost)
                return

    def _recover(self, index: int) -> None:
        """Waits until a process answers at the worker's address, and reconnects."""
        # TensorFlow connects to all tasks. If a server is missing, this call hangs and the job cannot end.
        needed = [self._workers[index], *self._servers]
        while not self.closures.is_closed:
            time.sleep(tasks.PATIENCE)
            if not all(task.answers() for task in needed):
                continue
            with self._recovery, contextlib.suppress(tf.errors.OpError):
                context = eager_context.context()
                context.update_server_def(context.get_server_def())
                self.incarnations[index] += 1
                return


_MOMENTS = 25  # checks every `tasks.PATIENCE` seconds, after a call to a server has failed
# TensorFlow's errors after a worker was restarted.
_REPLACED = (
    "unknown device",
    "Primary device is not remote",
    "Unable to find the relevant tensor remote_handle",
    "Unable to find a context_id",
    "is neither a type of a primitive operation nor a name of a function registered",
)
