"""PyTorch: loops with `DistributedDataParallel`, Accelerate and Fabric, and `all_reduce` of `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch
from torch import distributed

from kdist.cluster import discover, environment
from kdist.measuring.native import parts_of


def _wrap(kind: str, model: keras.Model, index: int, count: int) -> tuple[Any, Callable[[Any], object]]:
    """Joins the workers. Returns the wrapped model, and the function that computes gradients."""
    on_gpu = torch.cuda.is_available()
    if kind == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=not on_gpu)
        return accelerator.prepare_model(model), accelerator.backward
    if kind == "fabric":
        from lightning_fabric import Fabric

        # One node per worker, because each worker sees only its own GPU.
        fabric = Fabric(accelerator="auto", devices=1, num_nodes=count, strategy="ddp")
        fabric.launch()
        return fabric.setup_module(model), fabric.backward
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    return torch.nn.parallel.DistributedDataParallel(model), torch.Tensor.backward


def train(kind: str, prepare: Callable[[], Any], batch_size: int) -> Callable[[], float]:
    """See `kdist.measuring.native`."""
    cluster = discover()
    index, count = cluster.worker_index, cluster.num_workers
    model, x, y = prepare()
    with environment.patched(LOCAL_RANK=0, GROUP_RANK=index):
        wrapped, backward = _wrap(kind, model, index, count)
    optimizer, variables = model.optimizer, model.trainable_variables
    optimizer.build(variables)
    weights = [variable.value for variable in variables]
    device = weights[0].device
    data = keras.tree.map_structure(torch.as_tensor, (x, y))

    def epoch() -> float:
        total, steps = torch.zeros((), device=device), 0
        for part in parts_of(data, batch_size, index, count):
            inputs, targets = keras.tree.map_structure(lambda rows: rows.to(device), part)
            wrapped.zero_grad()
            outputs = wrapped(inputs, training=True)
            loss = model.compute_loss(x=inputs, y=targets, y_pred=outputs, training=True)
            backward(optimizer.scale_loss(loss))
            with torch.no_grad():
                optimizer.apply([weight.grad for weight in weights], variables)
            total += loss.detach()
            steps += 1
        if count > 1:
            distributed.all_reduce(total)
        return total.item() / steps / count

    return epoch


def all_reduce(strategy: Any, count: int) -> Callable[[], torch.Tensor]:
    """See `kdist.measuring.native`."""
    array = torch.zeros(count, device=strategy.runtime.devices[0].replace("gpu", "cuda"))

    def call() -> torch.Tensor:
        distributed.all_reduce(array)
        return array

    return call


def wait(found: torch.Tensor) -> None:
    """See `kdist.measuring.native`."""
    if found.is_cuda:
        torch.cuda.synchronize()
