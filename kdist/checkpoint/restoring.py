"""Restores all objects that a checkpoint contains, or none if an error occurs."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from kdist import keras_hooks
from kdist.arrays.types import R
from kdist.backends.contract import Runtime
from kdist.backends.messages import call_on_all
from kdist.checkpoint import layout, plain, sharded, state
from kdist.checkpoint.checked_reading import read_index, read_tensors
from kdist.checkpoint.folders import gather_from
from kdist.checkpoint.index import Index, Tensor
from kdist.checkpoint.snapshot import scope_of
from kdist.context import StrategyLike
from kdist.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, malformed_as

_RANDOM = "random"
_COUNTER = "save_counter"

_Fact = tuple[str, tuple[int, ...], str]  # the name, the shape and the dtype of a variable


class RestoreStatus:
    """The result of a restore: the objects that were not restored, because only one side contains them.

    Source: https://www.tensorflow.org/api_docs/python/tf/train/Checkpoint

    Args:
        path: The path of the checkpoint.
        unused: The names of saved objects that were not restored.
        unmatched: The names of objects that the checkpoint does not contain.
    """

    def __init__(self, path: str, unused: Sequence[str], unmatched: Sequence[str]) -> None:
        self.path = path
        self.unused = list(unused)
        self.unmatched = list(unmatched)

    def assert_consumed(self) -> RestoreStatus:
        """Raises an error unless all saved objects and all objects of the `kdist.Checkpoint` were restored.

        Raises:
            CheckpointMismatchError: If an object was not restored. The message contains its name.
        """
        self.assert_existing_objects_matched()
        if self.unused:
            raise CheckpointMismatchError(
                "Some objects in the checkpoint were not restored.",
                received={"checkpoint": self.path, "unused": self.unused},
                hint="Pass these objects to kdist.Checkpoint, or call expect_partial() instead of assert_consumed().",
            )
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Raises an error unless all objects were restored. The checkpoint may contain more objects.

        Raises:
            CheckpointMismatchError: If the checkpoint lacks an object. The message contains its name.
        """
        if self.unmatched:
            raise CheckpointMismatchError(
                "The checkpoint does not contain all objects to restore.",
                received={"checkpoint": self.path, "missing": self.unmatched},
                hint="Restore a checkpoint that contains them, or remove them from kdist.Checkpoint.",
            )
        return self

    def expect_partial(self) -> RestoreStatus:
        """Does nothing. kdist never warns about unused objects, so this only documents your intention."""
        return self

    def __repr__(self) -> str:
        return f"<RestoreStatus of {self.path!r}, unused={self.unused}, unmatched={self.unmatched}>"


@dataclass
class _Plan:
    """The assignments of a restore."""

    variables: list[tuple[keras.Variable, Tensor]]
    states: list[tuple[Any, Any]]
    unused: list[str]
    unmatched: list[str]
    sharded: Mapping[str, sharded.Sharded] = field(default_factory=dict)  # by the name of the tensor

    def assign(self, pair: tuple[keras.Variable, Tensor]) -> Callable[[Any], object]:
        """Returns the function that assigns a value of a variable, or of its local parts if it is sharded."""
        variable, tensor = pair
        return self.sharded[tensor.name].local.assign if tensor.name in self.sharded else variable.assign


