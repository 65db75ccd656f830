"""Runs user functions in replicas on PyTorch, with one thread per local replica and autograd."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import torch

from kdist import keras_hooks
from kdist.backends import debugging
from kdist.backends.gradients import check_loss, split_aux
from kdist.backends.replica import RowShare, equal_shares
from kdist.backends.threads import Baton
from kdist.backends.torch import divided
from kdist.backends.torch.core import TorchCore
from kdist.backends.torch.devices import ThreadStates, keras_device
from kdist.backends.torch.recording import Recording
from kdist.backends.torch.replicas import TorchReplica, TorchScope
from kdist.context import require_no_merge_call

if TYPE_CHECKING:
    from kdist.arrays.types import Args, Function, Kwargs, P, R, Structure, T, Tensor
    from kdist.context import StrategyLike


def in_replicas(
    runtime: TorchCore,
    strategy: StrategyLike,
    body: Callable[[TorchReplica, int], T],
    shares: Sequence[RowShare] | None = None,
    gradients: bool = True,
    recording: Recording | None = None,
) -> list[T]:
    """Calls `body(replica, local_index)` in each local replica, in its context and scope.

    `shares` contains the weights of the replicas' rows in a model's step. It is `None` for a user's function.
    A `recording` must be for a single local replica.
    """
    state = keras_hooks.ThreadState() if len(runtime.devices) > 1 else None
    engine_state = ThreadStates(runtime.torch_devices)
    if len(runtime.devices) > 1:
        require_no_merge_call()

    def one_replica(index: int, baton: Baton) -> T:
        for copies in runtime.copies if index == 0 else ():  # the first replica runs first
            copies.start_step(keep_gradients=shares is None)
        replica = TorchReplica(
            strategy,
            runtime.replica_ids[index],
            shares or equal_shares(runtime.num_replicas),
            index,
            baton,
            runtime.group,
            copies=runtime.copies,
            is_model_step=shares is not None,
            recording=recording,
        )
        with contextlib.ExitStack() as stack:
            if index > 0 and state is not None:
                stack.enter_context(state)
            stack.enter_context(engine_state.entered(runtime.torch_devices[index], index > 0))
            stack.enter_context(keras_device(runtime.torch_devices[index]))
            stack.enter_context(replica)
            stack.enter_context(torch.set_grad_enabled(gradients))
            if runtime.storage is not None:
                stack.enter_context(divided.in_step(runtime.storage, replica))
            stack.enter_context(TorchScope(replica, runtime.copies_of[index]))
            if recording is not None:
                stack.enter_context(recording.running())
            return body(replica, index)

    return runtime.threads.run(one_replica)


def run(
    runtime: TorchCore, strategy: StrategyLike, fn: Function, args: Args, kwargs: Kwargs
) -> Sequence[Structure]:
    """Calls the user's function in every local replica, and aggregates its writes to variables."""

    def body(replica: TorchReplica, index: int) -> Structure:
        result = replica.call(fn, args, kwargs)
        replica.note(debugging.END, [])
        return result

    try:
        return in_replicas(runtime, strategy, body, gradients=torch.is_grad_enabled())
    except Exception as error:
        runtime.components.forget_changed()
        if len(runtime.devices) == 1:  # with several replicas, `Baton` adds the note
            error.add_note(f"Raised in replica {runtime.replica_ids[0]} ({runtime.devices[0]}).")
        raise


def function(fn: Callable[P, R], **options: Any) -> Callable[P, R]:
    """Returns the function, compiled with `torch.compile` if `jit_compile` is set."""
    if not options.pop("jit_compile", False):
        return fn
    return torch.compile(fn, **options)


class _Nesting(threading.local):
    """The number of functions of `value_and_grad` that run in this thread."""

    depth = 0


_nesting = _Nesting()


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def value_and_grad(
    fn: Callable[P, object], variables: Sequence[keras.Variable], has_aux: bool
) -> Callable[P, tuple[Structure, list[Tensor | None]]]:
    """Returns a function that computes a loss and its gradients with `torch.autograd.grad`.

    In a function of another `value_and_grad`, the results are differentiable, as on the other backends.
    """

    def wrapper(*args: P.args, **kwargs: P.kwargs) -> tuple[Structure, list[Tensor | None]]:
        is_nested = _nesting.depth > 0
        tensors = [variable.value for variable in variables]
        frozen = [tensor for tensor in tensors if not tensor.requires_grad]
        _nesting.depth += 1
        try:
            with torch.enable_grad():
                for tensor in frozen:
                    tensor.requires_grad_(True)
                loss, aux = split_aux(fn(*args, **kwargs), has_aux)
                check_loss(loss)
                if loss.requires_grad:
                    gradients = torch.autograd.grad(loss, tensors, create_graph=is_nested, allow_unused=True)
                else:
                    gradients = (None,) * len(tensors)
        finally:
            _nesting.depth -= 1
            for tensor in frozen:
                tensor.requires_grad_(False)
        if not is_nested:
            loss, aux = keras.tree.map_structure(_detached, (loss, aux))
        return ((loss, aux) if has_aux else loss), list(gradients)

    return wrapper
