"""Time of an all-reduce of kdist, divided by the time of the backend's own all-reduce, on two workers.

    python benchmarks/exchange_time.py torch|jax|tensorflow

A compiled function calls `all_reduce` in `strategy.run` for 2.9 million numbers. The baselines are `all_reduce` of
`torch.distributed` (gloo), a `psum` in a jitted `shard_map` (gloo) and `all_reduce` of `tf.distribute` (gRPC).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import kdist

NUMBERS, ROUNDS, CALLS = 2_900_000, 10, 5


def native_torch(strategy: Any) -> Callable[[], object]:
    import torch

    x = torch.ones(NUMBERS)
    return lambda: torch.distributed.all_reduce(x)


def native_jax(strategy: Any) -> Callable[[], object]:
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec

    runtime = strategy.runtime
    (axis,) = runtime.mesh.axis_names
    x = jax.make_array_from_process_local_data(runtime.by_rows, np.ones((1, NUMBERS), "float32"))
    specs = {"in_specs": PartitionSpec(axis), "out_specs": PartitionSpec(), "check_vma": False}
    total = jax.jit(jax.shard_map(lambda part: jax.lax.psum(part, axis), mesh=runtime.mesh, **specs))
    return lambda: jax.block_until_ready(total(x))


def native_tensorflow(strategy: Any) -> Callable[[], object]:
    import tensorflow as tf

    x, native = tf.ones([NUMBERS]), strategy.runtime.native

    @tf.function
    def total() -> object:
        return native.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", x))

    return total


NATIVE = {"torch": native_torch, "jax": native_jax, "tensorflow": native_tensorflow}


def measure() -> list[tuple[float, float]]:
    """Runs in every worker: returns the milliseconds of kdist's and of the native all-reduce, per round."""
    import keras

    strategy = kdist.MultiWorkerMirroredStrategy()
    # Each replica has a separate array, because XLA could compute the sum of a constant without an exchange.
    values = strategy.experimental_distribute_values_from_function(
        lambda context: keras.ops.ones(NUMBERS) * (1 + context.replica_id_in_sync_group)
    )

    @kdist.function
    def total(values: Any) -> Any:
        return strategy.run(lambda x: kdist.get_replica_context().all_reduce("SUM", x), args=(values,))

    def with_kdist() -> object:
        found = strategy.experimental_local_results(total(values))[0]
        return found.block_until_ready() if hasattr(found, "block_until_ready") else found

    def milliseconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - start) / CALLS * 1e3

    native = NATIVE[keras.backend.backend()](strategy)
    milliseconds(with_kdist), milliseconds(native)
    return [(milliseconds(with_kdist), milliseconds(native)) for _ in range(ROUNDS)]


def main() -> None:
    """Prints the median times and ratios."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "jax"
    env = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    env["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    rounds = kdist.launch(measure, num_workers=2, backend=backend, env=env)[0]
    ours, theirs = (median(times) for times in zip(*rounds, strict=True))
    ratios = sorted(mine / native for mine, native in rounds)
    print(
        f"{backend}: kdist {ours:.1f} ms, native {theirs:.1f} ms, ratio {median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


if __name__ == "__main__":
    main()
