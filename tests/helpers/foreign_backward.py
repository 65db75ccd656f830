"""Runs PyTorch's backward pass in another thread, as autograd does on a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class _Own(threading.local):
    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "autograd")


@contextlib.contextmanager
def foreign_backward() -> Iterator[None]:
    """Lets another thread run the backward passes of each thread. Does nothing without PyTorch.

    Only the engine, which `backward` and `grad` both call, runs there.
    """
    import keras

    if keras.backend.backend() != "torch":
        yield
        return
    import torch

    engine, own = torch.autograd._engine_run_backward, _Own()

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        return own.thread.submit(engine, *args, **kwargs).result()

    torch.autograd._engine_run_backward = elsewhere
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = engine
