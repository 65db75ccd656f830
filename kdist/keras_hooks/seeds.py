"""Random numbers: replicas draw different ones, and Dropout's masks differ between them."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kdist.keras_hooks.wrapping import replace, running_replica, wrap

# Odd, and far above the number of draws between two replicas' seeds in any run; small enough that the seeds of
# many replicas stay within int32. PyTorch's generator takes the sum of both words of a seed, so replicas must
# not only differ in one of them.
SEED_STRIDE = 7_368_787


class _Thread(threading.local):
    source: Callable[[Callable[[], Any]], Any] = staticmethod(lambda draw: draw())


_thread = _Thread()


def drawn(draw: Callable[[], Any]) -> Any:
    """Returns a seed: what `draw` returns, or what `seeds_from` has put in its place."""
    return _thread.source(draw)


@contextlib.contextmanager
def seeds_from(source: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Within this, a function gives this thread its seeds; it is called with the function that would draw one."""
    outer = _thread.source
    _thread.source = lambda draw: source(lambda: outer(draw))
    try:
        yield
    finally:
        _thread.source = outer


def hook_seeds() -> None:
    import keras

    def next_seed(original: Callable[..., Any], self: Any, ordered: bool = True) -> Any:
        replica = running_replica()
        if replica is None:
            return original(self, ordered)

        def draw() -> Any:
            with replica.scope.untracked():  # all replicas draw equally often
                seed = original(self, ordered)
            first = replica.replica_id_in_sync_group * SEED_STRIDE
            if isinstance(first, int):
                first %= 2**31  # int32 on PyTorch; a number that JAX traces wraps around by itself
            return seed + keras.ops.cast(keras.ops.convert_to_tensor([first, 0]), seed.dtype)

        return drawn(draw)

    wrap(keras.random.SeedGenerator, "next", next_seed)


def hook_torch_random(torch_seed_generator: Callable[..., Any]) -> None:
    """Wraps what makes PyTorch's generators from Keras's; called once, by the backend.

    Without a seed of its own, Dropout draws from PyTorch's global generator: the same masks on each device.
    """
    import keras
    from keras.src import backend

    def dropout(
        original: Callable[..., Any], inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None
    ) -> Any:
        replica = running_replica()
        shared = replica is not None and replica.num_replicas_in_sync > 1
        if shared and noise_shape is None and isinstance(seed, keras.random.SeedGenerator):
            noise_shape = tuple(inputs.shape)  # Keras asks the seed generator then
        return original(inputs, rate, noise_shape, seed)

    # Keras 3.16 keeps the operations of a backend in a package of their own.
    module = backend.random if hasattr(backend, "random") else backend.ops.random
    wrap(module, "dropout", dropout)
    replace(
        module, "torch_seed_generator", lambda original: torch_seed_generator(original, module.get_device)
    )


def global_seed_generator() -> Any:
    """Returns the generator of all random numbers without a seed of their own; Keras has no public way to."""
    from keras.src.random.seed_generator import global_seed_generator as keras_global_seed_generator

    # Keras draws its seed from Python's random numbers; the user's next draw must be the one that comes without kdist.
    drawn = random.getstate()
    generator = keras_global_seed_generator()
    random.setstate(drawn)
    return generator
