"""Names that modules import on first use, errors for missing names, and names of `tf.distribute` that kdist omits."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

_Class = TypeVar("_Class", bound=type)

_SESSIONS = "It configures TensorFlow 1 sessions. Remove the call."
_ITERATORS = "It creates TensorFlow 1 iterators. Use "
_NAMED_TUPLE = "It is a tuple method, and only TensorFlow implements these options as a tuple."

LEFT_OUT = {
    "Server.server_def": "It is a TensorFlow protocol buffer. Use server.target.",
    "experimental.rpc": (
        "It calls TensorFlow graph functions on a server, which other backends do not support. "
        "To exchange objects between workers, use kdist.all_gather_object and kdist.broadcast."
    ),
    "experimental.PreemptionWatcher": (
        "It only works in Google's data centers, where a coordinator reconnects to TPU workers. kdist restarts the "
        "whole job. Use kdist.experimental.PreemptionCheckpointHandler, or kdist.callbacks.BackupAndRestore in fit."
    ),
    "Strategy.colocate_vars_with": "Use strategy.extended.colocate_vars_with instead.",
    "Strategy.configure": _SESSIONS,
    "Strategy.experimental_run": _ITERATORS + "strategy.run(fn, args=(next(iterator),)).",
    "Strategy.group": "It groups TensorFlow 1 graph operations. Use strategy.experimental_local_results.",
    "Strategy.make_dataset_iterator": _ITERATORS + "iter(strategy.experimental_distribute_dataset(dataset)).",
    "Strategy.make_input_fn_iterator": _ITERATORS + "iter(strategy.distribute_datasets_from_function(fn)).",
    "Strategy.unwrap": "Use strategy.experimental_local_results, its new name.",
    "Strategy.update_config_proto": _SESSIONS,
    "InputOptions.count": _NAMED_TUPLE,
    "InputOptions.index": _NAMED_TUPLE,
    "RunOptions.count": _NAMED_TUPLE,
    "RunOptions.index": _NAMED_TUPLE,
}
"""Names, modules and members of `tf.distribute` that kdist omits: the reason, and what to use instead."""

ELSEWHERE = {
    "BackupAndRestore": "kdist.callbacks.BackupAndRestore",
    "ClusterResolver": "kdist.cluster_resolver.ClusterResolver",
    "SlurmClusterResolver": "kdist.cluster_resolver.SlurmClusterResolver",
    "TFConfigClusterResolver": "kdist.cluster_resolver.TFConfigClusterResolver",
    "ClusterCoordinator": "kdist.coordinator.ClusterCoordinator",
    "CentralStorageStrategy": "kdist.experimental.CentralStorageStrategy",
    "CommunicationImplementation": "kdist.experimental.CommunicationImplementation",
    "CommunicationOptions": "kdist.experimental.CommunicationOptions",
    "PreemptionCheckpointHandler": "kdist.experimental.PreemptionCheckpointHandler",
    "TerminationConfig": "kdist.experimental.TerminationConfig",
    "train": "kdist.Checkpoint and kdist.CheckpointManager",
}
"""Names that users look for in `kdist`, and their places."""


def no_such_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Returns the error for a missing name, with the reason if kdist omits it, or else with the nearest known name."""
    message = f"module {module!r} has no attribute {name!r}"
    reason = LEFT_OUT.get(f"{module}.{name}".removeprefix("kdist."))
    if reason is not None:
        return AttributeError(f"{message}. {reason}", name=name)
    if module == "kdist" and name in ELSEWHERE:
        return AttributeError(f"{message}. Use {ELSEWHERE[name]}.", name=name)
    near = difflib.get_close_matches(name, known, n=1)
    return AttributeError(f"{message}. Did you mean {near[0]!r}?" if near else message, name=name)


def loaded_on_use(module: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module that imports names on first use. `home` contains their modules."""

    def load(name: str) -> Any:
        if name not in home:
            raise no_such_name(module, name, home)
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return load


class _LeftOut:
    """An omitted member: `hasattr` returns `False`, and access raises an error with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def __get__(self, owner: object, kind: type) -> NoReturn:
        message = f"{kind.__name__!r} has no attribute {self._name!r}. {self._reason}"
        raise AttributeError(message, name=self._name)


def without_left_out(kind: _Class) -> _Class:
    """Makes omitted members of a class, and of its subclasses, raise an error with the reason."""
    for name, reason in LEFT_OUT.items():
        owner, _, member = name.partition(".")
        if owner == kind.__name__:
            setattr(kind, member, _LeftOut(member, reason))
    return kind
