"""`strategy.run` with arguments of different shapes: one replica after another, uncompiled.

One program for all devices needs equal shapes. Only few batches have different shapes (the last batch of an
epoch), so this module favors simplicity. Each replica runs in a thread, as on PyTorch, and collectives run on
the host. `fit` has no such batches: `Runtime.split` passes a whole short batch to every replica, and the step
splits its rows (`JaxCore.divide`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from kdist import keras_hooks
from kdist.arrays.row_exchange import decode, encode
from kdist.arrays.structures import joined
from kdist.backends.jax.collectives import next_turn
from kdist.backends.jax.components import has_components
from kdist.backends.jax.core import JaxCore
from kdist.backends.jax.programs import Outputs, Placed, initialize
from kdist.backends.jax.replicas import JaxReplica
from kdist.backends.jax.scopes import JaxScope, Values
from kdist.backends.jax.storage import is_divided, whole_of
from kdist.backends.messages import gather
from kdist.backends.threads import Baton, ReplicaThreads
from kdist.errors import StrategyScopeError, check_equal_arrays
from kdist.values import component

if TYPE_CHECKING:
    from kdist.arrays.types import R, Structure, T
    from kdist.backends.jax.programs import Template
    from kdist.backends.jax.scopes import Held
    from kdist.context import StrategyLike


def on_any_worker(runtime: JaxCore, values: Sequence[Sequence[jax.Array | np.ndarray]]) -> bool:
    """Returns whether replicas have arguments of different shapes. The result is equal on all workers.

    XLA orders the collectives of each program separately. If workers ran programs for different shapes, their
    collectives could therefore be mismatched. Batches of distributed datasets need no check here, because the
    workers compared the shapes when they agreed on the batch.
    """
    mine = any(part.shape != parts[0].shape for parts in values for part in parts[1:])
    if runtime.num_workers == 1 or all(runtime.is_even(part) for parts in values for part in parts):
        return mine
    shapes = "uneven" if mine else str([parts[0].shape for parts in values])
    memory = runtime.memory
    if memory is None:
        return len({*gather(runtime, shapes)}) > 1 or mine
    with runtime.group.working():
        jax.block_until_ready(next_turn(runtime))  # running programs may still use the memory
        is_equal = memory.have_equal(shapes)
    return mine or not is_equal


def run(
    runtime: JaxCore, strategy: StrategyLike, fn: Callable[..., object], call: Template, placed: Placed
) -> Sequence[Structure]:
    """Calls the user's function in every local replica, one at a time."""
    devices = runtime.local_devices
    state = keras_hooks.ThreadState()
    seen: list[Any] = [None] * len(devices)

    def one_replica(index: int, baton: Baton) -> Outputs:
        device = devices[index]
        collectives = HostCollectives(runtime, index, device, baton)
        replica = JaxReplica(strategy, collectives)
        with contextlib.ExitStack() as stack:
            if index > 0:
                stack.enter_context(state)
            stack.enter_context(jax.default_device(device))
            stack.enter_context(replica)
            values = seen[index] = Values((), (), lambda v: _value_on(runtime, v, index, placed))
            scope = stack.enter_context(JaxScope(replica, values))
            own_args, own_kwargs = call.fill([jax.device_put(p[index], device) for p in call.data])
            result = fn(*own_args, **own_kwargs)
            scope.aggregate()
            return Outputs(result, replica.same)

    threads = ReplicaThreads(
        [f"replica {runtime.replica_ids[i]} ({n})" for i, n in enumerate(runtime.devices)]
    )
    try:
        with runtime.group.working():
            returned = threads.run(one_replica)
    except Exception as error:
        if len(devices) == 1:  # with several replicas, the threads add the note
            error.add_note(f"Raised in replica {runtime.replica_ids[0]} ({runtime.devices[0]}).")
        raise
    for variable in seen[0].written.values():
        results = [values.results([variable])[0] for values in seen]
        if has_components(runtime, variable):
            placed.write_components(variable, [component for component, _ in results], results[0][1])
        else:
            variable.assign(results[0])
    first = returned[0].data  # shared arrays come from the first replica
    return [
        outputs.fill(
            [a if same else own for own, a, same in zip(outputs.data, first, outputs.same, strict=True)]
        )
        for outputs in returned
    ]


