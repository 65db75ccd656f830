"""The PyTorch backend: replicas are threads of a process, and `torch.distributed` connects processes."""
