"""The abstract classes that each of the three backends implements.

A strategy selects devices and workers, and the backend does the work. A `Backend` creates devices and joins
workers, a `Runtime` belongs to one strategy, and a `StepFunction` runs the steps of one model.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kdist import tracing
from kdist.arrays.splitting import split_rows
from kdist.backends.workers import Workers
from kdist.communication import interrupts
from kdist.communication.cross_device_ops import CrossDeviceOps
from kdist.communication.options import CommunicationOptions
from kdist.context import StrategyLike
from kdist.control import stalls
from kdist.errors import KdistError, UnsupportedError
from kdist.topology import LocalParts, Topology

if TYPE_CHECKING:
    import keras

    from kdist.arrays.types import Args, Function, Kwargs, P, R, Shape, Structure, Tensor
    from kdist.backends.coordination import Coordination, Engine
    from kdist.backends.low_rank import LowRank


@dataclass(frozen=True)
class ReplicaBatches:
    """The batches that the replicas of one worker consume in one step.

    Args:
        parts: One batch per local replica, from `Runtime.place`. Valid only for this step. Each batch has
            Keras's format: `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        split: The rows of the global batch for each replica of all workers: `Runtime.split`, or all rows.
    """

    parts: Sequence[Structure]
    split: Sequence[tuple[int, int]]


class DataAdapter(Protocol):
    """Keras's adapter of the data of `fit`, with one method per backend."""

    def get_tf_dataset(self) -> Any: ...
    def get_jax_iterator(self) -> Iterable[Structure]: ...
    def get_torch_dataloader(self) -> Iterable[Structure]: ...


class Backend(ABC):
    """One Keras backend. `kdist.backends.get_backend` creates one per process."""

    name: str
    native_moments: bool = False
    """Whether the backend itself can synchronize Keras's BatchNormalization."""
    steps_build: bool = False
    """Whether a model's step can create variables. If not, Keras builds every model before its first step."""
    keeps_batches: bool = False
    """Whether one result of `native_batches` serves all epochs of a `fit`."""
    coordination_engine: Callable[[], Engine] | None = None
    """Creates the `Engine` of kdist's own parameter servers; `None` if the backend has parameter servers."""
    native_coordination: Callable[..., Coordination] | None = None
    """Creates the `Coordination` of a backend that has parameter servers, instead of `GrpcCoordination`."""
    synchronous_runtime: Callable[..., Runtime] | None = None
    """Creates the `Runtime` for synchronous training with these servers, with one replica per worker."""
    start_server: Function | None = None
    """Starts a task of such a backend, given the cluster specification, job, index and configuration."""

    @abstractmethod
    def native_batches(self, adapter: DataAdapter) -> Iterable[Structure]:
        """Returns the batches that Keras's training loop reads from a data adapter on this backend."""

    def join_predictions(self, batches: Sequence[Structure]) -> Structure:
        """Concatenates the outputs of all batches into the arrays that `predict` returns."""
        import keras
        import numpy as np

        def join(*parts: Any) -> np.ndarray:
            numpy = keras.ops.convert_to_numpy  # it would copy arrays
            return np.concatenate([part if isinstance(part, np.ndarray) else numpy(part) for part in parts])

        return keras.tree.map_structure(join, *batches)

    @abstractmethod
    def list_devices(self, kind: str | None = None) -> tuple[str, ...]:
        """Returns the devices of this process, for example `("cpu:0",)` or `("gpu:0", "gpu:1")`.

        `kind` is `"cpu"`, `"gpu"` or `"tpu"`. By default, returns the accelerators if any, otherwise the CPU.
        """

    @abstractmethod
    def require_devices(self, devices: Sequence[str]) -> tuple[str, ...]:
        """Checks that the devices exist, and creates logical CPU devices if necessary.

        Args:
            devices: Device names in any common spelling, for example `"cpu:1"`, `"/gpu:0"`, `"GPU:0"` or
                `"/job:localhost/device:CPU:0"`.

        Returns:
            The same devices in the short form, `"cpu:1"`.

        Raises:
            DeviceError: If a device does not exist, or it is too late to create it.
        """

    def own_devices(self, names: Sequence[str], num_workers: int) -> tuple[str, ...]:
        """Returns the short names of this worker's devices, given all names in `keras.distribution`."""
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

        Blocks until all workers have joined.

        Args:
            topology: The devices that compute, and the devices that hold the variables.
            options: The user's options for collectives. kdist warns if the backend ignores an option.
            ops: How the backend sums over the devices of one worker.

        Raises:
            WorkerTimeoutError: If a worker does not join in time. The error names the worker.
            DeviceError: If a device does not exist.
            ClusterConfigError: If an address is in use, or two processes have the same worker index.
            WorkerMismatchError: If the workers have different devices.
            StrategyScopeError: If the framework has already started, or this process has joined other workers.
        """

    def seed_shuffling(self) -> None:  # noqa: B027
        """Sets a random state for shuffling arrays if the backend has none that `random_state` can return."""

    @abstractmethod
    def random_state(self) -> bytes:
        """Returns the state of the random generator that shuffles arrays in Keras's data adapter."""

    @abstractmethod
    def set_random_state(self, state: bytes) -> None:
        """Sets the state that `random_state` returned on another worker."""

    def function(self, fn: Callable[P, R], **options: object) -> Callable[P, R]:
        """Compiles a function for the cross-replica context; see `kdist.function`."""
        return fn

    @abstractmethod
    def value_and_grad(
        self, fn: Callable[P, object], variables: Sequence[keras.Variable], has_aux: bool
    ) -> Callable[P, tuple[Structure, list[Tensor | None]]]:
        """Returns a function that computes a loss and its gradients; see `kdist.value_and_grad`."""

    def numpy_dataset(self, arrays: Structure) -> object:
        """Returns a dataset of the rows of NumPy arrays; `None` if the backend has no dataset format."""
        return None


