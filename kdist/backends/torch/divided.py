"""`Divided`: a sharded parameter that behaves like a whole parameter.

PyTorch functions receive the gathered tensor, and writes change this worker's shard. Therefore, Keras layers,
torch modules and code that saves models need no changes. Only gradients and optimizers use the shards, which
are `DTensor`s. Gradients arrive summed and sharded, and optimizers compute with them (`OnParts`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from kdist.backends.torch.recording import compressed, restored

if TYPE_CHECKING:
    from kdist.backends.replica import Replica
    from kdist.backends.torch.recording import Args, Func, Kwargs, Types

_T = torch.Tensor
# Properties and methods of the parameter itself, which need neither the whole value nor the shards.
_PROPERTIES = (
    "shape dtype device ndim layout requires_grad is_leaf grad grad_fn is_cuda is_meta is_sparse is_quantized"
)
_METHODS = (
    "dim size numel nelement element_size is_floating_point is_complex stride is_contiguous requires_grad_ retain_grad "
    "register_hook register_post_accumulate_grad_hook __hash__ __len__"
)
_ITS_OWN = {
    *(getattr(_T, name).__get__ for name in _PROPERTIES.split()),
    *(getattr(_T, name) for name in _METHODS.split()),
    *(_T.requires_grad.__set__, _T.grad.__set__, _T.grad.__delete__),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.autograd.grad, torch.autograd.backward),
}
_CASTS = {_T.to, _T.type, _T.half, _T.float, _T.double, _T.bfloat16}


class Divided(torch.Tensor):
    """A parameter of which this worker holds a shard. The path of its variable is for messages."""

    shards: DTensor
    kept: torch.Tensor | None

    @staticmethod
    def __new__(cls, shards: DTensor, storage: Any, path: str, requires_grad: bool) -> Divided:
        return torch.Tensor._make_wrapper_subclass(
            cls, shards.shape, dtype=shards.dtype, device=shards.device, requires_grad=requires_grad
        )

    def __init__(self, shards: DTensor, storage: Any, path: str, requires_grad: bool) -> None:
        self.shards = shards
        self.kept_in = storage
        self.path = path
        self.kept = None
        self.version = 0  # changes with every write, unlike the version of the shards
        self._is_param = True  # makes it an instance of `torch.nn.Parameter`

    def __repr__(self) -> str:
        facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, placements={self.shards.placements}"
        return f"Divided({self.path}, {facts})"

    def to_local(self) -> torch.Tensor:
        """Returns this worker's shard, like `DTensor.to_local`."""
        return self.shards._local_tensor

    def whole(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Casts and gathers the tensor, differentiably. All workers must call it."""
        dtype = dtype or self.dtype
        if self.kept is not None:
            return self.kept.to(dtype)
        replica = self.kept_in.replica
        if replica is None:
            self.kept_in.wait_to_read([self])
            return _Gather.apply(self, dtype, None)
        is_differentiable = torch.is_grad_enabled() and self.requires_grad
        recent, version = self.kept_in.recent, self.version
        found = recent.get((id(self), dtype, is_differentiable), version)
        if found is None and not is_differentiable:
            found = recent.get((id(self), dtype, True), version)
            found = None if found is None else found.detach()
        if found is None:
            found = _Gather.apply(self, dtype, replica)
            recent.keep((id(self), dtype, is_differentiable), version, found)
            _wholes[found.untyped_storage().data_ptr()] = weakref.ref(found), self, version
        return found

    @property
    def pending(self) -> torch.Tensor | None:
        """The whole value that a layer has assigned in this step, and that is not aggregated yet."""
        return self.kept_in.pending.get(id(self))

    def write_later(self, whole: torch.Tensor) -> None:
        """Replaces the value that this replica sees until the values of all replicas are aggregated."""
        self.version += 1
        self.kept_in.pending[id(self)] = whole.detach().clone()

    def write(self, whole: torch.Tensor) -> None:
        """Writes this worker's part of a new value into its shard."""
        with torch.no_grad():
            value = whole.detach().broadcast_to(self.shape)
            self.write_local(self.kept_in.part_of(value, self.shards.placements))

    def write_local(self, part: torch.Tensor | None) -> None:
        """Writes a new value into this worker's shard; `None` if the shard is empty."""
        self.version += 1
        self.kept_in.pending.pop(id(self), None)
        if part is not None:
            with torch.no_grad():
                self.to_local().copy_(part)

    @classmethod
    def __torch_function__(cls, func: Func, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        """Calls a function with the gathered tensors."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ITS_OWN:
                return func(*args, **kwargs)
            if func is _T._version.__get__:
                return args[0].version
            if func is _T.copy_ and isinstance(args[0], Divided):
                args[0].write(_plain(args[1]))
                return args[0]
            if func in _CASTS and (dtype := _dtype_of(func, args, kwargs)) is not None:
                args = (args[0].whole(dtype), *args[1:])
                return func(*args, **kwargs)
            if func in (_T.__deepcopy__, _T.__reduce_ex__):
                leaf = torch.nn.Parameter(args[0].whole().detach(), args[0].requires_grad)
                return getattr(leaf, func.__name__)(*args[1:], **kwargs)
            if _is_in_place(func):
                return _in_place(func, args, kwargs)
            args, kwargs = tree_map_only(Divided, Divided.whole, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Func, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        """Called only by PyTorch's autograd, which detaches the tensor."""
        if func is torch.ops.aten.detach.default:
            return Divided(args[0].shards, args[0].kept_in, args[0].path, False)
        args, kwargs = tree_map_only(Divided, lambda p: p.whole().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


# Maps the address of each live gathered tensor to the tensor, its parameter, and the parameter's version.
_wholes: dict[int, tuple[weakref.ref[torch.Tensor], Divided, int]] = {}


class _Gather(torch.autograd.Function):
    """Gathers a parameter. The gradient is this worker's shard of the sum over the replicas.

    Outside of replicas, all workers compute the same, so there is no sum. The context keeps the replica,
    because a GPU's backward pass runs in another thread.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Divided, dtype: torch.dtype, replica: Replica | None) -> torch.Tensor:
        ctx.parameter, ctx.replica = parameter, replica
        if parameter.pending is not None:
            return parameter.pending.to(dtype, copy=True)
        part, places = parameter.to_local().to(dtype), parameter.shards.placements
        return parameter.kept_in.gather(part, places, parameter.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Scatter.apply(gradient, ctx.parameter, ctx.replica), None, None


class _Scatter(torch.autograd.Function):
    """The backward pass of `_Gather`, whose own backward pass gathers."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, parameter: Divided, replica: Replica | None) -> DTensor:
        ctx.parameter, ctx.weight = parameter, 1.0 if replica is None else replica.gradient_weight
        places, storage = parameter.shards.placements, parameter.kept_in
        gradient = gradient.to(parameter.dtype)
        if replica is None:
            part = storage.part_of(gradient, places)
        else:
            divisor, compression = replica.compression_divisor, replica.strategy.runtime.compression
            part = compressed(gradient * ctx.weight, compression, divisor)
            part = restored(storage.sum_part(part, places), gradient.dtype, divisor)
        return storage.of_part(part, places, parameter.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        storage, places = ctx.parameter.kept_in, ctx.parameter.shards.placements
        part = gradient.redistribute(placements=places).to_local() if isinstance(gradient, DTensor) else None
        whole = gradient if part is None else storage.gather(part, places, gradient.shape)
        return whole * ctx.weight, None, None


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor of a tensor that may be sharded."""
    if isinstance(tensor, Divided):
        return tensor.whole()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _dtype_of(func: Func, args: Sequence[object], kwargs: Mapping[str, object]) -> torch.dtype | None:
    """Returns the dtype of a cast of a sharded parameter."""
    if not isinstance(args[0], Divided):
        return None
    named = {
        _T.half: torch.float16,
        _T.float: torch.float32,
        _T.double: torch.float64,
        _T.bfloat16: torch.bfloat16,
    }
    return named.get(func) or next(
        (v for v in (*args[1:], *kwargs.values()) if isinstance(v, torch.dtype)), None
    )


def _is_in_place(func: Func) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in (
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
    )


def _written(args: Sequence[object]) -> list[Divided]:
    first = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    return [parameter for parameter in first if isinstance(parameter, Divided)]


def _in_place(func: Func, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Calls a function on gathered tensors, and writes the modified tensors back to their parameters."""
    written = _written(args)
    wholes = {id(p): p.whole().detach().clone() for p in written}

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        found = wholes.get(id(tensor))
        return _plain(tensor) if found is None else found

    plain_args, plain_kwargs = tree_map_only(torch.Tensor, plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for parameter in written:
        parameter.write(wholes[id(parameter)])
    return args[0] if written and not isinstance(args[0], (list, tuple)) else result


# PyTorch cannot compute these from shards: NumPy needs all elements, and the maximum needs at least one.
_NEED_WHOLE = {
    *(_T.numpy, _T.tolist, _T.__array__),
    *(torch.max, torch.min, torch.amax, torch.amin, torch.argmax, torch.argmin),
    *(_T.max, _T.min, _T.amax, _T.amin, _T.argmax, _T.argmin),
}


class _Sums(TorchFunctionMode):
    """A mode in which results from `DTensor`s, such as the norm of a gradient, are plain tensors on every worker.

    By default, PyTorch gives each worker its part of a sum, and `float` or `bool` would return this part.
    Collectives, metrics and NumPy do not accept a `DTensor`.
    """

    def __torch_function__(self, func: Func, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        args, kwargs = tuple(args), kwargs or {}
        if func in _NEED_WHOLE:
            args, kwargs = tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))
        result = func(*args, **kwargs)
        if not isinstance(result, DTensor):
            return result
        result = _completed(result)
        is_whole = all(place.is_replicate() for place in result.placements)
        # A gradient of a gradient goes through the `DTensor`.
        return result.to_local() if is_whole and not result.requires_grad else result


class OnParts(TorchFunctionMode):
    """A mode for optimizers, in which functions compute with the `DTensor`s of sharded parameters."""

    def __torch_function__(self, func: Func, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        if _is_in_place(func):
            for parameter in _written(args):
                parameter.version += 1
        if func == _T.data.__get__ and isinstance(args[0], Divided):
            return args[0]  # Keras 3.16 would find a `DTensor` here, and write with its own layout
        args, kwargs = tree_map_only(Divided, lambda p: p.shards, (args, kwargs or {}))
        if func is _T.copy_ and not isinstance(args[0], DTensor):
            args = (args[0], _plain(args[1]), *args[2:])
        return tree_map_only(DTensor, _completed, func(*args, **kwargs))


def _completed(tensor: DTensor) -> DTensor:
    if not any(place.is_partial() for place in tensor.placements):
        return tensor
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


@contextlib.contextmanager
def in_step(storage: Any, replica: Replica) -> Iterator[None]:
    """A context manager for a replica's function. Autograd gathers parameters again for the backward pass."""
    storage.replica = replica
    try:
        with implicit_replication(), _Sums(), torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        storage.replica = None
        storage.recent.clear()
        storage.pending.clear()
        _wholes.clear()


def _pack(tensor: torch.Tensor) -> torch.Tensor | _Again:
    if isinstance(tensor, (DTensor, Divided)):
        return tensor
    found = _wholes.get(tensor.untyped_storage().data_ptr())
    if found is None or (whole := found[0]()) is None:
        return tensor
    if whole.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        return tensor
    _, parameter, version = found
    return _Again(parameter, version, tensor)


def _unpack(packed: torch.Tensor | _Again) -> torch.Tensor:
    return packed.tensor() if isinstance(packed, _Again) else packed


class _Again:
    """A view of a gathered parameter, which the backward pass gathers again."""

    def __init__(self, parameter: Divided, version: int, tensor: torch.Tensor) -> None:
        self._parameter, self._version, self._dtype = parameter, version, tensor.dtype
        self._view = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> torch.Tensor:
        """Gathers the parameter again, and returns the view."""
        if self._parameter.version != self._version:
            raise RuntimeError(
                "One of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a sharded parameter of shape {tuple(self._parameter.shape)} was assigned before `backward`.\n"
                "Call `backward` before you assign the parameter."
            )
        with torch.no_grad():
            return self._parameter.whole(self._dtype).as_strided(*self._view)
