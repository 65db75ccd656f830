"""Moments of BatchNormalization over the rows of all replicas, with one collective per direction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch


def combined(
    x: torch.Tensor,
    axes: Sequence[int],
    replica_id: int,
    shares: tuple[float, ...],
    all_reduce: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean and variance over the rows of all replicas, with axes of size 1.

    Each replica receives the mean and variance of all replicas. It combines them, weighted by rows, with
    the formula of Chan, Golub and LeVeque, which keeps its precision if the mean is large:
    http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf

    Args:
        x: The values of this replica.
        axes: The axes to reduce, not negative.
        replica_id: The index of this replica in `shares`.
        shares: The share of each replica in the rows.
        all_reduce: Sums a tensor over all replicas, differentiably.
    """
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(precise, dim=axes, correction=0, keepdim=True)
    mine = torch.stack([mean, variance])
    slots = [torch.zeros_like(mine)] * len(shares)
    slots[replica_id] = mine
    means, variances = all_reduce(torch.stack(slots, dim=1))
    weights = _constants(shares, precise.dtype, x.device).reshape(-1, *[1] * x.ndim)
    mean = (weights * means).sum(0)
    variance = (weights * (variances + (means - mean) ** 2)).sum(0)
    return mean.to(x.dtype), variance.to(x.dtype)


@functools.lru_cache(64)
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a cached tensor on a device. Do not write to it."""
    return torch.tensor(values, dtype=dtype, device=device)
