"""Orders the operations of a recorded step so that exchanges between workers overlap with computation.

The backward pass computes the gradients of the last layers first. Their exchange can start while the gradients of
other layers are computed, as in `DistributedDataParallel` (https://arxiv.org/abs/2006.15704). The exchange of the
metrics does not need to wait for the exchange of the gradients.

All workers start their exchanges in the order in which Keras's code starts them, because a worker that replays a
step exchanges tensors with workers that run the code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kdist.backends.torch.recording import Name, Operation, names_in

# Gradients of this size, in bytes, travel together: more would wait too long, and fewer would have more overhead.
_BUCKET = 4 << 20


def buckets(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Groups tensors of a dtype, the last first, because the backward pass computes their gradients first."""
    groups: list[list[int]] = []
    current: dict[torch.dtype, tuple[list[int], int]] = {}
    for i, tensor in reversed([*enumerate(tensors)]):
        group, size = current.get(tensor.dtype, ([], _BUCKET))
        if size >= _BUCKET:
            group, size = [], 0
            groups.append(group)
        group.append(i)
        current[tensor.dtype] = group, size + tensor.nbytes
    return groups


def roots_of(operations: Sequence[Operation]) -> dict[Name, Name]:
    """Maps each result that shares memory with an earlier tensor to this tensor."""
    roots: dict[Name, Name] = {}
    for operation in operations:
        if operation.views:
            root = roots.get(operation.views[0], operation.views[0])
            for name in names_in(operation.results):
                if name != root:
                    roots[name] = root
    return roots


def scheduled(operations: Sequence[Operation], keeps: Callable[[Name], bool]) -> list[Operation]:
    """Returns the operations with early exchanges; operations wait for an exchange as late as possible.

    `keeps` returns whether a tensor must keep its value if an exchange fails.
    """
    needs = _needs(operations, keeps)
    done: set[int] = set()
    order: list[Operation] = []

    def add(index: int) -> None:
        # Any order in which earlier operations come first is valid.
        chosen = sorted(_closure(index, needs, done))
        order.extend(operations[i] for i in chosen)
        done.update(chosen)

    kinds = [operation.kind for operation in operations]
    for i in [i for i, kind in enumerate(kinds) if kind == "exchange"]:
        add(i)
    others = [i for i, kind in enumerate(kinds) if kind != "finish"]
    for i in others:  # the operations that need no result of the exchanges
        if all(kinds[j] != "finish" for j in _closure(i, needs, done)):
            add(i)
    for i in (*others, *range(len(operations))):
        add(i)
    return order


def _closure(index: int, needs: Sequence[set[int]], done: set[int]) -> set[int]:
    """Returns an operation and all operations that must run before it, without operations that are done."""
    found: set[int] = set()
    waiting = [index]
    while waiting:
        i = waiting.pop()
        if i not in found and i not in done:
            found.add(i)
            waiting.extend(needs[i])
    return found


def _needs(operations: Sequence[Operation], keeps: Callable[[Name], bool]) -> list[set[int]]:
    """Returns for each operation the earlier operations whose effects it needs, or must not disturb."""
    roots = roots_of(operations)
    made: dict[Name, int] = {}  # the operation that returned a name
    written: dict[Name, int] = {}  # the last operation that wrote to the memory of a root
    read: dict[Name, set[int]] = {}  # the operations that have read it since
    last_random: set[int] = set()
    finishes: set[int] = set()  # after which the model changes
    needs: list[set[int]] = []
    for i, operation in enumerate(operations):
        found: set[int] = set()
        for name in operation.reads():
            root = roots.get(name, name)
            found.update(known[key] for known, key in ((made, name), (written, root)) if key in known)
            read.setdefault(root, set()).add(i)
        for name in operation.writes:
            root = roots.get(name, name)
            found |= read.pop(root, set())
            written[root] = i
            read[root] = {i}
            found |= finishes if keeps(root) else set()
        if operation.kind == "random":
            found |= last_random
            last_random = {i}
        finishes |= {i} if operation.kind == "finish" else set()
        for name in names_in(operation.results):
            made.setdefault(name, i)
        needs.append(found - {i})
    return needs
