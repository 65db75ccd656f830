"""Caches seeds of PyTorch's generators on the host, because reading them from a GPU waits for its work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kdist import keras_hooks
from kdist.context import current_replica

if TYPE_CHECKING:
    from kdist.backends.replica import Replica

# Maps the state of each seed generator to its version and its numbers.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def torch_seed_generator(
    original: Callable[..., torch.Generator], device: Callable[[], str]
) -> Callable[..., torch.Generator]:
    """Wraps Keras's function that creates a `torch.Generator` for each random operation."""

    @torch._dynamo.disable()
    def wrapper(seed: Any) -> torch.Generator:
        replica: Any = current_replica()
        # A subclass may draw in another way. On the meta device, Keras draws nothing.
        is_known = type(seed) is keras.random.SeedGenerator and device() != "meta"
        # The probe of `kdist.training` simulates a replica, which has no recording.
        if getattr(replica, "scope", None) is None or not hasattr(replica, "recording") or not is_known:
            return original(seed)
        recording = replica.recording
        if recording is not None and keras_hooks.draws_again():
            recording.refuse("the step draws the same random numbers twice")
        elif recording is not None:
            stride = replica.replica_id_in_sync_group * keras_hooks.SEED_STRIDE
            return recording.whole(_next_generator, replica.scope.local(seed.state), stride, device())
        number = keras_hooks.drawn(lambda: _draw(replica, seed.state))
        return torch.Generator(device()).manual_seed(number & 0xFFFFFFFF)

    return wrapper


def _draw(replica: Replica, state: keras.Variable) -> int:
    """Returns Keras's seed for the numbers of `SeedGenerator.next`, and writes the next numbers."""
    tensor = replica.scope.local(state)
    first, second = _numbers(tensor)
    following = tensor.clone()
    following[1] += 1
    replica.scope.write(state, following)  # without aggregation, because all replicas draw equally often
    _note(replica.scope.local(state), [first, second + 1])
    if replica.local_index == 0:
        _note(keras_hooks.native_value(state), [first, second + 1])
    return first + replica.replica_id_in_sync_group * keras_hooks.SEED_STRIDE + second


def _next_generator(state: torch.Tensor, stride: int, device: str) -> torch.Generator:
    """Does the same as `_draw` for a replica that uses the real variables."""
    first, second = _numbers(state)
    with torch.no_grad():
        state[1] += 1
    _note(state, [first, second + 1])
    return torch.Generator(device).manual_seed((first + stride + second) & 0xFFFFFFFF)


def follow(copy: torch.Tensor, real: torch.Tensor) -> None:
    """Updates the cache after a copy was set to the value of another tensor."""
    known = None if real.is_floating_point() else _known.get(real)
    if known is not None and known[0] == real._version:
        _note(copy, known[1])


def _numbers(tensor: torch.Tensor) -> list[int]:
    known = _known.get(tensor)
    if known is None or known[0] != tensor._version:
        _note(tensor, tensor.tolist())
        known = _known[tensor]
    return known[1]


def _note(tensor: torch.Tensor, numbers: list[int]) -> None:
    _known[tensor] = (tensor._version, numbers)
