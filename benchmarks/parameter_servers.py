"""Training with parameter servers: steps per second, and milliseconds to transfer parameters.

    python benchmarks/parameter_servers.py jax [steps] [transfers] [rows] [ray]

All tasks are processes on this machine. The baseline for steps is one worker with servers. The baseline for transfers
moves the same bytes: through a bare gRPC stream of 2 MiB messages (JAX, PyTorch), or by a read and an assignment of a
`tf.distribute` variable (TensorFlow). The time of a push does not include the server's optimizer. `rows` counts the
bytes that an embedding transfers. `ray` transfers the same arrays to and from Ray actors.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import kdist

ROUNDS = 7
PARAMETERS = 10_000_000
MESSAGE = 2 << 20
MODELS = {"a step of some 20 ms": (512, 4, 640), "a tiny step": (16, 1, 32)}  # width, depth, rows
ENV = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


def clock(function: Callable[[], Any]) -> float:
    """Returns the milliseconds of a call."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def alternating(functions: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Returns the milliseconds of each function, per round."""
    rounds = [{name: clock(function) for name, function in functions.items()} for _ in range(2 + ROUNDS)]
    return {name: [one[name] for one in rounds[2:]] for name in functions}


# Steps --------------------------------------------------------------------------------------------------------------


def measure_steps(width: int, depth: int, rows: int, has_servers: bool = True) -> float:
    """Runs on the coordinator, or in the only process: returns the steps of `fit` per second."""
    import keras
    import numpy as np

    steps = 100
    strategy = kdist.ParameterServerStrategy() if has_servers else kdist.get_strategy()
    with strategy.scope():
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
        model = keras.Sequential([keras.layers.Input((256,)), *hidden, keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    draw = np.random.RandomState(0)
    x = draw.rand(steps * rows, 256).astype("float32")
    y = draw.randint(0, 10, steps * rows).astype("int32")
    model.fit(x[: 20 * rows], y[: 20 * rows], batch_size=rows, verbose=0)  # every worker compiles its step
    return steps / median(clock(lambda: model.fit(x, y, batch_size=rows, verbose=0)) / 1e3 for _ in range(3))


def print_steps(backend: str) -> None:
    """Prints a row per model."""
    print(f"{backend}: steps of `fit` in a second, 2 servers; in brackets, times those of 1 worker")
    for name, sizes in MODELS.items():
        alone = kdist.launch(measure_steps, 1, (*sizes, False), backend=backend, env=ENV)[0]
        one, two = (
            kdist.launch(measure_steps, workers, sizes, backend=backend, env=ENV, num_ps=2)[0]
            for workers in (1, 2)
        )
        print(
            f"  {name:24} no servers {alone:7.1f}   1 worker {one:7.1f}   2 workers {two:7.1f} ({two / one:.2f})",
            flush=True,
        )


# Transfers ----------------------------------------------------------------------------------------------------------


def serve_bare(port: str) -> None:
    """Runs a gRPC server without kdist, which sends and receives messages."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    messages = bare_messages()

    def push(received: Any, context: Any) -> Any:
        for _ in received:
            pass
        yield b""

    methods = {"pull": lambda received, context: iter(messages), "push": push}
    handlers = {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    server.add_insecure_port(f"localhost:{port}")
    server.start()
    server.wait_for_termination()


def bare_messages() -> list[bytes]:
    """Returns messages with the same number of bytes as the parameters."""
    import numpy as np

    data = np.random.RandomState(0).rand(PARAMETERS).astype("float32").tobytes()
    return [data[start : start + MESSAGE] for start in range(0, len(data), MESSAGE)]


def bare_calls(port: int) -> dict[str, Callable[[], Any]]:
    """Returns functions that transfer the bytes from and to a bare server."""
    import grpc

    messages = bare_messages()
    channel = grpc.insecure_channel(f"localhost:{port}", options=[("grpc.max_receive_message_length", -1)])
    grpc.channel_ready_future(channel).result(60)
    pull, push = (channel.stream_stream(f"/bare/{name}") for name in ("pull", "push"))
    return {
        "bare pull": lambda: sum(map(len, pull(iter([b""])))),
        "bare push": lambda: sum(map(len, push(iter(messages)))),
    }


def on_worker(variable: Any, optimizer: Any, port: int) -> dict[str, list[float]]:
    """Runs on a worker: transfers a variable, and the same number of bytes without kdist; returns milliseconds."""
    import keras
    import numpy as np

    from kdist import keras_hooks
    from kdist.backends import get_backend

    task = kdist.get_strategy()._task
    record = keras_hooks.record_of(variable)
    gradient = keras.ops.ones(variable.shape)
    update = {
        "optimizer": optimizer._kdist_number,
        "numbers": [record.home.number],
        "gradients": [gradient],
    } | {"rows": [None]}
    local = keras_hooks.variable_like(np.ones(variable.shape, "float32"), "local", True)
    step = keras.optimizers.SGD(0.1)
    step.build([local])
    array, engine = np.ones(variable.shape, "float32"), get_backend().coordination_engine()

    def pull() -> Any:
        record.forget()
        return record.whole()

    def wait(ready: Callable[[], Any]) -> Any:  # JAX returns before the computation has ended
        return lambda: getattr(ready(), "block_until_ready", lambda: None)()

    calls = {"pull": wait(pull), "push": lambda: task.commit([update]), "settle": wait(pull)}
    calls |= {
        "optimiser": lambda: engine.apply(step, [array], [local]),
        "settle here": wait(lambda: local.value),
    }
    return alternating(bare_calls(port) | calls)


def measure_transfers(port: int) -> dict[str, list[float]]:
    """Runs on the coordinator: returns the milliseconds of each operation, per round."""
    import keras
    import numpy as np

    strategy = kdist.ParameterServerStrategy()
    start = np.ones((PARAMETERS // 1000, 1000), "float32")
    with strategy.scope():
        variable = keras.Variable(start)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([variable])
    if keras.backend.backend() == "tensorflow":
        return alternating(native_calls(strategy, variable, start))
    coordinator = kdist.coordinator.ClusterCoordinator(strategy)
    return coordinator.fetch(coordinator.schedule(on_worker, args=(variable, optimizer, port)))


def native_calls(strategy: Any, variable: Any, array: Any) -> dict[str, Callable[[], Any]]:
    """Returns the transfers on TensorFlow, whose own servers store the variables."""
    import keras
    import tensorflow as tf

    native = strategy.coordination.native
    with native.scope():
        bare = tf.Variable(array)
    return {
        "bare pull": lambda: bare.read_value().numpy(),
        "bare push": lambda: bare.assign(array),
        "pull": lambda: keras.ops.convert_to_numpy(variable),
        "push": lambda: variable.assign(array),
        "optimiser": lambda: None,
    }


def print_transfers(backend: str) -> None:
    """Prints a row per number of servers and direction."""
    from kdist.cluster.addresses import free_ports

    (port,) = free_ports(1)
    bare = subprocess.Popen([sys.executable, __file__, "bare", str(port)])
    try:
        print(f"{backend}: milliseconds for {PARAMETERS / 1e6:.0f} M float32, the engine alone, ratio")
        for servers in (1, 2):
            found = kdist.launch(measure_transfers, 1, (port,), backend=backend, env=ENV, num_ps=servers)[0]
            own = {name: median(found[name]) for name in found}
            for name, taken in (("pull", 0.0), ("push", own["optimiser"])):
                moved = own[name] - taken
                ratio = moved / own[f"bare {name}"]
                note = f"; the optimiser's step {taken:.1f}" if taken else ""
                print(
                    f"  {servers} server(s), {name}: {moved:6.1f}  {own[f'bare {name}']:6.1f}  {ratio:5.2f}{note}",
                    flush=True,
                )
    finally:
        bare.kill()
        bare.wait()


# Rows ---------------------------------------------------------------------------------------------------------------


def moved() -> int:
    """Runs on a worker: returns the number of bytes sent to and received from the servers."""
    return sum(server.sent + server.received for server in kdist.get_strategy()._task.served.servers)


def measure_rows(steps: int) -> tuple[float, int]:
    """Runs on the coordinator: returns the transferred bytes per step, and the size of the embedding in bytes."""
    import keras
    import numpy as np

    strategy = kdist.ParameterServerStrategy()
    with strategy.scope():
        table = keras.layers.Embedding(1_000_000, 16)
        model = keras.Sequential([keras.layers.Input((1,), dtype="int32"), table, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    coordinator = kdist.coordinator.ClusterCoordinator(strategy)
    draw = np.random.RandomState(0)
    x, y = draw.randint(0, 1_000_000, (1_000 * steps, 1)), draw.rand(1_000 * steps, 1, 1).astype("float32")
    model.fit(x, y, batch_size=1_000, verbose=0)
    before = coordinator.fetch(coordinator.schedule(moved))
    model.fit(x, y, batch_size=1_000, verbose=0)
    return (coordinator.fetch(coordinator.schedule(moved)) - before) / steps, 1_000_000 * 16 * 4


def print_rows(backend: str) -> None:
    """Prints the share of an embedding that a step transfers. TensorFlow's servers do not count bytes."""
    if backend != "tensorflow":
        bytes_a_step, whole = kdist.launch(measure_rows, 1, (10,), backend=backend, env=ENV, num_ps=2)[0]
        print(
            f"{backend}: an embedding of 1 M rows, 1,000 rows a step: {bytes_a_step / 1e3:.0f} kB a step of "
            f"{whole / 1e6:.0f} MB, {100 * bytes_a_step / whole:.2f} %",
            flush=True,
        )


# Ray ----------------------------------------------------------------------------------------------------------------


def print_ray() -> None:
    """Prints the milliseconds of the same transfers with a Ray actor instead of a server."""
    import numpy as np
    import ray

    began = time.perf_counter()
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)

    @ray.remote
    class Server:
        def __init__(self) -> None:
            self.array = np.ones(PARAMETERS, "float32")

        def pull(self) -> Any:
            return self.array

        def push(self, array: Any) -> None:
            self.array = np.array(array)

        def call(self) -> None:
            pass

    server, array = Server.remote(), np.ones(PARAMETERS, "float32")
    ray.get(server.call.remote())
    print(f"ray: {time.perf_counter() - began:.1f} s to start")
    calls = {
        "pull": lambda: np.array(ray.get(server.pull.remote())),
        "push": lambda: ray.get(server.push.remote(array)),
        "call": lambda: ray.get(server.call.remote()),
    }
    for name, found in alternating(calls).items():
        print(f"  {name}: {median(found):.1f} ms")
    ray.shutdown()


def main() -> None:
    """Runs the given parts of the benchmark, or all parts."""
    backend, *parts = sys.argv[1:]
    if backend == "bare":
        serve_bare(*parts)
        return
    if not parts or "steps" in parts:
        print_steps(backend)
    if not parts or "transfers" in parts:
        print_transfers(backend)
    if not parts or "rows" in parts:
        print_rows(backend)
    if not parts or "ray" in parts:
        print_ray()


if __name__ == "__main__":
    main()
