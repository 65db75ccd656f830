"""The path of a contract case on PyTorch: whether kdist replays its steps, or runs Keras's Python code in each step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

# The cases in which no step is replayed, and a part of the reason in the log, which is empty for few batches.
EAGER = {
    "add_loss": "is custom code",
    "classification_metrics": "depends on the numbers in a tensor",
    "compute_loss": "is custom code",
    "custom_metrics": "is custom code",
    "custom_train_step": "is custom code",
    "ema_overwrite": "Python reads the numbers of a tensor",
    "embedding_tied": "is custom code",
    "embedding_wrapped": "Python reads the numbers of a tensor",
    "gradient_accumulation": "Python reads the numbers of a tensor",
    "loss_scaling": "Python reads the numbers of a tensor",
    "mixed_precision": "Python reads the numbers of a tensor",
    "on_batch": "",
    "one_row_left": "",
    "overflow": "Python reads the numbers of a tensor",
    "recurrent": "Python reads the numbers of a tensor",
    "remat_of_states": "is custom code",
    "run_eagerly": "run_eagerly=True",
    "scalar_loss": "is custom code",
    "scalar_loss_with_weights": "is custom code",
    "stateful_layer": "is custom code",
    "subclassed": "is custom code",
    "terminate_on_nan": "",
    "transformer": "is custom code",
}


@dataclass
class Path:
    """How the steps of a case ran.

    Args:
        replays: The number of steps that were replayed.
        reasons: The reasons in the log why steps were not replayed.
    """

    replays: int = 0
    reasons: set[str] = field(default_factory=set)


@contextlib.contextmanager
def path_of_steps() -> Iterator[Path]:
    """Watches the steps of models. On another backend than PyTorch, sees nothing."""
    import keras

    path = Path()
    if keras.backend.backend() != "torch":
        yield path
        return
    from kdist.backends.torch import recorded_steps

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if str(record.msg).startswith("kdist does not record"):
                path.reasons.add(str(record.args[-1]))  # type: ignore[index]

    original = recorded_steps.compiled

    def compiled(*args: Any) -> Callable[..., Any] | None:
        program = original(*args)

        def counted(*inputs: Any) -> Any:
            path.replays += 1
            return program(*inputs)  # type: ignore[misc]

        return None if program is None else counted

    logger = logging.getLogger("kdist")
    level, handlers = logger.level, logger.handlers[:]
    logger.setLevel(logging.INFO)
    logger.handlers[:] = [Handler()]
    try:
        with mock.patch.object(recorded_steps, "compiled", compiled):
            yield path
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def check_path(case: str, path: Path) -> None:
    """Raises an `AssertionError` if the steps of a case did not run as expected."""
    reason = EAGER.get(case)
    if reason is None:
        assert path.replays > 0, (
            f"no step of {case} is replayed any more: {path.reasons or 'without a reason'}"
        )
    else:
        found = "; ".join(sorted(path.reasons))
        assert reason in found if reason else not found, f"{case}: {found!r} is not the reason {reason!r}"
        assert not path.replays, f"{case} is replayed now: remove it from EAGER"
