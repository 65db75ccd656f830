"""`GlobalBatches`, the global batches of an epoch, which are the same on all workers."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist import keras_hooks, tracing
from kdist.arrays import rows
from kdist.backends import get_backend
from kdist.backends.contract import ReplicaBatches, Runtime
from kdist.backends.coordination import PerWorkerValues
from kdist.backends.messages import read_on_all
from kdist.cluster.logs import logger
from kdist.communication import interrupts
from kdist.data.agreement import MOST_AHEAD, open_steps, split_batch
from kdist.data.distributed_dataset import DistributedDataset
from kdist.data.input_options import InputOptions
from kdist.data.reading import read_global
from kdist.data.sources import is_infinite, torch_loader
from kdist.data.sources.iterables import IteratorSource
from kdist.errors import DatasetError, InvalidArgumentError, StrategyScopeError
from kdist.training import generator_states
from kdist.training.data_position import TAKEN, DataPosition

if TYPE_CHECKING:
    import keras


class GlobalBatches:
    """The batches of an epoch, from Keras's `EpochIterator`, on which all workers agree.

    The workers compare the sizes of arrays before the first step. For other data, a thread reads ahead and
    places the parts on the devices, and the workers agree on each step.

    Args:
        runtime: The runtime of the workers.
        model: The name of the model, for messages.
        x: The argument `x` of `fit`, `evaluate` or `predict`.
        epochs: The number of iterations. It limits how far a generator is read.
        **arguments: The other arguments of Keras's `EpochIterator`.
    """

    def __init__(self, runtime: Runtime, model: str, x: object, epochs: int = 1, **arguments: Any) -> None:
        self.runtime = runtime
        self._distributed = x if isinstance(x, DistributedDataset) else None
        self._workers_own = x if isinstance(x, PerWorkerValues) else None
        if self._workers_own is not None:
            endless = True
            x = keras_hooks.data_adapter(None, _OwnDatasets(self._workers_own))
            arguments["shuffle"] = False
        else:
            endless = self._distributed.is_infinite if self._distributed is not None else is_infinite(x)
        if endless and not arguments.get("steps_per_epoch"):
            raise InvalidArgumentError(
                "The dataset is infinite, and the number of steps is not set.",
                received={"dataset": x},
                hint="Pass steps_per_epoch=100 to `fit`, or steps=100 to `evaluate` and `predict`.",
            )
        if self._distributed is not None:
            x = self._adapter(self._distributed, model, arguments)
        backend = get_backend()
        self.iterator = keras_hooks.epoch_iterator(
            backend.native_batches, backend.keeps_batches, x=x, **arguments
        )
        # Arrays are compared before the first step. Other data may end early on any worker.
        self._is_array = keras_hooks.num_array_rows(self.iterator) is not None
        self._steps = steps = arguments.get("steps_per_epoch")
        # Keras also takes all batches of an execution that begins in the epoch and ends after it.
        execution = arguments.get("steps_per_execution") or 1
        self._limit = -(-steps // execution) * execution * epochs if steps else None
        self._position = DataPosition(self.iterator, continues=bool(steps))
        if keras_hooks.shuffles_py_dataset(self.iterator):
            share = functools.partial(generator_states.share, runtime)
            keras_hooks.before_epoch_end(self.iterator, share)

    def _adapter(self, dataset: DistributedDataset, model: str, arguments: dict[str, object]) -> Any:
        if dataset._runtime is not self.runtime:
            raise StrategyScopeError(
                "The distributed dataset and the model belong to different strategies.",
                received={"dataset": dataset, "model": model},
                hint="Create both with the same strategy object.",
            )
        for name in ("y", "sample_weight", "class_weight"):
            if arguments.get(name) is not None:
                raise InvalidArgumentError(
                    f"`{name}` cannot be combined with a distributed dataset.",
                    received={name: type(arguments[name]).__name__},
                    hint=f"Remove `{name}`, and let the dataset yield (x, y, sample_weight).",
                )
        arguments["shuffle"] = False
        return keras_hooks.data_adapter(dataset.num_steps, _Epochs(dataset))

    @property
    def num_batches(self) -> int | None:
        """The number of steps per epoch, or `None` if unknown."""
        return self.iterator.num_batches

    def num_rows(self, batches: Sequence[ReplicaBatches]) -> int:
        """Returns the rows of batches over all replicas, or 0 if each worker reads its own dataset."""
        return 0 if self._workers_own is not None else sum(batch.split[-1][1] for batch in batches)

    def facts(self) -> dict[str, object]:
        """Returns the properties of the data that must be equal on all workers."""
        adapter = self.iterator.data_adapter
        return {
            "kind of data": type(adapter).__name__,
            "number of rows": keras_hooks.num_array_rows(self.iterator),
            "batch size": adapter.batch_size,
            "number of batches": self.iterator.num_batches,
        }

    def build(self, model: keras.Model) -> None:
        """Creates missing variables, from the shapes of the first batch."""
        if keras_hooks.is_built(model):
            return
        steps_build = get_backend().steps_build
        if self._is_array:
            if keras_hooks.num_array_rows(self.iterator) == 0:
                raise InvalidArgumentError(
                    "The data has no rows.", received={"rows": 0}, hint="Pass at least one row."
                )
            keras_hooks.build(model, steps_build, iterator=self.iterator)
        elif not keras_hooks.needs_batch(model):  # reading one could change the order of the batches
            keras_hooks.build(model, steps_build)
        else:
            keras_hooks.build(model, steps_build, data_batch=self.peek())

    def peek(self) -> object:
        """Returns one batch, with any number of rows, without consuming it."""
        if self._workers_own is not None:
            return self._workers_own.peek()
        if self._distributed is not None:
            part = self._distributed.peek_part()
            rows.num_rows(part)  # raises for single elements
            return part
        loader = keras_hooks.torch_loader_of(self.iterator)
        if loader is not None or keras_hooks.shuffles_py_dataset(self.iterator):
            generator_states.share(self.runtime, loader)
        return read_on_all(self.runtime, "Reading the first batch", self._first)

    def _first(self) -> object:
        # To find the shapes, plain Keras shuffles a PyDataset once more, except on TensorFlow.
        draws_order = not get_backend().keeps_batches
        if (batch := keras_hooks.first_of_py_dataset(self.iterator, draws_order)) is not None:
            return batch
        self.iterator.prepare = None
        loader = keras_hooks.torch_loader_of(self.iterator)
        states = None
        if loader is not None and get_backend().keeps_batches:
            # Plain Keras on TensorFlow draws an order to find the shapes, but none for a first batch.
            keras_hooks.create_batches(self.iterator)
            states = torch_loader.random_states(loader)
        # Only one batch, because a generator repeats only its first two batches.
        execution, self.iterator.steps_per_execution = self.iterator.steps_per_execution, 1
        _, _, data = next(iter(self.iterator))
        self.iterator.steps_per_execution = execution
        if loader is not None and states is not None:
            torch_loader.set_random_states(loader, states)
        self.reset()
        return data[0]

    def share_random_state(self) -> None:
        """Copies the chief's random state to all workers, so that all shuffle in the same order.

        Called when the workers have agreed on their data, and before each epoch. In the previous epoch,
        callbacks or layers may have drawn different numbers on each worker, for example one per row.
        """
        runtime, backend = self.runtime, get_backend()
        if not keras_hooks.shuffles_arrays(self.iterator):
            return
        backend.seed_shuffling()
        if runtime.num_workers > 1:
            mine = backend.random_state() if runtime.worker_index == 0 else b""
            backend.set_random_state(runtime.group.all_gather_bytes(mine)[0])

    def reset(self) -> None:
        """Restarts at the first batch."""
        self.iterator.reset()

    def close(self) -> None:
        """Stops reading ahead."""
        keras_hooks.release(self.iterator)

    def record(self) -> None:
        """Starts to track the position. Call it before the first epoch."""
        self._position.record()

    def position(self) -> dict[str, Any]:
        """Returns the position in the data for `go_to` in another process, as JSON."""
        position = self._position.position() | {"batches": self._batches_of_a_pass(), "steps": self._steps}
        if self._distributed is not None:
            position |= {"taken": 0, "dataset": self._distributed.get_state()}
        return position

    def go_to(self, position: Mapping[str, Any], step: int) -> None:
        """Makes the next epoch resume at `position`, after `step` completed steps of the epoch."""
        self._warn_of_other_batches(position.get("batches") or {}, step or position["taken"])
        if (steps := position.get("steps", self._steps)) != self._steps:
            self._limit = None  # the position counts batches of epochs with another number of steps
            if step and self.runtime.worker_index == 0:
                logger.warning(
                    "`steps_per_epoch` was %s in the backup, and is now %s. `fit` resumes after step %d of its epoch.\n"
                    "To resume with the same epochs, pass the same `steps_per_epoch`.",
                    *(steps, self._steps, step),
                )
            step = min(step, self._steps or step)
        self.reset()
        self._position.record()
        self._position.go_to(position, step)
        if self._distributed is not None:
            self._distributed.set_state(position["dataset"])

    def _batches_of_a_pass(self) -> dict[str, int]:
        """Returns the size and the number of the batches, as far as they are known."""
        adapter = self.iterator.data_adapter
        known = {"batch size": adapter.batch_size, "number of batches": adapter.num_batches}
        return {name: int(number) for name, number in known.items() if number is not None}

    def _warn_of_other_batches(self, saved: Mapping[str, int], consumed: int) -> None:
        """Warns if this `fit` has other batches than the backup, because the position counts batches."""
        here = self._batches_of_a_pass()
        differ = [name for name in here if here[name] != saved.get(name, here[name])]
        if consumed and differ and self.runtime.worker_index == 0:
            logger.warning(
                "the batches of `fit` have changed since the backup, in which %d batches of the data were consumed. "
                "This epoch repeats or skips rows. In the backup: %s; now: %s.\n"
                "To resume with the same rows, pass the same data and the same batch size.",
                consumed,
                ", ".join(f"{name} {saved[name]}" for name in differ),
                ", ".join(f"{name} {here[name]}" for name in differ),
            )

    def __iter__(self) -> Iterator[tuple[int, int, Sequence[ReplicaBatches]]]:
        """Yields the indices of the first and the last step, and the batches of each execution."""
        self.iterator.prepare = self._prepared
        self._position.before_epoch()
        self.share_random_state()
        if keras_hooks.shuffles_py_dataset(self.iterator):
            generator_states.share(self.runtime)
        for begin, end, batches in tracing.timed(self.iterator, "waiting for input", "input"):
            if interrupts.is_pressed:
                interrupts.check()
            if present := [batch for batch in batches if batch is not TAKEN]:
                yield begin, end, present

    def _prepared(self, batches: Iterable[object]) -> Iterator[object]:
        """Converts Keras's iterable to batches for the steps, and counts them."""
        if self._is_array or self._distributed is not None or self._workers_own is not None:
            started = self._position.start(batches)
            if self._is_array:  # equal on all workers, so that no agreement is necessary
                started = map(functools.partial(split_batch, self.runtime), map(rows.to_host, started))
            return self._position.counted(started)
        start = functools.partial(self._position.start, batches)
        loader = keras_hooks.torch_loader_of(self.iterator)
        # With processes, an iterator would start them, and Keras creates two iterators per epoch.
        if loader is not None and loader.num_workers == 0:
            started = start()
            return self._position.counted(self._agreed(lambda: started))
        # The pass starts with its first batch, because Keras creates iterators that it never uses.
        return self._position.counted(self._agreed(start))

    def _agreed(self, start: Callable[[], Iterator[object]]) -> Iterator[ReplicaBatches]:
        runtime = self.runtime
        if (loader := keras_hooks.torch_loader_of(self.iterator)) is not None:
            # Here, because samplers draw when a pass begins, and callbacks may have drawn since the last pass ended.
            generator_states.share(runtime, loader)
        batches = start()
        # Like Keras, does not request a batch after the last one, because samplers draw from their generator then.
        limits = [self._limit, self.iterator.data_adapter.num_batches]
        rest = [max(limit - self._position.taken, 0) for limit in limits if limit is not None]
        source = IteratorSource(itertools.islice(batches, min(rest, default=None)))
        reader, number_read, used = read_global(source, runtime, 0, 0), itertools.count(), 0
        # `zip` counts only complete reads, and closing the generator leaves `reader` open.
        read = (batch for batch, _ in zip(reader, number_read))  # noqa: B905
        steps = open_steps(runtime, read, InputOptions(), is_global=True)
        try:
            for step in steps:
                used += 1
                yield step.as_batch(runtime)
        finally:
            steps.close()
            if runtime.num_workers > 1 and keras_hooks.reads_generator(self.iterator.data_adapter):
                # At an early end, workers have read ahead by different numbers of batches, which the next `fit` with
                # this generator would not notice. So all read as many as one of them may have read.
                missing = used + MOST_AHEAD - next(number_read)
                if missing > 0 and not runtime.group.lost():
                    with contextlib.suppress(Exception):
                        collections.deque(itertools.islice(reader, missing), maxlen=0)