class Runtime(ABC):
    """The devices and workers of one strategy on a backend, with one replica per local device."""

    sees_all_rows: bool = False
    """Whether a model's step is one program that sees the rows of all replicas."""
    exchanges_in_programs: bool = False
    """Whether one program contains the step and its collectives, so that compute time cannot be measured."""
    needs_equal_shapes: bool = False
    """Whether replicas need batches of equal shapes, as parts of one array. Sparse batches are not split."""
    compression: str | None = None
    """The 16-bit dtype in which workers exchange gradients, or `None` for the dtype of each gradient."""
    low_rank: LowRank | None = None
    """The state of PowerSGD, or `None` without it."""

    def __init__(self, topology: Topology, group: Workers) -> None:
        self.topology = topology
        self.devices = topology.devices
        self.group = group
        self.num_workers = group.num_workers
        self.worker_index = group.worker_index
        tracing.begin(self.worker_index)

    @property
    def num_replicas(self) -> int:
        """The number of replicas over all workers. Every worker has the same number of devices."""
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

    def finish_steps(self) -> None:
        """Waits for steps that run in the background, so that the variables contain all of them."""
        return

    def note_even(self, batch: Structure) -> None:
        """Receives a batch of a distributed dataset if its parts have the same shapes on all workers."""
        return

    def scope(self) -> AbstractContextManager[object]:
        """A context manager for the strategy's scope: variables created inside belong to the replicas."""
        return contextlib.nullcontext()

    def suspended(self) -> AbstractContextManager[object]:
        """A context manager that disables `scope`, for models that do not belong to the strategy."""
        return contextlib.nullcontext()

    @property
    def can_exchange(self) -> bool:
        """Whether workers can exchange messages now; false while a function is traced."""
        return True

    def traced(self, iterator: object) -> Any:
        """Returns an object with the methods of a distributed iterator while a function is traced, or `None`."""
        return None

    def element_of(self, iterator: object) -> Any:
        """Returns a substitute for a distributed iterator as an argument of a `tf.function`.

        Raises:
            UnsupportedError: If the backend is not TensorFlow.
        """
        raise UnsupportedError(
            "tf.function received a distributed iterator, but the backend is not TensorFlow.",
            received={"argument": type(iterator).__name__},
            hint="Use kdist.function instead of tf.function, and kdist.value_and_grad instead of tf.GradientTape.",
        )

    def begin_loop(self) -> None:
        """Called when a Python loop over a distributed dataset begins.

        Raises:
            StrategyScopeError: If a function is being traced, because tracing would unroll the loop.
        """
        return

    def element_spec(self, part: Structure, inner_shapes: list[Shape] | None) -> Structure:
        """Returns the specs of the elements of a distributed dataset.

        Args:
            part: A batch of one replica.
            inner_shapes: The shape of a row of each array, if the dataset provides them.
        """
        import keras

        from kdist.arrays import rows

        is_single = rows.is_single(part)

        def spec(leaf: Tensor | None) -> object:
            if leaf is None or not hasattr(leaf, "dtype"):
                return leaf
            try:
                dtype = keras.backend.standardize_dtype(leaf.dtype)
            except ValueError:  # strings
                return None
            return keras.KerasTensor(tuple(leaf.shape) if is_single else (None, *leaf.shape[1:]), dtype)

        return keras.tree.map_structure(spec, part)

    @abstractmethod
    def place(self, parts: Sequence[Structure]) -> list[Structure]:
        """Copies one batch per local replica to its device, often before the step and in another thread.

        A batch can contain NumPy arrays, arrays of any framework, and `None`. They must be copied, because
        the user can write to them after this call. Unsupported types, such as strings, are not changed.
        """

    def place_for_step(self, parts: Sequence[Structure]) -> list[Structure]:
        """Does the same right before a step: the parts are for this step only, and no other code reads them."""
        return self.place(parts)

    @abstractmethod
    def run(self, strategy: StrategyLike, fn: Function, args: Args, kwargs: Kwargs) -> Sequence[Structure]:
        """Calls a user's function in every local replica, and returns one result per replica.

        Each replica gets its component of a `DistributedValues` in the arguments. When the function returns,
        its writes to Keras variables are aggregated.
        """

    def to_holder(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Copies tensors of the local replicas to the first device that holds variables."""
        return list(parts)

    @abstractmethod
    def sum_over_workers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums tensors of equal shapes over the workers. All must call it."""

    @abstractmethod
    def gather_over_workers(self, tensor: Tensor) -> Tensor:
        """Concatenates the rows of the workers' tensors in worker order. Row counts can differ."""

    @abstractmethod
    def step_function(self, model: keras.Model, kind: str) -> StepFunction:
        """Returns the function that runs the training, test or prediction steps of a model.

        `"train"` and `"test"` return logs, `"predict"` all rows, on every worker.
        """

    @property
    def all_devices(self) -> list[str]:
        """The `keras.distribution` names of the devices of all workers, starting with worker 0."""
        kind = self.devices[0].split(":")[0]
        return (
            list(self.devices) if self.num_workers == 1 else [f"{kind}:{i}" for i in range(self.num_replicas)]
        )

    @property
    def takes_variables(self) -> bool:
        """Whether new variables need `broadcast_variables`."""
        return self.num_workers > 1 or self.topology.sharded is not None

    @property
    def divides_over_workers(self) -> bool:
        """Whether variables are sharded over workers. All workers must then read and save them together."""
        return self.num_workers > 1 and self.topology.sharded is not None

    def kept_whole(self, variables: Sequence[keras.Variable]) -> AbstractContextManager[object]:
        """A context manager in which one worker can read whole variables. All workers must enter it."""
        return contextlib.nullcontext()

    def local_parts(self, variable: keras.Variable) -> LocalParts | None:
        """Returns this worker's parts of a variable; `None` if not exactly one axis is sharded over workers."""
        return None

    @abstractmethod
    def broadcast_variables(self, variables: Sequence[keras.Variable]) -> None:
        """Sends the chief's values to all workers. All must pass their Keras variables in the same order.

        Also shards new variables if the topology requires it. Variables that are already sharded stay.
        """

    def local_values(self, variable: keras.Variable) -> Sequence[Tensor]:
        """Returns this worker's values of a Keras variable: one value, or one per replica."""
        return [variable.value]

    @contextlib.contextmanager
    def engine_errors(self) -> Iterator[None]:
        """A context manager that replaces errors of the backend by an error that names the lost worker."""
        with interrupts.kept() as is_outermost:
            try:
                with stalls.entered():
                    yield
                    if is_outermost:
                        interrupts.check()
                    self.group.check_intact()
            except Exception as error:
                if is_outermost:
                    interrupts.check()
                explained = error if isinstance(error, KdistError) else self.group.explain_failure(error)
                if explained is error:
                    raise
                raise explained from error


class StepFunction(ABC):
    """Runs the steps of one model. The training loop keeps it until the model is compiled again.

    This is a context manager. Steps run inside it, and its exit always writes the state into the model's
    variables, even after an error.
    """

    def __enter__(self) -> StepFunction:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc: object) -> None:
        self.sync()

    @abstractmethod
    def __call__(self, batches: Sequence[ReplicaBatches]) -> Any:
        """Runs a step per batch. Returns the last logs (train, test) or the rows of all batches (predict)."""

    def sync(self) -> None:
        """Writes the state into the model's variables. Called before other code can read them."""
        return

    def keep_gradients(self, keeps: bool) -> None:
        """Adds kept gradients to the optimizer. With `keeps`, steps keep gradients until the next call."""
        return
