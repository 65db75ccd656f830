"""Records the tensor operations of a step, so that later steps run them without Keras's Python code.

Keras needs more time for the Python code of a small step than PyTorch for its operations. A step of a built-in
model makes the same operations for every batch of the same shapes. kdist therefore records one step, and
`replay` runs its operations again, on the new batch and the present variables.

A recording sees operations below autograd, so it contains the operations of the backward pass:
https://docs.pytorch.org/docs/stable/torch.overrides.html and `torch.utils._python_dispatch`. It cannot
contain a decision about the numbers in a tensor. A step that makes such a decision is not replayed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch._ops import OpOverload

    # The arguments of `__torch_function__` and `__torch_dispatch__`.
    Func: TypeAlias = Callable[..., object]
    Types: TypeAlias = Collection[type]
    Args: TypeAlias = tuple[Any, ...]
    Kwargs: TypeAlias = dict[str, object] | None

    from kdist.arrays.types import Structure, T

_WIDE = (torch.float32, torch.float64)
_PLAIN = (int, float, bool, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_T = torch.Tensor
# Functions that give the numbers of a tensor to Python, which may decide about them.
_READS_NUMBERS = frozenset(
    (
        *(_T.numpy, _T.tolist, _T.item, _T.data_ptr, _T.untyped_storage, _T.storage, _T.__array__),
        *(_T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__dlpack__),
    )
)
# Operations that return the same tensor again, because a replay computes no gradients and keeps the shape.
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.expand.default)
Start = Callable[[torch.Tensor], Callable[[], None]]
_DECIDES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class Name:
    """A tensor or a random generator in a recording: "x…" is an input, "c…" a constant, "t…" a result."""

    text: str


@dataclass
class Operation:
    """One operation of a step.

    Args:
        function: The operation of PyTorch, or a Python function that is called as a whole.
        arguments: The positional and named arguments, with a `Name` in place of each tensor.
        results: The result, with names in place of tensors.
        writes: The tensors that the operation changes.
        views: The tensors whose memory the results may share.
        kind: "pure", "random", "lift" (a new constant), "whole" (a Python function), "exchange" (the start of an
            exchange with other workers) or "finish" (its end).
    """

    function: Callable[..., object]
    arguments: tuple[Sequence[object], Mapping[str, object]]
    results: object
    writes: list[Name]
    views: list[Name]
    kind: str

    def reads(self) -> list[Name]:
        return names_in(self.arguments)


def names_in(structure: object) -> list[Name]:
    """Returns the names in nested lists, tuples and dictionaries."""
    if isinstance(structure, Name):
        return [structure]
    if isinstance(structure, dict):
        structure = structure.values()
    elif not isinstance(structure, (list, tuple)):
        return []
    return [name for part in structure for name in names_in(part)]


def mapped(function: Callable[[Any], object], structure: object) -> Any:
    """Applies a function to the leaves of nested lists, tuples and dictionaries."""
    if isinstance(structure, dict):
        return {key: mapped(function, value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return type(structure)([mapped(function, part) for part in structure])
    return function(structure)


class Recording:
    """The operations of one step while it runs.

    Args:
        inputs: The leaves of the batch: tensors and `None`.
        variables: The tensors that the step may change, because they belong to the model.
        metrics: The tensors among them that may keep values of a failed step.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor | None],
        variables: Sequence[torch.Tensor],
        metrics: Sequence[torch.Tensor] = (),
    ) -> None:
        self.operations: list[Operation] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.reason = ""
        """The reason why the step cannot be replayed."""
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._data: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._generators: dict[int, tuple[torch.Generator, Name]] = {}
        self._variables = {id(tensor) for tensor in variables}
        self._metrics = {id(tensor) for tensor in metrics}
        self._random_states: list[bytes] = []
        for i, tensor in enumerate(inputs):
            if tensor is not None:
                self._names[tensor] = Name(f"x{i}")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context manager for the step."""
        drawn = _python_random_state()
        self._random_states = _random_states()
        with _Functions(self), _Operations(self):
            yield
        self._check_random_states()
        if _python_random_state() != drawn:  # for example Keras's AugMix, which chooses layers
            self.refuse("Python draws random numbers")

    def refuse(self, reason: str) -> None:
        """Notes that the step cannot be replayed. The step itself continues."""
        self.reason = self.reason or reason
        self.operations.clear()
        self.constants.clear()

    def note_data(self, data: torch.Tensor) -> None:
        """Notes that Python has read the attribute `data` of a tensor. The step may look at it, but not use it.

        PyTorch calls no operation for it, so the recording could not find the tensor to which it belongs.
        """
        self._data[data] = True

    def is_variable(self, name: Name) -> bool:
        """Returns whether a constant is a tensor of the model."""
        return id(self.constants.get(name.text)) in self._variables

    def keeps(self, name: Name) -> bool:
        """Returns whether a tensor of the model must keep its value if the step fails."""
        return self.is_variable(name) and id(self.constants[name.text]) not in self._metrics

    def whole(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Calls a Python function, and records the call instead of its operations. It may change its tensors."""
        arguments = self._named((args, kwargs))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            result = function(*args, **kwargs)
        if not self.reason:
            writes = names_in(arguments)
            self._add(Operation(function, arguments, None, writes, [], "whole"), result)
        return result

    def exchange(self, start: Start, tensor: torch.Tensor) -> None:
        """Runs an exchange of workers that changes a tensor, and records its start and its end."""
        (name,) = self._named([tensor])
        work = Name(f"t{len(self.operations)}_work")
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            start(tensor)()
        if not self.reason:
            self.operations.append(Operation(start, ([name], {}), work, [name], [], "exchange"))
            self.operations.append(Operation(_finish, ([work, name], {}), None, [name], [], "finish"))

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random:
            self._check_random_states()
        result = func(*args, **kwargs)
        if not self.reason:
            self.note(func, args, kwargs, result)
        if is_random:
            self._random_states = _random_states()
        return result

    def _check_random_states(self) -> None:
        # `torch.utils.checkpoint` sets an earlier state to draw the masks of Dropout again.
        if not self.reason and _random_states() != self._random_states:
            self.refuse("the step changes the state of PyTorch's random generators")

    def note(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object], result: Any) -> None:
        """Records an operation that PyTorch has run."""
        if func.namespace == "c10d":
            return self.refuse("the step exchanges data with a collective that kdist does not record")
        if any(tag in func.tags for tag in _DECIDES):
            return self.refuse(f"the step depends on the numbers in a tensor ({func})")
        if (
            "mkldnn_rnn" in func.name()
        ):  # its workspace is undefined, for which PyTorch takes no Python object
            return self.refuse("the step contains torch.nn.LSTM")
        arguments = self._named((args, kwargs))
        if func in _SAME and (result.shape, result.stride()) == (args[0].shape, args[0].stride()):
            self._names[result] = arguments[0][0]
            return None
        writes: list[Name] = []
        views: list[Name] = []
        by_name = dict(zip((a.name for a in func._schema.arguments), arguments[0], strict=False))
        for argument in func._schema.arguments:
            given = names_in(arguments[1].get(argument.name, by_name.get(argument.name)))
            if argument.alias_info is not None:
                (writes if argument.alias_info.is_write else views).extend(given)
        kind = "random" if torch.Tag.nondeterministic_seeded in func.tags else "pure"
        if func is torch.ops.aten.lift_fresh.default:
            kind, views = "lift", []
            # A copy, because the step may change the constant later.
            self.constants[names_in(arguments)[0].text] = args[0].clone()
        return self._add(Operation(func, arguments, None, writes, views, kind), result)

    def results(self, outputs: Structure) -> Any:
        return self._named(outputs)

    def _add(self, operation: Operation, result: object) -> None:
        if self.reason:
            return
        fresh = operation.kind == "lift"
        operation.results = mapped(lambda leaf: self._result(leaf, fresh), result)
        self.operations.append(operation)

    def _result(self, leaf: object, is_fresh: bool) -> Name | None:
        if not isinstance(leaf, (torch.Tensor, torch.Generator)):
            return None
        known = None if is_fresh else self._find(leaf)
        return known or self._set(leaf, Name(f"t{len(self.operations)}_{id(leaf)}"))

    def _named(self, structure: object) -> Any:
        return mapped(self._name, structure)

    def _name(self, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            found = self._find(leaf)
            if leaf in self._data:
                self.refuse("the step uses the attribute `data` of a tensor")
            if found is None:
                found = self._set(leaf, Name(f"c{len(self.constants)}"))
                self.constants[found.text] = leaf
            return found
        if isinstance(leaf, torch.Generator):
            found = self._find(leaf)
            if found is None:
                self.refuse("the step draws from a separate random generator")
            return found
        if leaf is not None and not isinstance(leaf, _PLAIN):
            self.refuse(f"an operation has an argument of type {type(leaf).__name__}")
        return leaf

    def _find(self, leaf: torch.Tensor | torch.Generator) -> Name | None:
        if not isinstance(leaf, torch.Generator):
            return self._names.get(leaf)
        # PyTorch wraps a generator in new objects. In PyTorch 2.11, they cannot have weak references.
        known = self._generators.get(leaf._cdata)
        return None if known is None else known[1]

    def _set(self, leaf: torch.Tensor | torch.Generator, name: Name) -> Name:
        if isinstance(leaf, torch.Generator):
            self._generators[leaf._cdata] = (leaf, name)
        else:
            self._names[leaf] = name
        return name


def _python_random_state() -> tuple[object, ...]:
    _, keys, *position = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), position


