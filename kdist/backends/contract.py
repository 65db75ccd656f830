"""What a backend must do: the abstract classes that the folders of the three backends fill in.

A strategy decides *which* devices and workers take part; a backend knows *how*. `Backend` creates devices and
joins workers, `Runtime` is what one strategy holds of it, and a `StepFunction` runs the steps of one model.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kdist import tracing
from kdist.arrays.splitting import split_rows
from kdist.backends import stalls
from kdist.backends.workers import Workers
from kdist.communication.cross_device_ops import CrossDeviceOps
from kdist.communication.options import CommunicationOptions
from kdist.context import StrategyLike
from kdist.errors import KdistError, UnsupportedError
from kdist.topology import Sharded, Topology


@dataclass(frozen=True)
class ReplicaBatches:
    """A global batch, as the replicas of one worker consume it in one step.

    Args:
        parts: One batch for each local replica, from `Runtime.place` and for this step alone. In Keras's data form:
            `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        split: Which rows of the global batch each of all replicas has: `Runtime.split`, or all of them for each.
    """

    parts: Sequence[Any]
    split: Sequence[tuple[int, int]]


class Backend(ABC):
    """One Keras backend. `kdist.backends.get_backend` creates one per process."""

    name: str
    native_moments: bool = False
    """Whether Keras's BatchNormalization can be synchronized by the backend itself."""
    steps_build: bool = False
    """Whether the step of a model can create its variables: where it cannot, Keras builds every model before."""
    keeps_batches: bool = False
    """Whether what `native_batches` returns serves all epochs of a `fit`."""
    coordination_engine: Callable[[], Any] | None = None
    """Makes what kdist's own parameter servers need, an `Engine`; `None` where the engine has servers itself."""
    native_coordination: Callable[..., Any] | None = None
    """Makes the `Coordination` of an engine that has servers itself, as `OwnCoordination` is made."""
    synchronous_runtime: Callable[..., Any] | None = None
    """Makes the `Runtime` of such an engine's workers, of which each has a replica, and servers hold the variables."""
    start_server: Callable[..., Any] | None = None
    """Starts a task of such an engine, by the cluster's specification, the job, the index, and its configuration."""

    @abstractmethod
    def native_batches(self, adapter: Any) -> Any:
        """Returns the batches that Keras's training loop reads from a data adapter on this backend."""

    def join_predictions(self, batches: Sequence[Any]) -> Any:
        """Concatenates the outputs of all batches into the arrays that `predict` returns."""
        import keras
        import numpy as np

        return keras.tree.map_structure(
            lambda *parts: np.concatenate(list(map(keras.ops.convert_to_numpy, parts))), *batches
        )

    @abstractmethod
    def list_devices(self, kind: str | None = None) -> tuple[str, ...]:
        """Returns the devices of this process, e.g. `("cpu:0",)` or `("gpu:0", "gpu:1")`.

        Those of a kind, `"cpu"`, `"gpu"` or `"tpu"`; of `None` the accelerators, or the CPU where there are none.
        """

    @abstractmethod
    def require_devices(self, devices: Sequence[str]) -> tuple[str, ...]:
        """Checks that the devices exist, and creates logical CPU devices if necessary.

        Args:
            devices: Names in any spelling of the field: `"cpu:1"`, `"/gpu:0"`, `"GPU:0"`,
                `"/job:localhost/device:CPU:0"`.

        Returns:
            The same devices in the short form, `"cpu:1"`.

        Raises:
            DeviceError: A device is not there, or it is too late to create it.
        """

    def own_devices(self, names: Sequence[str], num_workers: int) -> tuple[str, ...]:
        """Returns the short names of this worker's devices, given all device names of `keras.distribution`."""
        kind, each = names[0].split(":")[0], len(names) // num_workers
        return tuple(names) if num_workers == 1 else tuple(f"{kind}:{i}" for i in range(each))

    @abstractmethod
    def create_runtime(
        self,
        topology: Topology,
        options: CommunicationOptions | None = None,
        ops: CrossDeviceOps | None = None,
    ) -> Runtime:
        """Joins the workers of the cluster, if there is one, and returns the runtime of a strategy.

        Blocks until all workers are there.

        Args:
            topology: Who computes, and who holds the variables.
            options: What the user wishes of the collectives; what cannot be chosen is a hint, of which a warning tells.
            ops: Which of the engine's ways to add up over the devices of one worker, of the same kind.

        Raises:
            WorkerTimeoutError: A worker did not come in time; names it.
            DeviceError: A device is not there.
        """

    def seed_shuffling(self) -> None:  # noqa: B027
        """Sets a random state for shuffling arrays if the backend has none that `random_state` can return."""

    @abstractmethod
    def random_state(self) -> bytes:
        """Returns the state of the random generator that shuffles arrays in Keras's data adapter."""

    @abstractmethod
    def set_random_state(self, state: bytes) -> None:
        """Sets the state that `random_state` returned on another worker."""

    @abstractmethod
    def function(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Compiles a function for the cross-replica context; see `kdist.function`."""

    @abstractmethod
    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        """Returns a function that computes a loss and its gradients; see `kdist.value_and_grad`."""

    def numpy_dataset(self, arrays: Any) -> Any:
        """Returns a dataset of the rows of NumPy arrays, in the backend's format; `None` if it has no datasets."""
        return None


class Runtime(ABC):
    """The devices and workers of one strategy on a backend, with one replica per local device."""

    sees_all_rows: bool = False
    """Whether a model's step is one program that sees the rows of all replicas."""

    exchanges_in_programs: bool = False
    """Whether a step is one program with the exchange inside: nobody can tell how long computing took by itself."""

    needs_equal_shapes: bool = False
    """Whether batches of all replicas must have the same shapes, as parts of one array; a sparse one has no parts."""

    def __init__(self, topology: Topology, group: Workers) -> None:
        self.topology = topology
        self.devices = topology.devices
        self.group = group
        self.num_workers = group.num_workers
        self.worker_index = group.worker_index
        tracing.begin(self.worker_index)

    @property
    def num_replicas(self) -> int:
        """Number of replicas over all workers; every worker has the same number of devices."""
        return len(self.devices) * self.num_workers

    @property
    def communication(self) -> str:
        """The library for collectives between workers, such as "gloo" or "nccl"; empty with one worker."""
        return self.group.communication

    @property
    def replica_ids(self) -> range:
        """The ids of this worker's replicas, counted over all workers."""
        first = self.worker_index * len(self.devices)
        return range(first, first + len(self.devices))

    def split(self, num_rows: int) -> list[tuple[int, int]]:
        """Returns the range of rows of each replica in a global batch; see `split_rows`."""
        return split_rows(num_rows, self.num_replicas, self.needs_equal_shapes)

    def note_even(self, batch: Any) -> None:
        """Receives a batch of a distributed dataset if its parts have the same shapes on all workers."""
        return

    @abstractmethod
    def scope(self) -> AbstractContextManager[Any]:
        """A context manager for the strategy's scope: variables created inside belong to the replicas."""

    def suspended(self) -> AbstractContextManager[Any]:
        """A context manager that disables `scope`, for models that do not belong to the strategy."""
        return contextlib.nullcontext()

    @property
    def can_exchange(self) -> bool:
        """Whether workers can exchange messages now; false while a function is traced."""
        return True

    def traced(self, iterator: Any) -> Any:
        """Returns a substitute for a distributed iterator in a function that is traced, with the same methods.

        `None` where it is read as it is.
        """
        return None

    def element_of(self, iterator: Any) -> Any:
        """Returns a substitute for a distributed iterator as an argument of a `tf.function`.

        Raises:
            UnsupportedError: The backend is not TensorFlow.
        """
        raise UnsupportedError(
            "tf.function received a distributed iterator, but the backend is not TensorFlow.",
            received={"argument": type(iterator).__name__},
            hint="Use kdist.function instead of tf.function, and kdist.value_and_grad instead of tf.GradientTape.",
        )

    def begin_loop(self) -> None:
        """Called when a Python loop over a distributed dataset begins.

        Raises:
            StrategyScopeError: In a function that is being traced, of which the loop would be part without end.
        """
        return

    def element_spec(self, part: Any, inner_shapes: list[Any] | None) -> Any:
        """Returns the specs of the elements of a distributed dataset.

        Args:
            part: A batch of one replica.
            inner_shapes: The shape of a row of each array, where the dataset knows them.
        """
        import keras

        from kdist.arrays import rows

        is_single = rows.is_single(part)

        def spec(leaf: Any) -> Any:
            if leaf is None or not hasattr(leaf, "dtype"):
                return leaf
            try:
                dtype = keras.backend.standardize_dtype(leaf.dtype)
            except ValueError:  # strings
                return None
            return keras.KerasTensor(tuple(leaf.shape) if is_single else (None, *leaf.shape[1:]), dtype)

        return keras.tree.map_structure(spec, part)

    @abstractmethod
    def place(self, parts: Sequence[Any]) -> list[Any]:
        """Copies one batch per local replica to its device, often before the step and in another thread.

        The arrays are NumPy's or any framework's, with `None` for none. They may be the user's, who may write to them
        again as soon as this returns. What the backend has no type for (strings) stays as it is.
        """

    def place_for_step(self, parts: Sequence[Any]) -> list[Any]:
        """Does the same right before a step: the parts are for this step only, and no other code reads them."""
        return self.place(parts)

    @abstractmethod
    def run(
        self, strategy: StrategyLike, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sequence[Any]:
        """Calls a user's function in every local replica, and returns one result per replica.

        What it writes to Keras variables is aggregated at its end. Of a `DistributedValues` in the arguments each
        replica gets its component.
        """

    @abstractmethod
    def to_holder(self, parts: Sequence[Any]) -> list[Any]:
        """Copies tensors of the local replicas to the first device that holds variables."""

    @abstractmethod
    def sum_over_workers(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums tensors of equal shapes over the workers. All must call it."""

    @abstractmethod
    def gather_over_workers(self, tensor: Any) -> Any:
        """Concatenates the rows of the workers' tensors, in the order of the workers. Row counts can differ."""

    @abstractmethod
    def step_function(self, model: Any, kind: str) -> StepFunction:
        """Returns the function that runs the training, test or prediction steps of a model.

        `"train"` and `"test"` return logs, `"predict"` all rows, on every worker.
        """

    @property
    def all_devices(self) -> list[str]:
        """The names in `keras.distribution` of the devices of all workers, starting with worker 0."""
        kind = self.devices[0].split(":")[0]
        return (
            list(self.devices) if self.num_workers == 1 else [f"{kind}:{i}" for i in range(self.num_replicas)]
        )

    @property
    def takes_variables(self) -> bool:
        """Whether new variables need `broadcast_variables`."""
        return self.num_workers > 1 or isinstance(self.topology.storage, Sharded)

    @property
    def divides_over_workers(self) -> bool:
        """Whether variables are sharded over workers, so that all workers must read and save them together."""
        return self.num_workers > 1 and isinstance(self.topology.storage, Sharded)

    def kept_whole(self, variables: Sequence[Any]) -> AbstractContextManager[Any]:
        """A context manager in which one worker can read whole variables. All workers must enter it."""
        return contextlib.nullcontext()

    @abstractmethod
    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Sends the chief's values to all workers. All must pass their Keras variables in the same order.

        New ones are divided, where the topology says so. What is divided already has one value on all workers.
        """

    def local_values(self, variable: Any) -> Sequence[Any]:
        """Returns this worker's values of a Keras variable: one value, or one per replica."""
        return [variable.value]

    @contextlib.contextmanager
    def engine_errors(self) -> Iterator[None]:
        """A context manager that replaces errors of the backend by an error that names the lost worker."""
        try:
            with stalls.entered():
                yield
                self.group.check_intact()
        except KdistError:
            raise
        except Exception as error:
            explained = self.group.explain_failure(error)
            if explained is error:
                raise
            raise explained from error


class StepFunction(ABC):
    """Runs the steps of one model. The training loop keeps it until the model is compiled again.

    A context manager: steps run inside it, and on leaving the state is in the model's variables, whatever
    happened.
    """

    def __enter__(self) -> StepFunction:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc: object) -> None:
        self.sync()

    @abstractmethod
    def __call__(self, batches: Sequence[ReplicaBatches]) -> Any:
        """Runs one step per batch. Returns the logs of the last step (train, test), or the rows of all (predict)."""

    def sync(self) -> None:
        """Writes the state into the model's variables. Called before other code can read them."""
        return
