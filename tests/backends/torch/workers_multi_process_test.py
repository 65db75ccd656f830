"""Workers that torch.distributed connects: how they send messages, join and get lost."""

import contextlib
import re
import signal
import socket
import sys

import numpy as np
import pytest

from tests.helpers import by_hand
from tests.helpers.processes import run, start_pool
from tests.helpers.scripts import Script, environments_of, local_addresses, started


def _runtime():
    import kdist

    return kdist.MultiWorkerMirroredStrategy().runtime


def test_messages_of_any_length_are_gathered_in_order():
    def gather():
        runtime = _runtime()
        sizes = [0, 1, 247, 248, 249, 5000]
        found = []
        for size in sizes:
            mine = bytes([runtime.worker_index]) * (size * (runtime.worker_index + 1))
            found.append([(len(part), set(part)) for part in runtime.group.all_gather_bytes(mine)])
        return found

    expected = [
        [(size * (i + 1), {i} if size else set()) for i in range(2)] for size in [0, 1, 247, 248, 249, 5000]
    ]
    assert run("torch", 2, gather) == [expected, expected]


@pytest.mark.kills("look_at_a_collective_that_just_ended")
def test_a_collective_that_ends_just_after_a_look_at_the_others_has_ended_well():
    def exchange():
        import time
        from datetime import timedelta

        import torch

        from kdist.backends.torch import workers

        class EndsAfterTheLook:
            def __init__(self, work):
                self.ends, self.is_completed = work.wait, work.is_completed

            def wait(self, *timeout):
                try:
                    self.ends(*timeout)
                except RuntimeError:
                    while not self.is_completed():
                        time.sleep(0.001)
                    late.append(timeout)
                    raise

        runtime, late = _runtime(), []
        finish = type(runtime.group)._finish
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(workers, "_LOOK", timedelta(milliseconds=1))
            late_finish = lambda group, work, tensor: finish(group, EndsAfterTheLook(work), tensor)  # noqa: E731
            patched.setattr(type(runtime.group), "_finish", late_finish)
            for _ in range(5):
                time.sleep(0.05 * runtime.worker_index)
                runtime.group.all_gather(torch.ones(1))
        assert runtime.worker_index or late, "worker 0 had to look at worker 1"
        return [int(part) for part in runtime.group.all_gather(torch.tensor([runtime.worker_index]))]

    assert run("torch", 2, exchange) == [[0, 1]] * 2


def test_variables_get_the_chief_s_values_whatever_their_dtype():
    def broadcast():
        import keras
        import numpy as np

        runtime = _runtime()
        values = [
            np.full((2, 3), runtime.worker_index + 0.5, "float32"),
            np.array(runtime.worker_index + 7, "int64"),
            np.array([runtime.worker_index == 0, True]),
            np.zeros((0, 2), "float32"),
            np.full(3, runtime.worker_index, "float16"),
        ]
        variables = [keras.Variable(v, dtype=v.dtype.name, trainable=False) for v in values]
        variables.append(keras.Variable([1.0 - runtime.worker_index], dtype="bfloat16"))
        runtime.broadcast_variables(variables)
        return [np.array(v).astype("float64").tolist() for v in variables]

    first, second = run("torch", 2, broadcast)
    assert first == second == [[[0.5] * 3] * 2, 7.0, [1.0, 1.0], [], [0.0] * 3, [1.0]]