def _random_states() -> list[bytes]:
    gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return [generator.get_state().numpy().tobytes() for generator in (torch.default_generator, *gpus)]


def exchange(
    recording: Recording | None,
    start: Start,
    tensors: list[torch.Tensor],
    compression: str | None = None,
    divisor: int = 1,
) -> list[torch.Tensor]:
    """Runs an exchange of workers for each tensor, all at the same time, or records them. Returns the sums.

    `start` starts an exchange, which may change the tensor, and returns the function that waits for its end. For the
    other arguments, see `compressed`.
    """
    sent = tensors if compression is None else [compressed(t, compression, divisor) for t in tensors]
    if recording is not None:
        for tensor in sent:
            recording.exchange(start, tensor)
    else:
        for finish in [start(tensor) for tensor in sent]:
            finish()
    if compression is None:
        return tensors
    return [restored(total, t.dtype, divisor) for total, t in zip(sent, tensors, strict=True)]


def compressed(tensor: torch.Tensor, compression: str | None, divisor: int) -> torch.Tensor:
    """Divides a float32 or float64 tensor and casts it to a 16-bit dtype. Returns other tensors unchanged."""
    if compression is None or tensor.dtype not in _WIDE:
        return tensor
    return (tensor if divisor == 1 else tensor / divisor).to(getattr(torch, compression))