def restore(
    path: str,
    objects: dict[str, object],
    strategy: StrategyLike | None,
    runtime: Runtime | None,
    random: bool,
) -> tuple[RestoreStatus, int]:
    """Restores objects, and replaces plain values in `objects`. Collective. Returns the status and `save_counter`."""
    path = layout.standing(path)
    index: Index = _on_all(runtime, path, lambda: read_index(path))
    _check_same(runtime, path, index)
    worker, num_workers = (0, 1) if runtime is None else (runtime.worker_index, runtime.num_workers)
    with scope_of(strategy):
        trained = {name: facts.get("trained", ()) for name, facts in index.parts.items()}
        parts = _on_all(runtime, path, lambda: state.collect(objects, trained))

    before: list[dict[str, object]] = []  # the previous random state of this process, once it was replaced

    def prepare() -> tuple[_Plan, dict[str, Any], dict[str, Any]]:
        with _named_damage(path):
            plan = match(path, index, parts, worker, num_workers)
            stored = set(plain.tensors_in(dict(index.values)))
            arrays = [tensor for tensor in index.tensors if tensor.name in stored]
            plan.sharded = sharded.match(runtime, plan.variables)
            wanted = [tensor for _, tensor in plan.variables if tensor.name not in plan.sharded] + arrays
            values: dict[str, Any] = {
                **read_tensors(path, index, wanted, shown=worker == 0),
                **sharded.read(path, index, plan.sharded, shown=worker == 0),
            }
            for variable, tensor in plan.variables:
                values[tensor.name] = _converted(path, tensor, values[tensor.name], variable)
            # Decode everything before the first assignment, so that a failed restore changes nothing.
            plan.states = [(owner, plain.decode(saved)) for owner, saved in plan.states]
            plain_values = {name: plain.decode(value, values) for name, value in index.values.items()}
            plain_values[_COUNTER] = int(plain_values[_COUNTER])
            randoms = index.states.get(_RANDOM, []) if random else []
            # If all workers had the same state, additional workers also continue with it.
            if randoms and (len(randoms) == 1 or worker in index.workers):
                before.append(state.random_state())
                with _named_damage(path, Exception):  # backends raise various errors for an invalid state
                    saved = plain.decode(index.states[_RANDOM][_of_worker(index, _RANDOM, worker)])
                    state.set_random_state(saved)
        return plan, values, plain_values

    try:
        plan, values, plain_values = _on_all(runtime, path, prepare)
    except BaseException:
        for known in before:
            state.set_random_state(known)
        raise
    _assign(strategy, parts, [(plan.assign(pair), values[pair[1].name]) for pair in plan.variables])
    for owner, saved in plan.states:
        owner.set_state(saved)
    puts = {part.name: part.put for part in parts if part.kind == "value" and part.put is not None}
    for name, value in plain_values.items():
        if name != _COUNTER and name not in plan.unused:
            puts.get(name, functools.partial(objects.__setitem__, name))(value)
    return RestoreStatus(path, plan.unused, plan.unmatched), plain_values[_COUNTER]


def _assign(
    strategy: StrategyLike | None,
    parts: Sequence[state.Part],
    values: Sequence[tuple[Callable[[Any], object], Any]],
) -> None:
    with scope_of(strategy):
        for assign, value in values:
            assign(value)
        for part in parts:
            if part.kind in ("model", "layer"):
                keras_hooks.finish_loading(part.owner)


def _named_damage(path: str, *also: type[Exception]) -> contextlib.AbstractContextManager[None]:
    return malformed_as(
        lambda error: CheckpointCorruptError(
            "The checkpoint is corrupt: a saved value has an invalid format.",
            received={"path": path, "error": error},
            hint="Restore another checkpoint, or a copy of this checkpoint.",
        ),
        *also,
    )


def restore_weights(path: str, model: keras.Model) -> None:
    """Restores a built model's weights and its optimizer's step count, only in this process.

    The checkpoint contains a single model, or a model named "model". Reads nothing else, because evaluation does
    not need the other optimizer variables.

    Raises:
        CheckpointError: As in `restore`.
    """
    path = layout.standing(path)
    index = read_index(path)
    names = [name for name, part in index.parts.items() if part["kind"] == "model"]
    if "model" not in names and len(names) != 1:
        raise CheckpointMismatchError(
            'Cannot choose a model to restore: the checkpoint contains no model, or several and none named "model".',
            received={"checkpoint": path, "models": names, "objects": sorted(index.parts)},
            hint="Save the model with: kdist.Checkpoint(model=model)",
        )
    name = "model" if "model" in names else names[0]
    parts = state.collect_layers({name: model})
    with _named_damage(path):
        plan = match(path, index, parts, 0, 1)
        states = [(owner, plain.decode(saved)) for owner, saved in plan.states]
    pairs = plan.variables + _iterations(index, name, model)
    values = read_tensors(path, index, [tensor for _, tensor in pairs])
    assigned = [(v.assign, _converted(path, tensor, values[tensor.name], v)) for v, tensor in pairs]
    _assign(state.strategy_of(model), parts, assigned)
    for owner, saved in states:
        owner.set_state(saved)


