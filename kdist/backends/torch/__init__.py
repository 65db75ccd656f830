"""kdist on PyTorch: replica threads in one process, `torch.distributed` between processes."""

from __future__ import annotations

from kdist.backends.torch.backend import TorchBackend


def create_backend() -> TorchBackend:
    """Returns the backend; called once a process."""
    return TorchBackend()
