"""Random numbers, batch normalisation, PyTorch's modules, and what Keras keeps for each thread."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kdist import context
from kdist.keras_hooks.wrapping import running_replica, wrap

# Odd, and far above the number of draws between two replicas' seeds in any run; small enough that the seeds of
# many replicas stay within int32. PyTorch's generator takes the sum of both words of a seed, so replicas must
# not only differ in one of them.
_SEED_STRIDE = 7_368_787


def hook_seeds() -> None:
    import keras

    def next_seed(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, ordered: bool = True) -> Any:
            replica = running_replica()
            if replica is None:
                return original(self, ordered)
            with replica.scope.untracked():  # all replicas draw equally often
                seed = original(self, ordered)
            offset = [replica.replica_id_in_sync_group * _SEED_STRIDE, 0]
            return seed + keras.ops.cast(keras.ops.convert_to_tensor(offset), seed.dtype)

        return wrapper

    wrap(keras.random.SeedGenerator, "next", next_seed)


def _hook_torch_dropout() -> None:
    """Without a seed of its own, Dropout draws from PyTorch's global generator: the same masks on each device."""
    import keras
    from keras.src import backend

    def dropout(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
            replica = running_replica()
            shared = replica is not None and replica.num_replicas_in_sync > 1
            if shared and noise_shape is None and isinstance(seed, keras.random.SeedGenerator):
                noise_shape = tuple(inputs.shape)  # Keras asks the seed generator then
            return original(inputs, rate, noise_shape, seed)

        return wrapper

    # Keras 3.16 keeps the operations of a backend in a package of their own.
    wrap(backend.random if hasattr(backend, "random") else backend.ops.random, "dropout", dropout)


def hook_torch_modules(zero_grad: Callable[..., Any], call_module: Callable[..., Any]) -> None:
    """Puts the hooks into what is special on PyTorch; called once, by the backend.

    Args:
        zero_grad: Wraps `Layer.zero_grad`, which clears gradients.
        call_module: Wraps `TorchModuleWrapper.call`, which runs modules of PyTorch's own.
    """
    import keras

    wrap(keras.Layer, "zero_grad", zero_grad)
    wrap(keras.layers.TorchModuleWrapper, "call", call_module)
    _hook_torch_dropout()


def hook_batch_normalization(native: bool) -> None:
    import keras
    from keras.src import backend

    def init(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
            wanted = synchronized and context.has_strategy() and not native
            original(self, *args, synchronized=synchronized and not wanted, **kwargs)
            self.synchronized = synchronized

        return __init__

    def moments(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False) -> Any:
            replica = running_replica()
            if synchronized and replica is not None:
                return replica.moments(x, axes, keepdims)
            # One program over all replicas (JAX), or no replicas at all: the moments are global anyway.
            return original(x, axes, keepdims, synchronized and native)

        return wrapper

    wrap(keras.layers.BatchNormalization, "__init__", init)
    # Keras 3.16 keeps the operations of a backend in a package of their own.
    wrap(backend.nn if hasattr(backend, "nn") else backend.ops.nn, "moments", moments)


def global_seed_generator() -> Any:
    """Returns the generator of all random numbers without a seed of their own; Keras has no public way to."""
    from keras.src.random.seed_generator import global_seed_generator as keras_global_seed_generator

    # Keras draws its seed from Python's random numbers; the user's next draw must be the one that comes without kdist.
    drawn = random.getstate()
    generator = keras_global_seed_generator()
    random.setstate(drawn)
    return generator


class ThreadState:
    """What Keras keeps for each thread (dtype policy, seed generator, scopes), taken along to another thread.

    Made in the thread that has the state; entered in the threads that need it.
    """

    def __init__(self) -> None:
        from keras.src.backend.common import global_state

        # Made here, or every replica would make one of its own in the middle of a step.
        global_seed_generator()
        # The second is only in Keras before 3.16.
        trackers = ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")
        self._state = {t: dict(vars(getattr(global_state, t))) for t in trackers if hasattr(global_state, t)}

    def __enter__(self) -> None:
        from keras.src.backend.common import global_state

        for tracker, state in self._state.items():
            # Lists are stacks of scopes: two threads must not push on the same one.
            own = {name: list(value) if isinstance(value, list) else value for name, value in state.items()}
            vars(getattr(global_state, tracker)).update(own)

    def __exit__(self, *exc: object) -> None:
        return None
