"""Large variables on parameter servers, from which a compiled function needs only the rows that it looks up.

JAX traces a function before it runs, so kdist can see how it uses such a variable (a table). If embeddings
only look up its rows, kdist compiles two programs. The first one returns the row indices. The second one
takes these rows as arguments, and looks up their positions. Its gradients are the gradients of these rows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Var

from kdist import keras_hooks
from kdist.backends.jax.programs import initialize
from kdist.backends.jax.scopes import Values

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import keras
    from jax.extend.core import Jaxpr

    from kdist.arrays.types import T
    from kdist.backends.jax.scopes import Held


class _Trace:
    """Records the use of tables while a function is traced."""

    def __init__(self, tables: Sequence[keras.Variable]) -> None:
        self.tables = {id(variable): variable for variable in tables}
        self.gradients: list[tuple[keras.Variable, jax.Array]] = []

    def __enter__(self) -> Self:
        self._outer, _current.trace = _current.trace, self
        return self

    def __exit__(self, *exc: object) -> None:
        _current.trace = self._outer

    def is_noted(self, variable: keras.Variable, gradient: jax.Array) -> bool:
        """Returns whether a gradient is unchanged since it was computed."""
        return any(of is variable and noted is gradient for of, noted in self.gradients)


class Finding(_Trace):
    """Records which rows a function looks up, and how else it uses tables.

    `rows` contains an array like a row of each table. Lookups return it.
    """

    def __init__(self, tables: Sequence[keras.Variable], rows: Sequence[jax.Array]) -> None:
        super().__init__(tables)
        self._rows = dict(zip(self.tables, rows, strict=True))
        self.lookups: list[keras.Variable] = []
        self.ids: list[jax.Array] = []
        self.refused: set[int] = set()
        self.asked: set[int] = set()

    def lookup(self, variable: keras.Variable, ids: jax.Array) -> jax.Array:
        """Records the row indices, and returns placeholder rows."""
        self.asked.add(id(variable))
        self.lookups.append(variable)
        self.ids.append(ids)
        return jnp.take(self._rows[id(variable)], jnp.zeros_like(ids), axis=0)

    def given(self, variable: keras.Variable) -> jax.Array:
        """Returns the value for which a gradient is computed."""
        self.asked.add(id(variable))
        return variable.value

    def shown(self, variable: keras.Variable, value: jax.Array) -> jax.Array:
        """Returns the value that the variable has in the differentiated function."""
        return value

    def by_rows(self, variable: keras.Variable, gradient: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """Returns placeholder rows for an unchanged gradient; otherwise records that all rows are needed."""
        if self.is_noted(variable, gradient):
            return jnp.zeros(1, "int32"), jnp.zeros_like(self._rows[id(variable)])
        self.refused.add(id(variable))
        return None


class Looking(_Trace):
    """Looks up rows among the `rows` that were requested from the servers, which have these `ids` in the tables.

    `positions` contains the positions in `rows` for each lookup.
    """

    def __init__(
        self,
        tables: Sequence[keras.Variable],
        rows: Sequence[jax.Array],
        ids: Sequence[jax.Array],
        positions: Sequence[jax.Array],
    ) -> None:
        super().__init__(tables)
        self._rows = dict(zip(self.tables, rows, strict=True))
        self._ids = dict(zip(self.tables, ids, strict=True))
        self._positions = iter(positions)

    def lookup(self, variable: keras.Variable, ids: jax.Array) -> jax.Array:
        """Returns the rows, with NaN for indices out of range as in Keras."""
        return jnp.take(self._rows[id(variable)], next(self._positions), axis=0)

    def given(self, variable: keras.Variable) -> jax.Array:
        return self._rows[id(variable)]

    def shown(self, variable: keras.Variable, value: jax.Array) -> jax.Array:
        """Uses `value` as the rows from now on, and returns a placeholder for the variable's value."""
        self._rows[id(variable)] = value
        return _nothing(variable)

    def by_rows(self, variable: keras.Variable, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert self.is_noted(variable, gradient)
        return self._ids[id(variable)], gradient


class _Current(threading.local):
    trace: Any = None


_current = _Current()


def _trace_of(variable: keras.Variable) -> Finding | Looking | None:
    trace = _current.trace
    return trace if trace is not None and id(variable) in trace.tables else None


def lookup(variable: keras.Variable, ids: jax.Array) -> jax.Array | None:
    """Returns the rows that an embedding looks up in a table, or `None` for other variables."""
    trace = _trace_of(variable)
    return None if trace is None else trace.lookup(variable, ids)


def given(variables: Sequence[keras.Variable]) -> list[jax.Array]:
    """Returns the values for which gradients are computed: the values of variables, or rows of tables."""
    return [v.value if (trace := _trace_of(v)) is None else trace.given(v) for v in variables]


@contextlib.contextmanager
def using(variables: Sequence[keras.Variable], values: Sequence[jax.Array]) -> Iterator[list[jax.Array]]:
    """A context in which a function computes with `given` values; yields the values of the variables."""
    trace = _current.trace
    rows = dict(trace._rows) if trace is not None else {}
    try:
        pairs = zip(variables, values, strict=True)
        yield [value if _trace_of(v) is None else trace.shown(v, value) for v, value in pairs]
    finally:
        if trace is not None:
            trace._rows = rows


def note(variables: Sequence[keras.Variable], gradients: Sequence[jax.Array]) -> None:
    """Records gradients when they are computed."""
    if _current.trace is not None:
        _current.trace.gradients += zip(variables, gradients, strict=True)


def by_rows(variable: keras.Variable, gradient: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Returns the row indices and values of an applied gradient, or `None` if it has all rows."""
    trace = _trace_of(variable)
    return None if trace is None else trace.by_rows(variable, gradient)


@contextlib.contextmanager
def in_step_of(model: keras.Model) -> Iterator[None]:
    """A context in which Keras's `train_step` uses single rows of tables, and a custom one uses all rows."""
    trace, optimizer = _current.trace, model.optimizer
    if trace is None or keras_hooks.is_own(type(model).train_step):
        if trace is not None:
            trace.refused = set(trace.tables)
        yield
        return
    compute = model.compute_loss_and_updates

    def compute_loss_and_updates(values: Sequence[jax.Array], *args: object, **kwargs: object) -> Any:
        with using(model.trainable_variables, values) as shown:
            return compute(shown, *args, **kwargs)

    def stateless_apply(
        own: Sequence[jax.Array], gradients: Sequence[jax.Array], values: Sequence[jax.Array]
    ) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
        note(model.trainable_variables, gradients)
        optimizer.apply(gradients, model.trainable_variables)
        return values, own

    # The step computes and applies gradients through these attributes, which exist only in this context.
    with (
        keras_hooks.temporarily(model, compute_loss_and_updates=compute_loss_and_updates),
        keras_hooks.temporarily(optimizer, stateless_apply=stateless_apply),
    ):
        yield


class Tables:
    """The tables from which a program needs only some rows. They are not among its variables.

    Args:
        variables: The tables.
        asked: The tables that the program uses.
        lookups: The table of each lookup, and the number of rows that it looks up.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable] = (),
        asked: Sequence[keras.Variable] = (),
        lookups: Sequence[tuple[keras.Variable, int]] = (),
    ) -> None:
        self.variables = list(variables)
        self._asked = list(asked)
        self._lookups = [variable for variable, _ in lookups]
        # A table without lookups may have a gradient without rows.
        self._capacity = [max(1, sum(size for of, size in lookups if of is v)) for v in asked]

    def values(self) -> list[jax.Array]:
        """Returns placeholders for the values of the tables in a trace."""
        return [_nothing(variable) for variable in self.variables]

    def find(self) -> Finding:
        """Returns a context in which a trace records row indices."""
        return Finding(self.variables, [jnp.zeros((1, *v.shape[1:]), v.dtype) for v in self.variables])

    def look(self, looked: Sequence[Sequence[jax.Array]]) -> AbstractContextManager[object]:
        """Returns a context in which a trace looks up the rows that `pull` returned."""
        return Looking(self._asked, *looked) if looked else contextlib.nullcontext()

    def pull(self, find: Callable[[], Sequence[jax.Array]]) -> Sequence[Sequence[np.ndarray]]:
        """Requests the rows with the indices from `find` from the servers; returns the argument of `look`."""
        found = [np.asarray(one) for one in find()] if self._lookups else []
        if not self._asked:
            return ()
        rows, numbers, positions = [], [], [np.zeros(())] * len(found)
        for variable, capacity in zip(self._asked, self._capacity, strict=True):
            size = variable.shape[0]
            mine = [i for i, of in enumerate(self._lookups) if of is variable]
            wrapped = {i: np.where(found[i] < 0, found[i] + size, found[i]) for i in mine}
            there = {i: (wrapped[i] >= 0) & (wrapped[i] < size) for i in mine}
            needed = np.unique(np.concatenate([np.zeros(0, np.int64), *(wrapped[i][there[i]] for i in mine)]))
            pulled = keras_hooks.record_of(variable).rows(needed)
            rows.append(np.zeros((capacity, *pulled.shape[1:]), pulled.dtype))
            rows[-1][: len(needed)] = pulled
            numbers.append(np.full(capacity, -1, np.int32))
            numbers[-1][: len(needed)] = needed
            for i in mine:
                at = np.where(there[i], np.searchsorted(needed, wrapped[i]), capacity)
                positions[i] = at.astype(np.int32)
        return rows, numbers, positions


def discover(
    tables: Sequence[keras.Variable],
    function: Callable[[Values], Callable[[T], object]],
    arguments: T,
    created: Callable[[Sequence[keras.Variable]], None],
    value: Callable[[keras.Variable], Held],
) -> tuple[Tables, Values] | None:
    """Traces a function, and finds the tables from which it needs only some rows, and its other variables.

    Args:
        tables: Large variables on servers.
        function, arguments, created, value: See `programs.discover`.

    Returns:
        The tables and the variables; `None` if a loop looks up rows, so their indices are unknown outside.
    """
    whole = [jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for v in tables]
    rows = [jax.ShapeDtypeStruct((1, *v.shape[1:]), v.dtype) for v in tables]
    caught: list[Any] = []

    def traced(
        whole: Sequence[jax.Array], rows: Sequence[jax.Array], arguments: T
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        values = Values(tables, whole, value)
        with Finding(tables, rows) as finding:
            function(values)(arguments)
        caught[:] = values, finding
        return finding.ids, [gradient for of, gradient in finding.gradients if id(of) in finding.tables]

    while True:
        try:
            program = jax.make_jaxpr(traced)(whole, rows, arguments)
        except jax.errors.UnexpectedTracerError:
            return None
        if any(isinstance(constant, jax.core.Tracer) for constant in program.consts):
            return None
        values, finding = caught
        others = [v for v in values.variables if id(v) not in finding.tables]
        if not initialize(others):
            break
        created(others)
    refused = finding.refused | set(values.written) | _needed(program.jaxpr, finding)
    lookups = [(of, int(np.prod(ids.shape))) for of, ids in zip(finding.lookups, finding.ids, strict=True)]
    for variable in tables:
        if 2 * sum(size for of, size in lookups if of is variable) > variable.shape[0]:
            refused.add(id(variable))
    kept = [variable for variable in tables if id(variable) not in refused]
    values.variables = [v for v in values.variables if id(v) not in finding.tables or id(v) in refused]
    return Tables(
        kept,
        [v for v in kept if id(v) in finding.asked],
        [one for one in lookups if id(one[0]) not in refused],
    ), values


def _needed(program: Jaxpr, finding: Finding) -> set[int]:
    """Returns tables that are needed whole: values or gradients are used, or indices depend on rows."""
    number = len(finding.tables)
    whole, rows = program.invars[:number], program.invars[number : 2 * number]
    ids, gradients = program.outvars[: len(finding.ids)], program.outvars[len(finding.ids) :]
    looked_at: set[Var] = set()
    of_rows = set(rows)
    for equation in program.eqns:
        read = {one for one in equation.invars if isinstance(one, Var)}
        looked_at |= read
        if read & of_rows:
            of_rows |= set(equation.outvars)
    needed = {key for key, one in zip(finding.tables, whole, strict=True) if one in looked_at}
    for variable, one in zip(finding.lookups, ids, strict=True):
        if one in of_rows:
            needed.add(id(variable))
    of_tables = [of for of, _ in finding.gradients if id(of) in finding.tables]
    return needed | {id(of) for of, one in zip(of_tables, gradients, strict=True) if one in looked_at}


def _nothing(variable: keras.Variable) -> jax.Array:
    return jnp.zeros(variable.shape, variable.dtype)