def _iterations(index: Index, name: str, model: keras.Model) -> list[tuple[keras.Variable, Tensor]]:
    own = f"{name}.optimizer"
    saved = [part for part, facts in index.parts.items() if own in (part, *facts["aliases"])]
    counters = [
        tensor
        for tensor in index.tensors
        if tensor.name.partition("/")[0] in saved and tensor.name.endswith("/iteration")
    ]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not counters:
        return []
    # The innermost optimizer's counter is the last one.
    return [(keras_hooks.step_variable(optimizer), counters[-1])]


def _on_all(runtime: Runtime | None, path: str, function: Callable[[], R]) -> R:
    damage: list[CheckpointCorruptError] = []

    def read() -> Any:
        try:
            return function()
        except CheckpointCorruptError as error:
            # Send it as a note, so that all workers raise this class and can fall back to another checkpoint.
            damage.append(error)

    def failed(index: int, text: str, kind: type[CheckpointError] = CheckpointError) -> Exception:
        return kind(
            f"Worker {index} cannot restore the checkpoint: {text}",
            received={"failed_worker": index} | ({} if "Received:" in text else {"path": path}),
            hint="" if "Received:" in text else f"Read the traceback in the log of worker {index}.",
        )

    result, damages = call_on_all(
        runtime, read, failed, lambda: str(damage[0]) if damage else None, "restored checkpoint"
    )
    if damage:
        raise damage[0]
    for index, text in enumerate(damages):
        if text is not None:
            raise failed(index, text, CheckpointCorruptError)
    return result


def _check_same(runtime: Runtime | None, path: str, index: Index) -> None:
    everyone = gather_from(runtime, [path, index.id])
    for worker, (other, save_id) in enumerate(everyone):
        if save_id != everyone[0][1]:
            raise CheckpointMismatchError(
                f"Worker 0 and worker {worker} restore different checkpoints.",
                received={"worker_0": everyone[0][0], f"worker_{worker}": other},
                hint="Use a directory that all workers share, or copy the checkpoint to every worker.",
            )


def match(path: str, index: Index, parts: Sequence[state.Part], worker: int, num_workers: int) -> _Plan:
    """Finds the saved tensor of every variable, and the saved state of every object with `get_state`.

    Raises:
        CheckpointMismatchError: If an object does not match the saved object.
    """
    by_part: dict[str, list[Tensor]] = {}
    for tensor in index.tensors:
        by_part.setdefault(tensor.name.partition("/")[0], []).append(tensor)
    known = {alias: name for name, part in index.parts.items() for alias in (name, *part["aliases"])}
    plan = _Plan([], [], [], [])
    used = set()
    for part in parts:
        name = next((known[alias] for alias in (part.name, *part.aliases) if alias in known), None)
        if name is None:
            plan.unmatched.append(part.name)
            continue
        kind = index.parts[name]["kind"]
        if kind != part.kind:
            raise CheckpointMismatchError(
                f"{part.name!r} is not the same kind of object as in the checkpoint.",
                received={"checkpoint": path, "saved": kind, "object": part.kind},
                hint="Pass an object of the saved kind, or choose another name for this object.",
            )
        used.add(name)
        if part.kind == "state":
            plan.states.append((part.owner, _state(path, index, name, worker, num_workers)))
        elif part.kind != "value":
            plan.variables += _pairs(path, part, by_part.get(name, []))
    plan.unused = [
        name
        for name, facts in index.parts.items()
        if name not in used and not (facts["kind"] == "value" and _has_place(name, parts))
    ]
    return plan


