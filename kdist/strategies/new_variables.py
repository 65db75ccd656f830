"""Variables that a strategy's scope has seen, until all workers have the chief's values of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kdist import keras_hooks
from kdist.backends.contract import Runtime
from kdist.backends.messages import check_equal
from kdist.backends.variable_table import VariableTable


class NewVariables:
    """The variables that were created in a scope since the workers last shared their values.

    Workers may draw different random numbers for them. They share at the end of the scope and before a
    function runs in the replicas: in one collective for all variables, since one for each would take as long as
    hundreds of training steps.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Held, since what one worker's garbage collector has taken another one's may have left.
        self._found: list[Any] = []
        self._seen: VariableTable[bool] = VariableTable()

    def add(self, variable: Any) -> None:
        """Notes a variable."""
        self._seen[variable] = True
        if self._runtime.takes_variables:
            self._found.append(variable)

    def forget(self) -> None:
        """Leaves the new variables as they are on each worker."""
        self._found = []

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Within this, new variables are nobody's: Keras makes some for itself on a worker that writes a file."""
        known = len(self._found)
        try:
            yield
        finally:
            del self._found[known:]

    def has_seen(self, variable: Any) -> bool:
        """Says whether a variable was created in the scope."""
        return self._seen.get(variable) is not None

    def share(self) -> None:
        """Gives every worker the chief's values, held as the topology says.

        All workers must call it, having created the same variables.

        Raises:
            WorkerMismatchError: The workers have created different variables.
            InvalidArgumentError: A layout does not divide its variable.
        """
        if not self._runtime.takes_variables:
            return
        variables = [variable for variable in self._found if keras_hooks.native_value(variable) is not None]
        noted, self._found = bool(self._found), []
        if not noted:
            return
        # Names carry counters ("dense_1"), which may differ where a worker built another model before.
        facts = {f"variable {i}": [list(v.shape), str(v.dtype)] for i, v in enumerate(variables)}
        check_equal(
            self._runtime,
            "variables in the scope of the strategy",
            {"the number of variables": len(variables), **facts},
            "Create the same models, optimizers and metrics on every worker, in the same order.",
        )
        self._runtime.broadcast_variables(variables)
