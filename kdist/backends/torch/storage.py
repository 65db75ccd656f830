"""Shards variables over the workers, and gathers them and reduces their gradients.

PyTorch's `DTensor` holds the shards. When a layer uses a sharded variable, kdist gathers it. When its
gradient arrives, each worker gets the sum for its shard. Both use the collectives of `Workers`, which detect
a lost worker.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, init_device_mesh

from kdist import keras_hooks
from kdist.arrays.rows import torch_to_numpy
from kdist.backends.aggregation import is_on_read
from kdist.backends.messages import wait_to_read
from kdist.backends.torch.divided import Divided
from kdist.backends.torch.workers import JoinedWorkers
from kdist.errors import StrategyScopeError
from kdist.topology import LocalParts, Sharded


class Storage:
    """The sharded variables of one runtime, with this worker's shards on a device."""

    def __init__(self, runtime: Any, sharded: Sharded, device: torch.device) -> None:
        self._runtime = runtime
        self._layout = sharded.layout
        self._group: JoinedWorkers = runtime.group
        self._device = device
        shape = sharded.mesh_shape(runtime.num_workers)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=tuple(sharded.axes))
        self._lengths = dict(zip(sharded.axes, shape, strict=True))
        self.recent = Recent()
        self.pending: dict[int, torch.Tensor] = {}  # see `Divided.pending`
        # The current replica. Not thread-local, because a GPU's backward pass runs in another thread.
        self.replica: Any = None

    def take(self, variables: Sequence[keras.Variable]) -> None:
        """Shards variables that have equal values on every worker, and moves all variables to the device."""
        placements = [self._placements(variable) for variable in variables]  # raises before any change
        for variable, places in zip(variables, placements, strict=True):
            parameter = keras_hooks.native_value(variable)
            if isinstance(parameter, Divided):
                continue
            if not any(place.is_shard() for place in places):
                parameter.data = parameter.data.to(self._device)
                continue
            part = self.part_of(parameter.detach(), places).to(self._device)
            shards = self.of_part(part, places, parameter.shape)
            divided = Divided(shards, self, variable.path, parameter.requires_grad)
            self.recent.largest = max(self.recent.largest, parameter.numel() * parameter.element_size())
            _swap(variable, parameter, divided)

    def _placements(self, variable: keras.Variable) -> tuple[Placement, ...]:
        """Returns the placement of a variable for each axis of the mesh."""
        layout: Sequence[str | None] = ()
        if _may_be_divided(variable):
            layout = self._layout(keras_hooks.owner_path(variable), tuple(variable.shape), self._lengths)
        return tuple(
            Shard(layout.index(name)) if length > 1 and name in layout else Replicate()
            for name, length in self._lengths.items()
        )

    def of_part(self, part: torch.Tensor, places: Sequence[Placement], shape: torch.Size) -> DTensor:
        """Returns a `DTensor` with this shape and this worker's shard."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, self.mesh, places, run_check=False, shape=shape, stride=stride)

    def part_of(self, whole: torch.Tensor, places: Sequence[Placement]) -> torch.Tensor:
        """Returns a copy of this worker's shard of a whole tensor."""
        part = whole
        for axis, place in enumerate(places):
            if isinstance(place, Shard):
                pieces, length = self._cut(part, axis, place.dim)
                part = pieces[self.mesh.get_local_rank(axis)].narrow(place.dim, 0, length)
        return part.clone(memory_format=torch.contiguous_format)

    def gather(self, part: torch.Tensor, places: Sequence[Placement], shape: torch.Size) -> torch.Tensor:
        """Gathers the workers' shards, and returns the whole tensor with this shape."""
        for axis, place in enumerate(places):
            if isinstance(place, Shard):
                dim, length = place.dim, shape[place.dim]
                padded = _padded(part, dim, -(-length // self.mesh.size(axis)))
                parts = self._group.all_gather(padded.contiguous(), self.mesh.get_group(axis))
                part = torch.cat(parts, dim).narrow(dim, 0, length).contiguous()
        return part

    def sum_part(self, whole: torch.Tensor, places: Sequence[Placement]) -> torch.Tensor:
        """Sums the workers' whole tensors, and returns this worker's shard of the sum."""
        part = whole
        for axis, place in enumerate(places):
            if isinstance(place, Shard):
                pieces, length = self._cut(part, axis, place.dim)
                part = self._group.reduce_scatter([p.contiguous() for p in pieces], self.mesh.get_group(axis))
                part = part.narrow(place.dim, 0, length).contiguous()
        part = part.clone(memory_format=torch.contiguous_format) if part is whole else part
        for axis, place in enumerate(places):
            if not isinstance(place, Shard) and self.mesh.size(axis) > 1:
                self._group.all_reduce(part, self.mesh.get_group(axis))
        return part

    def _cut(self, whole: torch.Tensor, axis: int, dim: int) -> tuple[Sequence[torch.Tensor], int]:
        """Returns padded pieces of equal length, and the length of this worker's piece without padding."""
        number, length = self.mesh.size(axis), whole.shape[dim]
        largest = -(-length // number)  # the same as in `DTensor`; some shards may be empty
        own = min(max(length - self.mesh.get_local_rank(axis) * largest, 0), largest)
        return _padded(whole, dim, number * largest).chunk(number, dim), own

    def wait_to_read(self, parameters: Sequence[Divided]) -> None:
        with self._runtime.engine_errors():
            wait_to_read(self._runtime, parameters)

    @contextlib.contextmanager
    def kept_whole(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """A context manager in which one worker can read sharded variables. All workers must enter it."""
        found = [keras_hooks.native_value(v) for v in variables]
        parameters = [p for p in found if isinstance(p, Divided) and p.kept is None]
        if parameters:
            self.wait_to_read(parameters)
        try:
            with self._runtime.engine_errors():
                for parameter in parameters:
                    places = parameter.shards.placements
                    parameter.kept = self.gather(parameter.to_local(), places, parameter.shape)
            yield
        finally:
            for parameter in parameters:
                parameter.kept = None


def local_parts(variable: keras.Variable) -> LocalParts | None:
    """Returns this worker's part of a variable; `None` if not exactly one axis is sharded over workers."""
    parameter = keras_hooks.native_value(variable)
    if not isinstance(parameter, Divided):
        return None
    places, mesh = parameter.shards.placements, parameter.shards.device_mesh
    split = [axis for axis, place in enumerate(places) if isinstance(place, Shard)]
    if len(split) != 1:
        return None
    (axis,) = split
    dim, number, rank = places[axis].dim, mesh.size(axis), mesh.get_local_rank(axis)
    copy = 0  # the number of this copy of the part; the workers that hold copies of the parts take turns
    for other, size in enumerate(mesh.shape):
        copy = copy if other == axis else copy * size + mesh.get_local_rank(other)
    local = parameter.to_local()
    start = rank * -(-parameter.shape[dim] // number)
    part = (start, start + local.shape[dim])
    parts = {part: functools.partial(torch_to_numpy, local)} if local.shape[dim] else {}
    to_save = tuple(parts) if copy == rank % (mesh.size() // number) else ()
    return LocalParts(dim, parts, to_save, functools.partial(_assign_parts, parameter))


def _assign_parts(parameter: Divided, parts: Mapping[tuple[int, int], np.ndarray]) -> None:
    part = next(iter(parts.values()), None)
    parameter.write_local(None if part is None else keras.ops.convert_to_tensor(np.ascontiguousarray(part)))


def _padded(part: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Pads a tensor with zeros, because collectives need equal shapes."""
    shape = list(part.shape)
    shape[dim] = length - part.shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim) if shape[dim] else part


def _swap(variable: keras.Variable, parameter: torch.Tensor, divided: Divided) -> None:
    """Shards a parameter in place, so that references in its variable, layer and torch module stay valid."""
    try:
        torch.utils.swap_tensors(parameter, divided)
        return
    except RuntimeError:
        gc.collect()  # garbage from building the model may still refer to the parameter
    try:
        torch.utils.swap_tensors(parameter, divided)
    except RuntimeError as error:
        raise StrategyScopeError(
            f"Cannot shard the variable {variable.path!r}: the result of a computation still refers to it.",
            received={"variable": variable.path, "error": str(error)},
            hint="Leave the scope before you compute with the model, or delete the result: del y",
        ) from error


def _may_be_divided(variable: keras.Variable) -> bool:
    """Returns `False` for metrics, counters, seeds, and small statistics that each step writes."""
    if is_on_read(variable) or variable.aggregation == "sum" or not variable.shape:
        return False
    is_statistic = not variable.trainable and len(variable.shape) == 1
    if is_statistic and keras_hooks.owner_path(variable) == variable.path:
        return False
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(variable.dtype))


class Recent:
    """A cache of the last gathered tensors of a step, up to twice the size of the largest one.

    If a layer reads a variable in a loop, kdist gathers it once. All workers read the same variables in the
    same order, so their caches are equal.
    """

    def __init__(self) -> None:
        self.largest = 0
        self._found: OrderedDict[Hashable, tuple[int, torch.Tensor]] = OrderedDict()
        self._size = 0

    def get(self, key: Hashable, version: int) -> torch.Tensor | None:
        """Returns the tensor for this version of the variable, or `None`."""
        known, tensor = self._found.get(key, (None, None))
        return tensor if known == version else None

    def keep(self, key: Hashable, version: int, tensor: torch.Tensor) -> None:
        """Adds a tensor, and removes the oldest tensors if the cache is full."""
        self._forget(key)
        self._found[key] = version, tensor
        self._size += tensor.nbytes
        while self._size > 2 * self.largest:
            self._forget(next(iter(self._found)))

    def clear(self) -> None:
        """Removes all tensors."""
        self._found.clear()
        self._size = 0

    def _forget(self, key: Hashable) -> None:
        _, tensor = self._found.pop(key, (None, None))
        self._size -= 0 if tensor is None else tensor.nbytes