def _has_place(name: str, parts: Sequence[state.Part]) -> bool:
    """Returns whether a plain value can be added to the `Checkpoint`.

    A value inside a container has no place if the container lacks it. A value never replaces other objects.
    """
    return "." not in name and not any(part.name.startswith(f"{name}.") for part in parts)


def _pairs(path: str, part: state.Part, tensors: Sequence[Tensor]) -> list[tuple[keras.Variable, Tensor]]:
    mine = [
        (name.partition("/")[2], tuple(variable.shape), state.dtype_name(variable))
        for name, variable in part.variables.items()
    ]
    saved = [(tensor.name.partition("/")[2], tensor.shape, tensor.dtype) for tensor in tensors]
    pairs = itertools.zip_longest(mine, saved)
    different = next((pair for pair in pairs if _without_width(pair[0]) != _without_width(pair[1])), None)
    if different is None:
        return list(zip(part.variables.values(), tensors, strict=True))
    if part.may_differ:
        return []
    ours, theirs = different
    raise CheckpointMismatchError(
        f"The {part.kind} {part.name!r} does not match the checkpoint. The first difference is in "
        f"{_words(theirs or ours)}.",
        received={"checkpoint": path, "saved": _facts(theirs, len(saved)), "object": _facts(ours, len(mine))},
        hint=f"Create the {part.kind} with the code that saved it, or restore another checkpoint.",
    )


def _without_width(fact: _Fact | None) -> object:
    """Ignores the width of integers, because the widths of counters and seeds differ between backends."""
    return fact and (*fact[:2], "int" if "int" in fact[2] else fact[2])


def _converted(path: str, tensor: Tensor, array: Any, variable: keras.Variable) -> Any:
    if isinstance(array, dict):  # parts of a sharded variable
        return {part: _converted(path, tensor, value, variable) for part, value in array.items()}
    wanted = state.dtype_name(variable)
    if wanted == tensor.dtype:
        return array
    converted = array.astype(wanted)
    if (converted != array).any():
        raise CheckpointMismatchError(
            f"The saved integers of {tensor.name!r} do not fit into the dtype of the variable.",
            received={"checkpoint": path, "name": tensor.name, "saved": tensor.dtype, "object": wanted},
            hint=f"Create the variable with dtype={tensor.dtype!r}.",
        )
    return converted


def _words(fact: _Fact) -> str:
    return f"variable {fact[0].partition('/')[0] or 0}, {fact[0].partition('/')[2] or 'value'}"


def _facts(fact: _Fact | None, number: int) -> str:
    if fact is None:
        return f"only {number} variables"
    return f"{fact[0].partition('/')[2]} {fact[2]}{list(fact[1])}, of {number} variables"


def _state(path: str, index: Index, name: str, worker: int, num_workers: int) -> object:
    states = index.states[name]
    saved_by = index.saved_by.get("num_workers", len(states))
    if len(states) > 1 and num_workers != saved_by:
        raise CheckpointMismatchError(
            f"Cannot restore {name!r}: it has one saved state per worker, and the number of workers has changed.",
            received={"checkpoint": path, "saved_by": saved_by, "num_workers": num_workers},
            hint=f"Start {saved_by} workers, or remove {name!r} from kdist.Checkpoint.",
        )
    # Workers that do not share the directory have their states in other copies of the checkpoint.
    if len(states) > 1 and worker not in index.workers:
        raise CheckpointMismatchError(
            f"Cannot restore {name!r}: this copy of the checkpoint does not contain the state of worker {worker}.",
            received={"checkpoint": path, "workers": list(index.workers), "worker": worker},
            hint=f"Restore the copy that worker {worker} saved, or remove {name!r} from kdist.Checkpoint.",
        )
    return states[_of_worker(index, name, worker)]


def _of_worker(index: Index, name: str, worker: int) -> int:
    """Returns the position of a worker's state. If all workers share one state, returns 0."""
    return 0 if len(index.states[name]) == 1 else list(index.workers).index(worker)
