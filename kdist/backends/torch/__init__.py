"""The PyTorch backend: replicas are threads of a process, and `torch.distributed` connects processes."""

from __future__ import annotations

from kdist.backends.torch.backend import TorchBackend


def create_backend() -> TorchBackend:
    """Creates the backend. Called once per process."""
    return TorchBackend()