def _value_on(runtime: JaxCore, variable: keras.Variable, index: int, placed: Placed) -> Held:
    if initialize([variable]):
        runtime.broadcast_variables([variable])
    device = runtime.local_devices[index]
    if has_components(runtime, variable):
        component = placed.component(variable, index)
        return jax.device_put(component, device), jax.device_put(keras_hooks.native_value(variable), device)
    is_whole = not is_divided(variable)
    return jax.device_put(
        keras_hooks.native_value(variable) if is_whole else whole_of(runtime, variable), device
    )


class HostCollectives:
    """The collectives of replicas that run one at a time, outside any program."""

    def __init__(self, runtime: JaxCore, local_index: int, device: jax.Device, baton: Baton) -> None:
        self._runtime = runtime
        self._device = device
        self._baton = baton
        self.local_index: int = local_index
        self.replica_id: int = runtime.replica_ids[local_index]

    def sum(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        mine = [_on_host(tensor) for tensor in tensors]

        def combine(values: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
            totals = [sum(parts[1:], parts[0]) for parts in zip(*values, strict=True)]
            return totals if self._runtime.num_workers == 1 else list(map(self._sum_over_workers, totals))

        what = ("sum", [(str(array.dtype), array.shape) for array in mine])
        return [
            jax.device_put(total, self._device)
            for total in self._baton.meet(self.local_index, what, mine, combine)
        ]

    def gather(self, rows: jax.Array) -> tuple[jax.Array, int | jax.Array]:
        mine = _on_host(rows)

        def combine(values: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
            local = np.concatenate(values)
            starts = list(itertools.accumulate((len(value) for value in values), initial=0))
            if self._runtime.num_workers == 1:
                return local, starts
            everyone = arrays_of_workers(self._runtime, local, 1)
            first = sum(map(len, everyone[: self._runtime.worker_index]))
            return np.concatenate(everyone), [first + start for start in starts]

        what = ("gathering", (str(mine.dtype), mine.shape[1:]))
        whole, starts = self._baton.meet(self.local_index, what, mine, combine)
        return jax.device_put(whole, self._device), starts[self.local_index]

    def merge(self, function: Callable[[T], R], values: T) -> R:
        """Calls a function once, in the last replica."""
        host = keras.tree.map_structure(
            lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, values
        )
        result = self._baton.meet(
            self.local_index, ("merge_call", None), host, lambda parts: function(joined(parts))
        )
        return keras.tree.map_structure(
            lambda leaf: jax.device_put(leaf, self._device) if isinstance(leaf, jax.Array) else leaf,
            component(result, self.local_index),
        )

    def _sum_over_workers(self, array: np.ndarray) -> np.ndarray:
        return np.stack(arrays_of_workers(self._runtime, array)).sum(0, dtype=array.dtype)


def arrays_of_workers(runtime: JaxCore, array: np.ndarray, start: int = 0) -> list[np.ndarray]:
    """Returns the arrays of all workers. Raises an error if their dtypes differ, or their shapes from an axis on."""
    arrays = [decode(data) for data in runtime.group.all_gather_bytes(encode(array))]
    check_equal_arrays([f"{'rows of ' * start}{other.dtype} {other.shape[start:]}" for other in arrays])
    return arrays


def _on_host(tensor: jax.Array) -> np.ndarray:
    if isinstance(tensor, jax.core.Tracer):
        raise StrategyScopeError(
            "A collective is inside jax.jit, a scan or a rematerialized layer, and the replicas have different "
            "numbers of rows. JAX cannot run it, because such replicas run one after the other.",
            received={"value": tensor},
            hint="Use a batch size that is divisible by the number of replicas, and drop_remainder=True.",
        )
    return np.asarray(tensor)
