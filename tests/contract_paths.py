"""Checks how kdist runs the steps of a contract case.

On PyTorch, kdist replays recorded steps, or runs Keras's Python code in each step. On JAX, kdist fuses the sums of a
step into few collectives, or XLA divides the program.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

# Cases without replayed steps, with a part of the logged reason. It is empty if there are too few batches to replay.
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
# Cases on JAX whose steps XLA divides, with a part of the logged reason. It is empty if the batch is the reason.
DIVIDED_BY_XLA = {"on_batch": "", "run_eagerly": "", "uneven_batches": ""}


@dataclass
class Path:
    """How the steps of a case ran.

    Args:
        replays: The number of replayed steps, or of programs with fused sums.
        reasons: The logged reasons for steps that were not replayed or fused.
    """

    replays: int = 0
    reasons: set[str] = field(default_factory=set)


@contextlib.contextmanager
def path_of_steps() -> Iterator[Path]:
    """Records how the steps of models run. On TensorFlow, it records nothing."""
    import keras

    path = Path()
    if keras.backend.backend() == "tensorflow":
        yield path
        return

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if str(record.msg).startswith(("kdist does not record", "kdist leaves the sums")):
                path.reasons.add(str(record.args[-1]))  # type: ignore[index]

    logger = logging.getLogger("kdist")
    level, handlers = logger.level, logger.handlers[:]
    logger.setLevel(logging.INFO)
    logger.handlers[:] = [Handler()]
    try:
        with _counting(path) if keras.backend.backend() == "torch" else _counting_fused(path):
            yield path
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@contextlib.contextmanager
def _counting(path: Path) -> Iterator[None]:
    from kdist.backends.torch import recorded_steps

    original = recorded_steps.compiled

    def compiled(*args: Any) -> Callable[..., Any] | None:
        program = original(*args)

        def counted(*inputs: Any) -> Any:
            path.replays += 1
            return program(*inputs)  # type: ignore[misc]

        return None if program is None else counted

    with mock.patch.object(recorded_steps, "compiled", compiled):
        yield


@contextlib.contextmanager
def _counting_fused(path: Path) -> Iterator[None]:
    from kdist.backends.jax import steps

    original = steps.over_rows

    def over_rows(*args: Any) -> Any:
        results = original(*args)
        path.replays += 1
        return results

    with mock.patch.object(steps, "over_rows", over_rows):
        yield


def check_path(case: str, backend: str, path: Path) -> None:
    """Raises an `AssertionError` if the steps of a case did not run as expected."""
    reason = (EAGER if backend == "torch" else DIVIDED_BY_XLA).get(case)
    found = "; ".join(sorted(path.reasons))
    if reason is None:
        assert path.replays > 0, (
            f"no step of {case} is replayed or fused any more: {found or 'without a reason'}"
        )
    else:
        assert reason in found if reason else not found, f"{case}: {found!r} is not the reason {reason!r}"
        # Whether a few batches are enough to replay one depends on the version of Keras.
        assert not (path.replays and reason), (
            f"{case} is replayed or fused now: remove it from the exceptions"
        )
