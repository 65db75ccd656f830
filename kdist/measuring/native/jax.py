"""JAX: a jitted step that XLA divides over the devices, and `psum` in a `shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdist.cluster import discover
from kdist.measuring.native import parts_of


def train(kind: str, prepare: Callable[[], Any], batch_size: int) -> Callable[[], float]:
    """See `kdist.measuring.native`."""
    cluster = discover()
    index, count = cluster.worker_index, cluster.num_workers
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(cluster.coordinator, count, index)
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    equal, by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))
    put = jax.make_array_from_process_local_data
    model, x, y = prepare()
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    trained, others = model.trainable_variables, model.non_trainable_variables
    variables = (trained, others, optimizer.variables)

    def loss_of(values: Any, others_now: Any, optimized: Any, x: Any, y: Any) -> Any:
        now = zip((*trained, *others, *optimizer.variables), (*values, *others_now, *optimized), strict=True)
        with keras.StatelessScope(list(now), collect_losses=True) as scope:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True), training=True)
            scaled = optimizer.scale_loss(loss)
        return scaled, (loss, [scope.get_current_value(variable) for variable in others])

    def step(state: Any, total: Any, x: Any, y: Any) -> Any:
        values, others_now, optimized = state
        gradients, (loss, others_now) = jax.grad(loss_of, has_aux=True)(values, others_now, optimized, x, y)
        values, optimized = optimizer.stateless_apply(optimized, gradients, values)
        return (values, others_now, optimized), total + loss

    program = jax.jit(step, donate_argnums=0, out_shardings=equal)
    state = jax.tree.map(lambda v: put(equal, np.asarray(v.value), v.shape), tuple(map(list, variables)))

    def epoch() -> float:
        nonlocal state
        total, steps = put(equal, np.float32(0), ()), 0
        for part in parts_of((x, y), batch_size, index, count):
            state, total = program(state, total, *jax.tree.map(lambda rows: put(by_rows, rows), part))
            steps += 1
        return float(total) / steps

    return epoch


def all_reduce(strategy: Any, count: int) -> Callable[[], object]:
    """See `kdist.measuring.native`."""
    runtime = strategy.runtime
    (axis,) = runtime.mesh.axis_names
    array = jax.make_array_from_process_local_data(
        runtime.by_rows, np.ones((len(runtime.devices), count), "float32")
    )
    specs = {"in_specs": PartitionSpec(axis), "out_specs": PartitionSpec(), "check_vma": False}
    total = jax.jit(jax.shard_map(lambda part: jax.lax.psum(part, axis), mesh=runtime.mesh, **specs))
    return lambda: total(array)


wait = jax.block_until_ready