def restored(total: torch.Tensor, dtype: torch.dtype, divisor: int) -> torch.Tensor:
    """Returns the sum of tensors of this dtype that `compressed` has cast, or else the tensor."""
    if total.dtype is dtype:
        return total
    return total.to(dtype) if divisor == 1 else total.to(dtype).mul_(divisor)


def _finish(work: Callable[[], None], tensor: torch.Tensor) -> None:
    work()


class _Operations(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: OpOverload, types: Types, args: Args = (), kwargs: Kwargs = None
    ) -> object:
        return self._recording.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Sees what PyTorch does before it calls an operation."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Func, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        kwargs = kwargs or {}
        # Keras's SGD passes the learning rate as a tensor, from which PyTorch reads the number.
        if func is torch._foreach_add_ and isinstance(kwargs.get("alpha"), torch.Tensor):
            return self._recording.whole(func, *args, **kwargs)
        if func in _READS_NUMBERS:
            self._recording.refuse(f"Python reads the numbers of a tensor ({func.__name__})")
        if func == _T.data.__set__:
            self._recording.refuse("the step sets the attribute `data` of a tensor")
        result = func(*args, **kwargs)
        if func == _T.data.__get__:  # Keras 3.16 looks at its type whenever it assigns a variable
            self._recording.note_data(result)
        return result
