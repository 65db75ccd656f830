"""Options of the collectives, with the names of `tf.distribute`."""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence

from kdist.cluster import logs
from kdist.errors import InvalidArgumentError, check_positive, check_whole


class CommunicationImplementation(enum.Enum):
    """The collectives that a multi-worker strategy uses.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationImplementation
    """

    AUTO = "AUTO"
    """The backend chooses: NCCL between GPUs; gloo (JAX, PyTorch) or gRPC (TensorFlow) between CPUs.

    Workers on one machine sum tensors in shared memory if they run on CPUs and Linux.
    """
    RING = "RING"
    """A ring over the network that needs no GPU. JAX and PyTorch use gloo. No backend uses shared memory."""
    NCCL = "NCCL"
    """NVIDIA's collectives. Without GPUs, kdist logs a warning once and uses `AUTO`."""


class CommunicationOptions:
    """Options of the collectives of a multi-worker strategy.

    Args:
        bytes_per_pack: A hint for the size, in bytes, of the packs into which gradients are grouped. With 0,
            kdist packs all gradients of a dtype together.
        timeout_seconds: Seconds that a collective may wait for the other workers; `None` for the default of
            the backend. On JAX it applies only to kdist's messages, not to compiled collectives.
        implementation: A `CommunicationImplementation` or its name.
        compression: "float16" or "bfloat16" to send gradients between workers in 16 bits; not in `tf.distribute`.
            All workers need the same value. Each worker casts its gradients just before they are summed, and
            casts the sum back. Nothing else is cast: not weights, metrics, statistics, or values that you reduce.
            No effect with one worker. kdist logs a warning if JAX cannot cast. "powersgd" sends approximations.
        compression_rank: The rank of the approximations with "powersgd" (default: 2).

    With "float16", gradients of `fit` do not overflow if they are at most 65504 on each worker, because each worker
    sends its share of the mean. With `reduction="sum"`, the total must not exceed this limit. In `Strategy.run`,
    kdist divides by the number of replicas before the cast and multiplies after it. Numbers below about 3e-8
    become 0, for example gradients below 1e-7 of 4 workers in `fit`.
    "bfloat16" has the range of float32, but only 8 bits of precision instead of 11.

    With "powersgd", workers approximate the gradient of a matrix by the product of two matrices with `compression_rank`
    columns, and send these matrices. Axes before the last count as rows. Each replica adds the error to its next
    gradient. The errors need as much memory as the weights. Gradients for which the two matrices are not smaller are
    sent unchanged. No checkpoint contains the errors, which restart from zeros after a resume.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationOptions, and for
    `compression` https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html and https://arxiv.org/abs/1905.13727

    Example:

    >>> import kdist
    >>> options = kdist.experimental.CommunicationOptions(implementation="RING", timeout_seconds=60)
    >>> options.implementation.name
    'RING'
    """

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        *,
        compression: str | None = None,
        compression_rank: int | None = None,
    ) -> None:
        hint = "Pass a number of bytes, or 0 to let kdist choose."
        check_whole("bytes_per_pack", bytes_per_pack, hint, least=0)
        if timeout_seconds is not None:
            hint = "Pass a number of seconds, or None for the default of the backend."
            check_positive("timeout_seconds", timeout_seconds, hint)
        if isinstance(implementation, str):
            names = CommunicationImplementation.__members__
            if implementation not in names:
                raise InvalidArgumentError(
                    f"There is no communication implementation {implementation!r}.",
                    received={"implementation": implementation},
                    hint=f"Choose one of {', '.join(names)}.",
                )
            implementation = names[implementation]
        if not isinstance(implementation, CommunicationImplementation):
            raise InvalidArgumentError(
                "`implementation` is not a CommunicationImplementation or its name.",
                received={"implementation": implementation},
                hint='Pass a name: implementation="RING"',
            )
        if compression not in (None, "float16", "bfloat16", "powersgd"):
            raise InvalidArgumentError(
                '`compression` is neither a dtype of 16 bits nor "powersgd".',
                received={"compression": compression},
                hint='Pass "bfloat16", "float16" or "powersgd", or None to send gradients unchanged.',
            )
        is_rank = type(compression_rank) is int and compression_rank > 0
        if compression_rank is not None and not (is_rank and compression == "powersgd"):
            raise InvalidArgumentError(
                "`compression_rank` is not a positive integer, or `compression` has no rank.",
                received={"compression_rank": compression_rank, "compression": compression},
                hint='Pass for example compression="powersgd", compression_rank=2',
            )
        self.bytes_per_pack = bytes_per_pack
        self.timeout_seconds = timeout_seconds
        self.implementation = implementation
        self.compression = compression
        self.compression_rank = compression_rank or (2 if compression == "powersgd" else None)

    def for_devices(self, devices: Sequence[str], worker_index: int = 0) -> CommunicationOptions:
        """Returns the options for these devices. Without GPUs, replaces NCCL with `AUTO` and warns."""
        wants_nccl = self.implementation is CommunicationImplementation.NCCL
        if not wants_nccl or all(name.startswith("gpu:") for name in devices):
            return self
        hint_ignored("implementation=NCCL", "NCCL needs NVIDIA GPUs.", worker_index)
        options = copy.copy(self)
        options.implementation = CommunicationImplementation.AUTO
        return options


class CollectiveHints(CommunicationOptions):
    """An older name for `CommunicationOptions`, with fewer options.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CollectiveHints

    Args:
        bytes_per_pack: See `CommunicationOptions`.
        timeout_seconds: See `CommunicationOptions`.

    Example:

    >>> import kdist
    >>> kdist.experimental.CollectiveHints(timeout_seconds=60).timeout_seconds
    60
    """

    def __init__(self, bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> None:
        super().__init__(bytes_per_pack, timeout_seconds)


_ignored: set[str] = set()


def hint_ignored(what: str, why: str, worker_index: int = 0) -> None:
    """Warns once, on the chief, that a hint has no effect. Not an error, because results stay the same."""
    if worker_index == 0 and what not in _ignored:
        _ignored.add(what)
        logs.logger.warning("%s has no effect: %s Remove it, or ignore this warning.", what, why)