def test_every_worker_shuffles_as_the_chief_does_in_every_epoch():
    def fit():
        import keras
        import numpy as np
        import torch

        import kdist

        seen = []

        class Draws(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if strategy.runtime.worker_index == 1:
                    torch.rand(epoch + 5)  # the chief draws nothing

        class Records(keras.layers.Layer):
            def call(self, x):
                if kdist.get_replica_context() is not None:
                    seen.append(np.array(x)[:, 0].tolist())
                return x

        strategy = kdist.MultiWorkerMirroredStrategy()
        keras.utils.set_random_seed(3 + strategy.runtime.worker_index)
        with strategy.scope():
            model = keras.Sequential([Records(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.arange(12, dtype="float32")[:, None]
        model.fit(x, x, batch_size=6, epochs=3, verbose=0, callbacks=[Draws()])
        return seen

    first, second = run("torch", 2, fit)
    for epoch in range(3):
        batches = first[2 * epoch : 2 * epoch + 2] + second[2 * epoch : 2 * epoch + 2]
        assert sorted(row for batch in batches for row in batch) == list(range(12))
    assert first[:2] != first[2:4]


def test_predictions_of_several_outputs_and_uneven_rows():
    def predict():
        import keras
        import numpy as np

        import kdist

        with kdist.MultiWorkerMirroredStrategy().scope():
            inputs = keras.Input((3, 2))
            outputs = {
                "a": inputs * 2.0,
                "index": keras.ops.argmax(inputs, axis=1),
                "positive": inputs[:, 0, 0] > 0,
                "rows": keras.ops.reshape(inputs, (-1, 2)),  # three entries per row
            }
            model = keras.Model(inputs, outputs)
        good = True
        for rows in (1, 2, 5):
            x = np.random.default_rng(rows).normal(size=(rows, 3, 2)).astype("float32")
            found = model.predict_on_batch(x)
            good = (
                good and np.array_equal(found["a"], x * 2) and np.array_equal(found["rows"], x.reshape(-1, 2))
            )
            good = good and np.array_equal(found["index"], x.argmax(1))
            good = (
                good and found["positive"].dtype == bool and np.array_equal(found["positive"], x[:, 0, 0] > 0)
            )
        return good

    assert run("torch", 2, predict) == [True, True]


def test_a_process_joins_once():
    def join():
        import torch.distributed as dist

        import kdist
        from kdist.cluster_resolver import SimpleClusterResolver

        group = [kdist.MultiWorkerMirroredStrategy() and dist.group.WORLD for _ in range(2)]
        other = SimpleClusterResolver(
            kdist.cluster_resolver.ClusterSpec({"worker": ["a:1", "b:1"]}), task_type="worker", task_id=0
        )
        try:
            kdist.MultiWorkerMirroredStrategy(other)
        except kdist.errors.StrategyScopeError as error:
            return group[0] is group[1], "already joined another cluster" in str(error)

    assert run("torch", 2, join) == [(True, True)] * 2


# Without a launcher -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def job(folder, source, num_workers):
    """Runs one script in several processes; `TF_CONFIG` contains the index of each worker."""
    addresses = local_addresses(num_workers)
    with started(folder, source, environments_of("torch", addresses)) as workers:
        yield workers, [f"worker {i} ({address})" for i, address in enumerate(addresses)]


TRAIN = """
    import faulthandler, os, sys, signal, time
    faulthandler.dump_traceback_later(150, exit=True)  # a hang shows where
    import keras, numpy as np, kdist
    strategy = kdist.MultiWorkerMirroredStrategy()
    index = strategy.runtime.worker_index
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile("sgd", "mse")

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                print("TIME", time.monotonic(), flush=True)
                if index == VICTIM:
                    HOW

    model.fit(np.ones((320, 4)), np.ones((320, 2)), batch_size=32, epochs=3, verbose=0, callbacks=[Ends()])
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
# The child keeps gloo's connections open: gloo notices nothing, as when a host vanishes.
FORK = "(os.fork() or (time.sleep(20), os._exit(0))) and os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("num_workers", "victim", "how", "what"),
    [
        (3, 1, KILL, "it died"),
        (2, 0, KILL, "it died"),
        (2, 1, FORK, "it died"),
        (2, 1, "1 / 0", "it failed: ZeroDivisionError: division by zero"),
        (3, 1, "sys.exit(0)", "it ended before the others"),
    ],
    ids=["worker", "chief", "connections stay open", "exception", "exit"],
)
@pytest.mark.in_turn(4)
def test_a_lost_worker_ends_the_others_in_time_and_is_named(tmp_path, num_workers, victim, how, what):
    source = TRAIN.replace("VICTIM", str(victim)).replace("HOW", how)
    with job(tmp_path, source, num_workers) as (workers, names):
        for worker in [worker for index, worker in enumerate(workers) if index != victim]:
            assert worker.wait() == 1, worker.output()
            told = f"WorkerLostError: The job lost {names[victim]}: {what}"
            assert told in worker.stderr()
            assert worker.ended_at - float(re.search(r"TIME (\S+)", worker.stdout())[1]) < 15
            assert "terminate called" not in worker.stderr()


def test_a_worker_may_end_earlier_than_another(tmp_path):
    source = (
        TRAIN.replace("VICTIM", "-1").replace("HOW", "pass")
        + "    time.sleep(2 * (index > 0))\n    print('END')\n"
    )
    with job(tmp_path, source, 2) as (workers, _):
        assert [worker.wait() for worker in workers] == [0, 0]
        for worker in workers:
            assert worker.stdout().rstrip().endswith("END")
            assert "Traceback" not in worker.stderr()


@pytest.fixture(scope="module")
def strangers():
    """Starts processes that have not joined yet."""
    with start_pool(3, "torch") as pool:
        yield pool


def _join(addresses, indices, timeout):
    import json
    import os
    import time

    import kdist
    from kdist.backends import get_backend
    from kdist.control import rendezvous

    rendezvous._FOREIGN_SECONDS = 3.0
    get_backend()  # imports PyTorch and Keras, which takes longer than the rest
    index = indices[int(os.environ["RANK"])]
    if index is None:
        return None
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    os.environ |= {"TF_CONFIG": json.dumps(config), "KDIST_JOIN_TIMEOUT": str(timeout)}
    before = time.monotonic()
    try:
        kdist.MultiWorkerMirroredStrategy()
    except kdist.errors.KdistError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - before


def test_who_does_not_come_is_named(strangers):
    addresses = local_addresses(3)
    *came, _ = strangers.run(_join, addresses, [0, 1, None], 4)
    for message, _ in came:
        expected = f"1 of 3 workers did not join within 4 s: worker 2 ({addresses[2]})."
        assert f"WorkerTimeoutError: {expected}" in message
        assert "KDIST_JOIN_TIMEOUT" in message


def test_a_chief_that_does_not_come_is_named(strangers):
    addresses = local_addresses(2)
    (message, seconds), *_ = strangers.run(_join, addresses, [1, None, None], 2)
    assert f"1 of 2 workers did not join within 2 s: worker 0 ({addresses[0]})." in message
    assert seconds < 10


def test_two_processes_cannot_be_the_same_worker(strangers):
    messages = [message for message, _ in strangers.run(_join, local_addresses(3), [0, 1, 1], 4)]
    assert sum("ClusterConfigError: Two processes have the same worker index" in m for m in messages) >= 2


@pytest.mark.kills("foreign_program_awaited")
def test_a_port_that_somebody_else_has_is_an_error_within_ten_seconds(strangers):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answers = strangers.run(_join, [f"127.0.0.1:{port}", *local_addresses(1)], [0, 1, None], 300)
    for answer, words in zip(
        answers, (f"Cannot listen on port {port}", "does not belong to this job"), strict=False
    ):
        assert answer[0].startswith("ClusterConfigError")
        assert words in answer[0]
        assert answer[1] < 10


GROUP = r"""
    import json, os
    import torch.distributed as dist, kdist
    from tests.helpers import by_hand
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))  # torchrun sets none
    if config:
        address, rank = config["cluster"]["worker"][1], config["task"]["index"]
        dist.init_process_group("gloo", f"tcp://{address}", rank=rank, world_size=2)
        group = dist.group.WORLD
    strategy = kdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = by_hand.model(is_true=strategy.runtime.worker_index == 0)
    by_hand.fit(model, 2)
    if config:
        assert dist.group.WORLD is group
        dist.destroy_process_group()
    print(f"{strategy.num_replicas_in_sync} replicas {by_hand.show(model)}\n", end="", flush=True)
"""


def check_group(printed: str) -> None:
    """Checks that two workers have printed the expected weights."""
    assert printed.count("2 replicas WEIGHTS") == 2, printed
    for weights in by_hand.shown(printed):
        np.testing.assert_allclose(weights, by_hand.weights(2), rtol=1e-5)


@pytest.mark.kills("torch_rows_of_the_first_worker")
def test_a_process_group_that_the_user_has_made_is_taken(tmp_path):
    with job(tmp_path, GROUP, 2) as (workers, _):
        assert [worker.wait() for worker in workers] == [0, 0], "\n".join(
            worker.output() for worker in workers
        )
        check_group("".join(worker.stdout() for worker in workers))


@pytest.mark.in_turn(4)
def test_torchrun_starts_it_too(tmp_path):
    host, port = local_addresses(1)[0].split(":")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", host, "--master-port", port]
    torchrun = Script(tmp_path, "script", GROUP, {"KERAS_BACKEND": "torch"}, command)
    try:
        assert torchrun.wait(150) == 0, torchrun.output()
    finally:
        if torchrun.exit_code is None:
            torchrun.process.send_signal(signal.SIGTERM)  # torchrun also terminates its workers
            torchrun.wait(20)
    check_group(torchrun.stdout())