class _OwnDatasets:
    """Batches that each worker reads from its own dataset."""

    def __init__(self, values: PerWorkerValues) -> None:
        self._iterator = iter(values)

    def __iter__(self) -> Iterator[ReplicaBatches]:
        return itertools.repeat(ReplicaBatches([self._iterator], [(0, 1)]))


class _Epochs:
    """An iterable over a distributed dataset. Each iteration yields the batches of the next epoch."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[ReplicaBatches]:
        # A generator, because Keras creates iterators that it never uses. The first batch starts an epoch.
        yield from iter(self._dataset).batches()


def refuse_distributed(model: keras.Model, method: str, *data: object) -> None:
    """Raises an error if a model without a strategy receives a distributed dataset."""
    if any(isinstance(x, DistributedDataset) for x in data):
        raise StrategyScopeError(
            f"`{method}` received a distributed dataset, but the model was created outside the scope of a strategy.",
            received={"model": model.name, "dataset": data[0]},
            hint="Create and compile the model inside `with strategy.scope():`.",
        )


def refuse_to_adapt(layer: keras.Layer, data: object) -> None:
    """Raises an error if a layer would adapt to a distributed dataset."""
    if isinstance(data, DistributedDataset):
        raise DatasetError(
            "`adapt` received a distributed dataset, so each worker would adapt the layer to its own rows.",
            received={"layer": layer.name, "dataset": data},
            hint="Pass the dataset that you distributed: `layer.adapt(dataset)`.",
        )
