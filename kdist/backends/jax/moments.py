"""Moments of BatchNormalization in a program that is split by rows, with one small collective per direction.

Keras computes the mean, and then the mean of the squared differences from it. For these sums and their
gradients, XLA needs four collectives per layer and step, and each waits for the previous one. Here, each
device computes the moments of its rows. One collective gathers them, and every device combines them. Sums of
x and its square would also need only one collective, but their difference loses digits if the mean is large.

Source: Chan et al., http://infolab.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

_rows: ContextVar[NamedSharding | None] = ContextVar("rows", default=None)


@contextlib.contextmanager
def over(rows: NamedSharding) -> Iterator[None]:
    """A context for tracing the program of a step whose rows have a given sharding."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def moments(
    original: Callable[..., tuple[jax.Array, jax.Array]],
    x: jax.Array,
    axes: int | Sequence[int] | None,
    keepdims: bool = False,
    synchronized: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Replaces Keras's `moments`."""
    rows = _rows.get()
    number = 1 if rows is None else rows.mesh.shape[rows.spec[0]]
    if number == 1 or isinstance(axes, int) or axes is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return original(x, axes, keepdims, synchronized)
    reduced = tuple({axis % x.ndim for axis in axes})
    if 0 not in reduced or x.shape[0] % number or not x.size:  # XLA pads, with four collectives
        return original(x, axes, keepdims, synchronized)
    found = _combined(x.astype(jnp.promote_types(x.dtype, jnp.float32)), reduced, number, rows)
    if x.dtype.itemsize < 4:  # as in Keras
        limits = jnp.finfo(jnp.float16)
        found = tuple(jnp.clip(moment, limits.min, limits.max) for moment in found)
    return tuple((moment if keepdims else jnp.squeeze(moment, reduced)).astype(x.dtype) for moment in found)


def _combined(
    x: jax.Array, axes: tuple[int, ...], number: int, rows: NamedSharding
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and variance of all rows, from parts with equal numbers of rows."""

    def divided(array: jax.Array, axis: str | None) -> jax.Array:
        # Other axes may be sharded over other axes of a mesh.
        spec = PartitionSpec(axis, *[PartitionSpec.UNCONSTRAINED] * (array.ndim - 1))
        return jax.lax.with_sharding_constraint(array, NamedSharding(rows.mesh, spec))

    parts = divided(x.reshape(number, x.shape[0] // number, *x.shape[1:]), rows.spec[0])
    within = tuple(axis + 1 for axis in axes)
    means = jnp.mean(parts, within, keepdims=True)
    variances = jnp.mean(jnp.square(parts - means), within, keepdims=True)
    both = divided(divided(jnp.stack([means, variances], 1), rows.spec[0]), None)
    means, variances = both[:, 0], both[:, 1]
    mean = jnp.mean(means, 0)
    return mean, jnp.mean(variances + jnp.square(means - mean), 0)
