"""Hooks for `keras.remat` and `keras.ops.custom_gradient` on PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from kdist.arrays.types import Function
from kdist.errors import StrategyScopeError
from kdist.keras_hooks.seeds import seeds_from
from kdist.keras_hooks.threads import ThreadState
from kdist.keras_hooks.wrapping import RunningReplica, running_replica, wrap


def _bound(function: Function, replica: RunningReplica) -> Function:
    """Returns a function that any thread can call for the replica of this thread."""
    from keras.src.backend.common import global_state

    # On a GPU, autograd calls it in its own threads, without Keras's scopes and kdist's replica.
    state = ThreadState()

    def call(*args: object, **kwargs: object) -> object:
        if not replica.is_entered:
            raise StrategyScopeError(
                "The gradients of `keras.remat` or `custom_gradient` were computed after the step of the replica.",
                received={"replica_id_in_sync_group": replica.replica_id_in_sync_group},
                hint="Call `backward` inside the function that `strategy.run` runs.",
            )
        with state.borrowed(), replica:
            # As in plain Keras, the layer's call has ended. Its context changes the gradients in Keras 3.16.
            global_state.set_global_attribute("current_call_ctx", None)
            return function(*args, **kwargs)

    return call


def hook_torch_recomputing() -> None:
    """Wraps `keras.remat` and `keras.ops.custom_gradient`; the backend calls this once."""
    from keras.src import backend

    def remat(original: Callable[..., Function], f: Function) -> Function:
        def wrapped(*args: object, **kwargs: object) -> object:
            replica = running_replica()
            if replica is None:
                return original(f)(*args, **kwargs)
            seeds: list[object] = []
            calls, again = itertools.count(), _bound(f, replica)

            def function(*args: object, **kwargs: object) -> object:
                is_forward, drawn = next(calls) == 0, iter(seeds)

                def seed(draw: Callable[[], object]) -> object:
                    if not is_forward:
                        return next(drawn)
                    seeds.append(draw())
                    return seeds[-1]

                with seeds_from(seed):
                    return (f if is_forward else again)(*args, **kwargs)

            return original(function)(*args, **kwargs)

        return wrapped

    def custom_gradient(original: Function, self: object, forward_fn: Function) -> None:
        def forward(*args: object, **kwargs: object) -> object:
            result, replica = forward_fn(*args, **kwargs), running_replica()
            if replica is not None and isinstance(result, tuple) and len(result) == 2 and callable(result[1]):
                return result[0], _bound(result[1], replica)
            return result

        original(self, forward)

    # Keras 3.16 moves the operations of a backend to a separate package.
    core = backend.core if hasattr(backend, "core") else backend.ops
    wrap(core, "remat", remat)
    wrap(core.custom_gradient, "__init__", custom_gradient)
