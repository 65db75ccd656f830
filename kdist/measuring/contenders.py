"""The contenders of `kdist bench --compare`: other ways to train the same model."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kdist.errors import BackendError, InvalidArgumentError

# The title of each contender, its backend (`None`: any), and its package.
CONTENDERS: dict[str, tuple[str, str | None, str]] = {
    "kdist": ("kdist", None, "keras"),
    "keras": ("plain Keras", None, "keras"),
    "ddp": ("DDP", "torch", "torch"),
    "accelerate": ("Accelerate", "torch", "accelerate"),
    "fabric": ("Fabric", "torch", "lightning-fabric"),
    "jax": ("JAX", "jax", "jax"),
}
CHOICES = tuple(CONTENDERS)[1:]  # without kdist


@dataclass(frozen=True)
class Compared:
    """The results of a contender for one number of workers."""

    name: str  # a key of `CONTENDERS`
    num_workers: int  # 0 for plain Keras, which trains on one device
    seconds: Sequence[float]  # of each round
    loss: float  # of the last round, to check that all contenders train the same model


def read_contenders(text: str, backend: str, batch_size: int, numbers: Sequence[int]) -> list[str]:
    """Parses the option `--compare`, and checks that each contender can train.

    Raises:
        InvalidArgumentError: If a contender is unknown or has another backend, or cannot divide a batch.
        BackendError: If the package of a contender is not installed.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if text))
    for name in names:
        if name not in CHOICES:
            raise InvalidArgumentError(
                "--compare contains an unknown contender.",
                received={"compare": name},
                hint=f"Choose from {', '.join(CHOICES)}.",
            )
        _, needed, package = CONTENDERS[name]
        if needed not in (None, backend):
            raise InvalidArgumentError(
                f"--compare {name} needs the backend {needed}, but the backend is {backend}.",
                hint=f"Choose the backend: --backend {needed}",
            )
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            raise BackendError(
                f"The package {package}, which --compare {name} needs, is not installed.",
                received={"backend": backend},
                hint=f"Install it: pip install {package}",
            )
    uneven = [number for number in numbers if batch_size % number]
    if uneven and set(names) - {"keras"}:
        raise InvalidArgumentError(
            "The workers of a contender need equal parts of a batch, but --batch-size is not divisible.",
            received={"batch_size": batch_size, "num_workers": uneven[0]},
            hint=f"For example: --batch-size {-(-batch_size // uneven[0]) * uneven[0]}",
        )
    return names


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Returns the median with the lowest and the highest value, as text.

    Example:

    >>> from kdist.measuring.contenders import spread
    >>> spread([0.5, 0.75, 0.6])
    '0.60 (0.50 to 0.75)'
    """
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"
