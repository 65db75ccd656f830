"""New variables of a strategy's scope, until all workers have the chief's values."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kdist import keras_hooks
from kdist.backends.contract import Runtime
from kdist.backends.messages import check_equal
from kdist.backends.variable_table import VariableTable

if TYPE_CHECKING:
    import keras


# By variable, the `NewVariables` of the scope that created it.
_creators: VariableTable[weakref.ref[NewVariables]] = VariableTable()


def creator_of(variable: keras.Variable) -> NewVariables | None:
    """Returns the new variables of the scope in which a variable was created, or `None`."""
    creator = _creators.get(variable)
    return None if creator is None else creator()


class NewVariables:
    """The variables that were created in a scope since the workers last shared their values.

    Sharing is necessary because workers may draw different random initial values. Workers share at the end of
    the scope and before a function runs in the replicas. They use one collective for all variables, because
    one per variable would take as long as hundreds of training steps.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Strong references, because garbage collection may run at different times on the workers.
        self._found: list[keras.Variable] = []

    def add(self, variable: keras.Variable) -> None:
        _creators[variable] = weakref.ref(self)
        if self._runtime.takes_variables:
            self._found.append(variable)

    def forget(self) -> None:
        """Drops the new variables without sharing their values."""
        self._found = []

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """A context manager that ignores new variables, which Keras creates when one worker saves a file."""
        known = len(self._found)
        try:
            yield
        finally:
            del self._found[known:]

    def share(self) -> None:
        """Sends the chief's values to all workers, and shards them if the topology requires it.

        All workers must create the same variables before they call it; see `Strategy.scope`.
        """
        if not self._runtime.takes_variables:
            return
        variables = [variable for variable in self._found if keras_hooks.native_value(variable) is not None]
        noted, self._found = bool(self._found), []
        if not noted:
            return
        # Names contain counters ("dense_1"), which may differ if a worker has created another model before.
        facts = {f"variable {i}": f"shape {tuple(v.shape)}, {v.dtype}" for i, v in enumerate(variables)}
        check_equal(
            self._runtime,
            "variables in the scope of the strategy",
            {"the number of variables": len(variables), **facts},
            "Create the same models, optimizers and metrics on every worker, in the same order.",
        )
        self._runtime.broadcast_variables(variables)
