"""Saves and restores the random generators that determine the order of the data, as text for checkpoints."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from kdist.backends import get_backend
from kdist.backends.contract import Runtime
from kdist.backends.messages import of_chief
from kdist.data.sources import torch_loader


def capture(loader: Any = None) -> dict[str, object]:
    """Returns the random states of the backend, Python and NumPy, and of a PyTorch loader."""
    name, words, *rest = np.random.get_state()
    backend = get_backend()
    states = {
        "name": backend.name,
        "backend": _text(backend.random_state()),
        "python": random.getstate(),
        "numpy": [name, _text(np.asarray(words, "<u4").tobytes()), *rest],
    }
    if loader is not None:
        states["loaders"] = torch_loader.random_states(loader)
    # Converted to the types that a checkpoint returns: JSON turns tuples into lists.
    return dict(json.loads(json.dumps(states)))


def restore(states: Mapping[str, Any], loader: Any = None, with_own: bool = True) -> None:
    """Restores states from `capture`, in any process. Skips the state of another backend.

    `with_own` means to restore the loader's own generators, and not only the global one.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = states["numpy"]
    np.random.set_state((name, np.frombuffer(_bytes(key), "<u4").astype(np.uint32), *rest))
    backend = get_backend()
    if states.get("name", backend.name) == backend.name:
        backend.set_random_state(_bytes(states["backend"]))
    if loader is not None and "loaders" in states:  # the backup may be of other data
        saved = states["loaders"]
        saved = [saved] if isinstance(saved, str) else saved  # a text in backups of earlier versions
        torch_loader.set_random_states(loader, saved if with_own else saved[:1])


def share(runtime: Runtime, loader: Any = None) -> None:
    """Sends the chief's states of Python, NumPy and a PyTorch loader to all workers, so that they shuffle alike."""
    if runtime.num_workers > 1:
        states = of_chief(runtime, capture(loader))
        if runtime.worker_index:  # the chief has this state, and its threads may draw at the same time
            restore(states | {"name": None}, loader)  # without the backend's state


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
