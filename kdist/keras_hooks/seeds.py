"""Hooks for random numbers: replicas draw different numbers, for example for Dropout's masks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kdist.keras_hooks.wrapping import replace, running_replica, temporarily, wrap

if TYPE_CHECKING:
    import keras

    from kdist.arrays.types import T
    from kdist.values import Tensor


# Odd, and much larger than the number of draws in any run, but small enough that the seeds of many replicas
# fit in int32. PyTorch's generator adds the two words of a seed. The second word counts the draws, so
# with a small stride, replicas could get equal seeds.
SEED_STRIDE = 7_368_787


class _Thread(threading.local):
    source: Callable[[Callable[[], Any]], Any] | None = None


_thread = _Thread()


def drawn(draw: Callable[[], T]) -> T:
    """Returns the seed from `draw`, or from the function that `seeds_from` has set."""
    return draw() if _thread.source is None else _thread.source(draw)


def draws_again() -> bool:
    """Returns whether `seeds_from` may repeat this thread's seeds."""
    return _thread.source is not None


def seeds_from(source: Callable[[Callable[[], Any]], Any]) -> AbstractContextManager[None]:
    """Returns a context in which `source` provides this thread's seeds; it receives the function that draws one."""
    outer = _thread.source
    return temporarily(_thread, source=lambda draw: source(draw if outer is None else lambda: outer(draw)))


def hook_seeds() -> None:
    import keras

    def next_seed(
        original: Callable[..., Tensor], self: keras.random.SeedGenerator, ordered: bool = True
    ) -> object:
        replica = running_replica()
        if replica is None:
            return original(self, ordered)

        def draw() -> Tensor:
            with replica.scope.untracked():  # all replicas draw equally often
                seed = original(self, ordered)
            first = replica.replica_id_in_sync_group * SEED_STRIDE
            if isinstance(first, int):
                first %= 2**31  # int32 on PyTorch; a traced number in JAX wraps around
            return seed + keras.ops.cast(keras.ops.convert_to_tensor([first, 0]), seed.dtype)

        return drawn(draw)

    wrap(keras.random.SeedGenerator, "next", next_seed)


def hook_torch_random(torch_seed_generator: Callable[..., Callable[..., object]]) -> None:
    """Replaces the function that creates PyTorch's generators from Keras's; the backend calls this once.

    Without a seed, Dropout draws from PyTorch's global generator, which yields the same masks on each device.
    """
    import keras
    from keras.src import backend

    def dropout(
        original: Callable[..., object],
        inputs: Tensor,
        rate: float,
        noise_shape: Sequence[int] | None = None,
        seed: object = None,
    ) -> object:
        replica = running_replica()
        shared = replica is not None and replica.num_replicas_in_sync > 1
        if shared and noise_shape is None and isinstance(seed, keras.random.SeedGenerator):
            noise_shape = tuple(inputs.shape)  # makes Keras use the seed generator
        return original(inputs, rate, noise_shape, seed)

    # Keras 3.16 moves the operations of a backend to a separate package.
    module = backend.random if hasattr(backend, "random") else backend.ops.random
    wrap(module, "dropout", dropout)
    replace(
        module, "torch_seed_generator", lambda original: torch_seed_generator(original, module.get_device)
    )


def global_seed_generator() -> keras.random.SeedGenerator:
    """Returns Keras's global seed generator, for which there is no public function."""
    from keras.src.random.seed_generator import global_seed_generator as keras_global_seed_generator

    # Keras seeds it from Python's `random`. The user's next draw must be the same as without kdist.
    drawn = random.getstate()
    generator = keras_global_seed_generator()
    random.setstate(drawn)
    return generator
