"""Runs the recorded operations of a step again; see `recording`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from kdist.backends.torch.recording import Name, Operation, Recording, mapped, names_in
from kdist.backends.torch.schedule import roots_of, scheduled

if TYPE_CHECKING:
    from kdist.arrays.types import Structure

# The size of a constant, in elements, up to which it is computed only once.
_SMALL = 4096


def compiled(
    recording: Recording, outputs: Structure, parameters: Sequence[torch.Tensor]
) -> Callable[[Sequence[torch.Tensor | None]], Structure] | None:
    """Returns a function that runs the operations on the tensors of a batch, and returns the outputs.

    Args:
        recording: The operations. If they cannot be replayed, sets its `reason` and returns `None`.
        outputs: The outputs of the step.
        parameters: The tensors whose `grad` the step has set, which the function sets too.
    """
    names = recording.results((outputs, [parameter.grad for parameter in parameters]))
    if not recording.reason:
        _check_writes(recording)
    if recording.reason:
        return None
    run = _Program(recording, names_in(names)).function(names)

    def replay(inputs: Sequence[torch.Tensor | None]) -> Structure:
        results, gradients = run(inputs)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return results

    return replay


def _check_writes(recording: Recording) -> None:
    roots = roots_of(recording.operations)
    for operation in recording.operations:
        for name in operation.writes:
            root = roots.get(name, name)
            # The tensors of a batch are copies, because Keras changes them, for example sample weights.
            if root.text[0] == "c" and not recording.is_variable(root):
                return recording.refuse(
                    f"{operation.function} changes a tensor that does not belong to the model"
                )
    return None


class _Program:
    def __init__(self, recording: Recording, outputs: list[Name]) -> None:
        self._outputs = outputs
        self._values: dict[str, Any] = dict(recording.constants)
        roots = roots_of(recording.operations)
        self._written = {
            roots.get(name, name) for operation in recording.operations for name in operation.writes
        }
        self._written |= {roots.get(name, name) for name in outputs}
        self._roots = roots
        operations = self._without_unused(self._without_constants(recording.operations))
        self._operations = scheduled(operations, recording.keeps)

    def _without_constants(self, operations: Sequence[Operation]) -> list[Operation]:
        """Computes small results that are the same in each step once, for example a number of the loss."""
        kept = []
        known: set[Name] = set()
        for operation in operations:
            values = self._constant_values(operation, known)
            if values is None:
                kept.append(operation)
            else:
                names = names_in(operation.results)
                self._values.update(zip((name.text for name in names), values, strict=True))
                known.update(names)
        return kept

    def _constant_values(self, operation: Operation, known: set[Name]) -> list[torch.Tensor] | None:
        names = names_in(operation.results)
        if operation.kind not in ("pure", "lift") or operation.writes or "empty" in str(operation.function):
            return None
        if operation.kind == "pure" and not all(name in known for name in operation.reads()):
            return None
        if not names or any(self._roots.get(name, name) in self._written for name in names):
            return None
        args, kwargs = mapped(
            lambda leaf: self._values[leaf.text] if isinstance(leaf, Name) else leaf, operation.arguments
        )
        with torch.no_grad():
            values = tree_leaves(operation.function(*args, **kwargs))
        return values if sum(value.numel() for value in values) <= _SMALL else None

    def _without_unused(self, operations: Sequence[Operation]) -> list[Operation]:
        needed = set(self._outputs)
        kept = []
        for operation in reversed(operations):
            is_pure = operation.kind in ("pure", "lift") and not operation.writes
            if not is_pure or needed.intersection(names_in(operation.results)):
                kept.append(operation)
                needed.update(operation.reads())
        return kept[::-1]

    def function(self, results: object) -> Callable[[Sequence[torch.Tensor | None]], Any]:
        """Returns the program as a Python function, which frees each tensor after its last use."""
        names = [*(n for o in self._operations for n in o.reads()), *self._outputs]
        lines = [
            f"{text} = inputs[{text[1:]}]" for text in sorted({n.text for n in names if n.text[0] == "x"})
        ]
        last: dict[Name, int] = {}
        for i, operation in enumerate(self._operations):
            last.update(dict.fromkeys((*operation.reads(), *names_in(operation.results)), i))
        ends: dict[int, list[str]] = {}
        for name, i in last.items():
            if name.text[0] == "t" and name not in self._outputs and name.text not in self._values:
                ends.setdefault(i, []).append(name.text)
        for i, operation in enumerate(self._operations):
            lines.append(self._line(i, operation))
            if i in ends:
                lines.append(f"del {', '.join(ends[i])}")
        lines.append(f"return {self._source(results)}")
        source = "def step(inputs):\n" + "\n".join(f"    {line}" for line in lines)
        exec(compile(source, "<recorded step>", "exec"), self._values)
        return torch.no_grad()(self._values["step"])

    def _line(self, index: int, operation: Operation) -> str:
        # A step may change a new constant, so each step needs a copy.
        function = torch.clone if operation.kind == "lift" else operation.function
        self._values[f"f{index}"] = getattr(function, "_op", function)
        args, kwargs = operation.arguments
        given = [self._source(part) for part in args]
        given += [f"{key}={self._source(value)}" for key, value in kwargs.items()]
        call = f"f{index}({', '.join(given)})"
        reads = operation.reads()
        is_new = any(name not in reads for name in names_in(operation.results))
        return f"{self._source(operation.results, '_')} = {call}" if is_new else call

    def _source(self, structure: object, nothing: str = "None") -> str:
        if isinstance(structure, Name):
            return structure.text
        if isinstance(structure, dict):
            return "{" + ", ".join(f"{k!r}: {self._source(v)}" for k, v in structure.items()) + "}"
        if isinstance(structure, (list, tuple)):
            parts = "".join(f"{self._source(part, nothing)}, " for part in structure)
            return f"[{parts}]" if isinstance(structure, list) else f"({parts})"
        if structure is None:
            return nothing
        if isinstance(structure, (bool, int, str)):
            return repr(structure)
        text = f"k{len(self._values)}"  # such as a dtype, and `inf`, which Python cannot read
        self._values[text] = structure
        return text
