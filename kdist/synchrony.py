"""`check_in_sync`: compares the variables of all replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdist.errors import InvalidArgumentError, WorkerMismatchError

if TYPE_CHECKING:
    import keras
    import numpy as np

    from kdist.strategies.strategy import Strategy


def check_in_sync(model: keras.Model | Sequence[keras.Variable], strategy: Strategy | None = None) -> None:
    """Checks that all replicas of all workers have equal values of a model's variables.

    Replicas drift apart if anything other than kdist changes variables. Examples are an assignment on only
    one worker, a custom optimizer, or different weight files. All workers must call this function. It costs
    one small message, and the values of the first variable that differs.

    Args:
        model: A list of Keras variables, or a model, with its optimizer, metrics and seeds.
        strategy: The strategy to check; by default the strategy of the model, else the current strategy.

    Raises:
        WorkerMismatchError: On all workers, if a variable differs. The message contains the first such
            variable, the worker (and its replica), and the largest difference from worker 0.
        InvalidArgumentError: If there is no strategy.

    Example:

    ```python
    kdist.experimental.check_in_sync(model)
    ```
    """
    import numpy as np

    from kdist import keras_hooks
    from kdist.backends.messages import gather
    from kdist.collectives import all_gather_object, runtime_of

    is_model = not isinstance(model, (list, tuple))
    variables = keras_hooks.all_variables(model) if is_model else list(model)
    owner = strategy or (keras_hooks.strategy_of(model) if is_model else None)
    runtime = runtime_of(owner)
    if runtime is None:
        raise InvalidArgumentError(
            "check_in_sync did not find a strategy.",
            received={"model": model},
            hint="Create the model in a strategy's scope, or pass strategy=…",
        )
    values = [[np.asarray(v) for v in runtime.local_values(variable)] for variable in variables]
    digests = gather(runtime, [[_digest(value) for value in parts] for parts in values])
    for index, variable in enumerate(variables):
        everyone = [worker[index] if index < len(worker) else ["missing"] for worker in digests]
        if len({digest for worker in everyone for digest in worker}) == 1:
            continue
        parts = all_gather_object(values[index], strategy=owner)
        where, difference = _first_difference(parts)
        differing = sum(
            len({d for worker in digests for d in worker[i]}) > 1
            for i in range(len(variables))
            if all(i < len(worker) for worker in digests)
        )
        raise WorkerMismatchError(
            f"The variable {variable.path!r} differs between worker 0 and {where} by up to {difference:.3g}. In total, "
            f"{differing} of {len(variables)} variables differ.",
            received={"variable": variable.path, "shape": tuple(variable.shape)},
            hint="Load the same weights on every worker, and change variables only in `fit` or `strategy.run`.",
        )


def _digest(value: np.ndarray) -> str:
    head = f"{value.dtype.name} {value.shape}".encode()
    return hashlib.blake2b(head + value.tobytes(), digest_size=8).hexdigest()


def _first_difference(workers: Sequence[Sequence[np.ndarray]]) -> tuple[str, float]:
    import numpy as np

    first = workers[0][0]
    for index, parts in enumerate(workers):
        for replica, value in enumerate(parts):
            where = (f"replica {replica} of " if len(parts) > 1 else "") + f"worker {index}"
            if value.shape != first.shape:
                return where, float("nan")
            if _digest(value) != _digest(first):
                gap = np.abs(value.astype("float64") - first.astype("float64"))
                return where, float(gap.max(initial=0.0))
    return "a replica", 0.0
