"""Large variables on parameter servers: tensors that request rows from the servers at a lookup.

A tensor subclass can override PyTorch functions above autograd (`__torch_function__`). A lookup uses leaf
tensors with the rows that it needs. All other functions use the whole value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

import keras
import numpy as np
import torch
from torch.nn import functional

from kdist.backends.torch.devices import first_device

if TYPE_CHECKING:
    from kdist.arrays.types import Structure
    from kdist.backends.coordination import Record
    from kdist.backends.torch.recording import Args, Func, Kwargs, Types


class Standin(torch.Tensor):
    """A tensor without data. Functions that need data use `whole()`."""

    _is_param = True  # so that modules accept it as a parameter

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Self:
        return torch.empty((), dtype=dtype, device=device).expand(tuple(shape)).as_subclass(cls)

    def whole(self) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Func, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        kwargs = kwargs or {}
        if func in _WITHOUT_NUMBERS or (func == torch.Tensor.to and _is_as_it_is(*args, **kwargs)):
            return super().__torch_function__(func, types, args, kwargs)
        if func in _OF_TABLES:
            found = _OF_TABLES[func](*args, **kwargs)
            if found is not NotImplemented:
                return found
        args, kwargs = keras.tree.map_structure(_numbers, (tuple(args), kwargs))
        return func(*args, **kwargs)


class RowGradient(Standin):
    """A gradient that is zero except for some rows."""

    row_ids: torch.Tensor
    row_values: torch.Tensor

    def whole(self) -> torch.Tensor:
        values = self.row_values
        return values.new_zeros(tuple(self.shape)).index_copy(0, self.row_ids, values)


class Table(Standin):
    """A variable's value. The worker only has the rows that it has looked up in this step."""

    record: Record
    ids: np.ndarray
    leaves: list[torch.Tensor]
    generation: int

    @classmethod
    def of_record(cls, record: Record, variable: keras.Variable) -> Table:
        dtype = keras.ops.zeros((), variable.dtype).dtype
        # Do not use the current device: it is "meta" if Keras only computes the shape of an output.
        table = cls.of(variable.shape, dtype, first_device())
        table.record, table.generation = record, -1
        return table.requires_grad_(bool(variable.trainable))

    def whole(self) -> torch.Tensor:
        was_here, parameter = self.record.is_here(), self.record.whole()
        parameter.requires_grad_(self.requires_grad)
        if not was_here:
            parameter.grad = None  # the gradient is from another step
        return parameter

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows with these ids, differentiably; `NotImplemented` if the whole value is better."""
        flat = ids.detach().reshape(-1).cpu().numpy()
        needed = np.unique(flat)
        if self.record.is_here() or 2 * len(needed) > len(self):
            return NotImplemented
        leaves = self._leaves()
        missing = np.setdiff1d(needed, self.ids)
        if len(missing) or not leaves:
            rows = keras.ops.convert_to_tensor(self.record.rows(missing), dtype=self.record.variable().dtype)
            leaves.append(rows.requires_grad_(self.requires_grad))
            self.ids = np.concatenate([self.ids, missing])
        order = np.argsort(self.ids)
        positions = order[np.searchsorted(self.ids, flat, sorter=order)]
        rows = leaves[0] if len(leaves) == 1 else torch.cat(leaves)
        return functional.embedding(torch.as_tensor(positions, device=ids.device).reshape(ids.shape), rows)

    def parts(self) -> list[torch.Tensor]:
        """Returns the tensors with gradients: the rows that were looked up, and any whole value."""
        return [*self._leaves(), *([self.whole()] if self.record.is_here() else [])]

    def joined(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Returns the gradient of the variable, given the gradients of `parts()`."""
        if all(gradient is None for gradient in gradients):
            return None
        pairs = zip(self.parts(), gradients, strict=True)
        found = [torch.zeros_like(part) if gradient is None else gradient for part, gradient in pairs]
        leaves = self._leaves()
        if not leaves:
            return found[0]
        gradient = RowGradient.of(self.shape, self.dtype, self.device)
        gradient.row_ids = torch.as_tensor(self.ids, device=self.device)
        gradient.row_values = torch.cat(found[: len(leaves)])
        return gradient if len(found) == len(leaves) else found[-1] + gradient.whole()

    def _leaves(self) -> list[torch.Tensor]:
        if self.generation != self.record.served.generation:
            self.generation = self.record.served.generation
            self.ids, self.leaves = np.zeros(0, np.int64), []
        return self.leaves


def _numbers(value: object) -> object:
    return value.whole() if isinstance(value, Standin) else value


def _is_as_it_is(tensor: torch.Tensor, *args: object, **kwargs: object) -> bool:
    """Returns whether `tensor.to(...)` returns the tensor itself."""
    small = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return small.to(*args, **kwargs) is small


def _embedding(ids: torch.Tensor, weight: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    has_options = any(value not in (None, False, 2.0) for value in (*args, *kwargs.values()))
    return NotImplemented if has_options or not isinstance(weight, Table) else weight.lookup(ids)


def _read_grad(tensor: torch.Tensor, *args: object) -> torch.Tensor | None:
    if not isinstance(tensor, Table):
        return None
    return tensor.joined([part.grad for part in tensor.parts()])


def _write_grad(tensor: torch.Tensor, value: torch.Tensor | None = None) -> object:
    if value is not None or not isinstance(tensor, Table):
        return NotImplemented
    for part in tensor.parts():
        part.grad = None
    return None


def _require_grad(tensor: torch.Tensor, value: bool = True) -> torch.Tensor:
    if isinstance(tensor, Table):
        for part in tensor.parts():
            part.requires_grad_(value)
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad_(value)


def _autograd_grad(
    outputs: Structure, inputs: torch.Tensor | Sequence[torch.Tensor], **kwargs: object
) -> tuple[torch.Tensor | None, ...]:
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    parts = [one.parts() if isinstance(one, Table) else [one] for one in inputs]
    flat = [part for several in parts for part in several]
    found = iter(torch.autograd.grad(outputs, flat, **kwargs | {"allow_unused": True}) if flat else ())
    gradients = [[next(found) for _ in several] for several in parts]
    return tuple(
        one.joined(several) if isinstance(one, Table) else several[0]
        for one, several in zip(inputs, gradients, strict=True)
    )


_WITHOUT_NUMBERS = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_meta", "is_leaf", "is_sparse", "grad_fn")
} | {
    torch.Tensor.requires_grad.__get__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
}
_OF_TABLES: dict[Callable[..., object], Callable[..., object]] = {
    functional.embedding: _embedding,
    torch.autograd.grad: _autograd_grad,
    torch.Tensor.grad.__get__: _read_grad,
    torch.Tensor.grad.__set__: _write_grad,
    torch.Tensor.grad.__delete__: _write_grad,
    torch.Tensor.requires_grad_: _require_grad,
    torch.Tensor.requires_grad.__set__: _require_grad,
}
