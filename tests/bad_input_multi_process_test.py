"""Bad input raises a clear error within 10 s and never hangs: tests the class of the error and its message."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import time
from tempfile import mkdtemp

import numpy as np
import pytest

import kdist
from kdist.testing import free_ports
from tests.helpers.data import make_data
from tests.helpers.models import network
from tests.helpers.processes import BACKENDS, TIMEOUT, each_backend, run, strategy
from tests.helpers.scripts import local_addresses, started, tf_config

# Measured after all imports, because imports take long on a busy machine.
PROMISED = 10.0

PRELUDE = """
import os, sys, time, traceback
import kdist
from kdist.cluster.environment import keras_backend_name
def attempt(function):
    start = time.monotonic()
    try:
        function()
        print("NO ERROR", flush=True)
    except BaseException as error:
        print(f"SECONDS {time.monotonic() - start:.2f}")
        print("CLASSES", [c.__name__ for c in type(error).__mro__])
        print("MESSAGE", error, flush=True)
"""
IMPORT = """
import importlib, keras
importlib.import_module(f"kdist.backends.{keras.backend.backend()}.backend")
"""
MULTI_WORKER = "attempt(kdist.MultiWorkerMirroredStrategy)\n"


def said(script):
    """Returns the output of `attempt`: its duration in seconds, the classes of the error, and its message."""
    script.wait(TIMEOUT)
    match = re.search(r"SECONDS ([\d.]+)\nCLASSES (.*)\nMESSAGE ((?:.|\n)*)", script.stdout())
    assert match, script.stdout() + script.stderr()
    return float(match[1]), match[2], match[3]


def expect(script, error, *words, within=PROMISED):
    seconds, classes, message = said(script)
    assert f"'{error}'" in classes, (classes, message)
    for word in words:
        assert word in message, message
    assert seconds < within, message


# The backend --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", ["MirroredStrategy()", "OneDeviceStrategy('cpu:0')", "MultiWorkerMirroredStrategy()"]
)
def test_unknown_backend(call, tmp_path):
    source = PRELUDE + f"attempt(lambda: kdist.{call})\nassert 'keras' not in sys.modules"
    with started(tmp_path, source, [{"KERAS_BACKEND": "theano"}]) as (script,):
        expect(script, "BackendError", "KERAS_BACKEND='theano'", "tensorflow, jax, torch", within=2)


# Needs a process that is not forked, because the code must hide the package before its import.
HIDE = """
import importlib.abc, importlib.machinery
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        return None
class Blocker(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == HIDDEN else super().find_spec(name, path, target)
sys.meta_path[:] = [Blocker if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.in_turn(3)
def test_backend_that_is_not_installed(backend, tmp_path):
    source = PRELUDE + f"HIDDEN = {backend!r}" + HIDE + "attempt(kdist.MirroredStrategy)"
    with started(tmp_path, source, [{"KERAS_BACKEND": backend}], [sys.executable]) as (script,):
        expect(script, "BackendError", f"package '{backend}'", "not installed", f"pip install '.[{backend}]'")


def test_keras_that_is_not_installed(tmp_path):
    source = PRELUDE + "HIDDEN = 'keras'" + HIDE + "attempt(kdist.MirroredStrategy)"
    with started(tmp_path, source, [{"KERAS_BACKEND": "jax"}], [sys.executable]) as (script,):
        expect(script, "BackendError", "package 'keras'", "not installed")


# The cluster --------------------------------------------------------------------------------------------------

MALFORMED = {
    "not JSON": ("{'cluster': {}}", "ClusterConfigError", "TF_CONFIG"),
    "a list": ("[1]", "ClusterConfigError", "TF_CONFIG"),
    "no task": ('{"cluster": {"worker": ["a:1", "b:1"]}}', "ClusterConfigError", "task"),
    "no type": (
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"index": 0}}',
        "ClusterConfigError",
        "type",
    ),
    "no index": (
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}',
        "ClusterConfigError",
        "index",
    ),
    "index is a word": (tf_config(["a:1", "b:1"], "first"), "ClusterConfigError", "first"),
    "index too large": (tf_config(["a:1", "b:1"], 2), "ClusterConfigError", "2"),
    "index negative": (tf_config(["a:1", "b:1"], -1), "ClusterConfigError", "-1"),
    "unknown job": (tf_config(["a:1", "b:1"], 0, type="trainer"), "ClusterConfigError", "trainer"),
    "address without port": (tf_config(["a:1", "b"], 0), "ClusterConfigError", "'b'"),
    "port too large": (tf_config(["a:1", "b:99999"], 0), "ClusterConfigError", "99999"),
    "worker is a word": ('{"cluster": {"worker": "a:1"}, "task": {"type": "worker", "index": 0}}',)
    + ("ClusterConfigError", "worker"),
    "the same address twice": (tf_config(["a:1", "a:1"], 0), "ClusterConfigError", "a:1"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.in_turn(3)
def test_malformed_tf_config_reaches_the_strategy(backend, tmp_path):
    source = PRELUDE + IMPORT + f"values = {[value for value, *_ in MALFORMED.values()]!r}\n"
    source += (
        "for value in values:\n    os.environ['TF_CONFIG'] = value\n    "
        + MULTI_WORKER
        + "    print('NEXT')\n"
    )
    with started(tmp_path, source, [{"KERAS_BACKEND": backend}]) as (script,):
        script.wait()
        answers = script.stdout().split("NEXT\n")[:-1]
    assert len(answers) == len(MALFORMED)
    for (name, (_, error, word)), answer in zip(MALFORMED.items(), answers, strict=True):
        seconds, classes, message = answer.removesuffix("\n").split("\n", 2)
        assert f"'{error}'" in classes and word in message, f"{name}: {answer}"
        assert float(seconds.split()[1]) < 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.in_turn(3)
def test_port_in_use(backend, tmp_path):
    # Starts both workers, so that the error cannot be about a missing worker.
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        taken = server.getsockname()[1]
        addresses = [f"127.0.0.1:{taken}", f"127.0.0.1:{free_ports(1)[0]}"]
        envs = [
            {"KERAS_BACKEND": backend, "TF_CONFIG": tf_config(addresses, i), "KDIST_JOIN_TIMEOUT": "5"}
            for i in (0, 1)
        ]
        chief, _ = stack.enter_context(started(tmp_path, PRELUDE + IMPORT + MULTI_WORKER, envs))
        expect(chief, "ClusterConfigError", str(taken))


@pytest.mark.parametrize("backend", ["jax", "torch"])  # all backends have the same rendezvous
@pytest.mark.in_turn(4)
def test_workers_with_different_secrets(backend, tmp_path):
    addresses = local_addresses(2)
    environments = [
        {"KERAS_BACKEND": backend, "TF_CONFIG": tf_config(addresses, index), "KDIST_JOIN_TIMEOUT": "3"}
        | {"KDIST_CLUSTER_TOKEN": token}
        for index, token in enumerate(["one secret", "another secret"])
    ]
    with started(tmp_path, PRELUDE + IMPORT + MULTI_WORKER, environments) as (chief, other):
        words = "uses a different secret", "export KDIST_CLUSTER_TOKEN=$(openssl rand -hex 16)"
        expect(other, "ClusterConfigError", *words)
        expect(chief, "KdistError")
        told = chief.stdout() + chief.stderr() + other.stdout() + other.stderr()
    assert "Dropped a connection from 127.0.0.1: it rejected the secret (KDIST_CLUSTER_TOKEN)" in told
    assert "5ec2e7" not in told


@pytest.mark.kills(waits_for_those_that_have_come="[jax-other]", waits_in_silence="[jax-chief]")
@pytest.mark.parametrize("missing", [0, 1], ids=["chief", "other"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.in_turn(3)
def test_a_worker_that_never_comes(backend, missing, tmp_path):
    addresses = local_addresses(2)
    env = {
        "KERAS_BACKEND": backend,
        "TF_CONFIG": tf_config(addresses, 1 - missing),
        "KDIST_JOIN_TIMEOUT": "3",
    }
    sooner = "from kdist.control import waiting; waiting._FIRST = 1.0\n"
    with started(tmp_path, PRELUDE + IMPORT + sooner + MULTI_WORKER, [env]) as (script,):
        name = f"worker {missing} ({addresses[missing]})"
        expect(script, "WorkerTimeoutError", name, "within 3 s", "KDIST_JOIN_TIMEOUT=")
        assert f"kdist: waiting for {name} to join (1 of 3 s)\n" in script.stderr()
        assert f"waiting for worker {1 - missing}" not in script.stderr()


# Values that must be equal on all workers ---------------------------------------------------------------------


def dataset(rows, batch=4):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(make_data(rows)).batch(batch)


def mismatch(case):
    """Runs a case in which worker 0 and worker 1 differ; returns the error and its time in seconds."""
    me = strategy().runtime.worker_index
    starts = [time.monotonic()]
    try:
        differ(case, me, starts)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - starts[-1]
    return "no error", "", time.monotonic() - starts[-1]


def another_model():
    with strategy().scope():
        network(9, 1)


def differ(case, me, starts):
    with strategy().scope():
        model = network(4 + me * (case == "units"), 1, inputs=3 + me * (case == "columns"))
        deeper = network(4, 1)
        deeper.add(__import__("keras").layers.Dense(1 + me if case == "last layer" else 1))
        deeper.compile("sgd", "mse")
    x, y = make_data(12)
    actions = {
        "units": lambda: model.fit(x, y, verbose=0),
        "last layer": lambda: deeper.fit(x, y, verbose=0),
        "columns": lambda: model.fit(*make_data(12, columns=3 + me), verbose=0),
        "rows": lambda: model.fit(*make_data(rows=12 + 4 * me), batch_size=4, verbose=0),
        "batch size": lambda: model.fit(x, y, batch_size=4 + me, verbose=0),
        "epochs": lambda: model.fit(x, y, epochs=2 + me, verbose=0),
        "initial_epoch": lambda: model.fit(x, y, epochs=5, initial_epoch=me, verbose=0),
        "steps": lambda: model.fit(x, y, batch_size=2, steps_per_epoch=2 + me, verbose=0),
        "validation data": lambda: model.fit(x, y, validation_data=(x, y) if me else None, verbose=0),
        "validation number of rows": lambda: model.fit(
            x, y, validation_data=make_data(8 + 4 * me), verbose=0
        ),
        "kind of data": lambda: model.fit(dataset(12), verbose=0) if me else model.fit(x, y, verbose=0),
        "longer dataset": lambda: model.fit(dataset(12 + 4 * me), verbose=0),
        "unknown length": lambda: model.fit(dataset(12 + 4 * me).filter(lambda x, y: True), verbose=0),
        "last batch": lambda: model.fit(dataset(12 + me).filter(lambda x, y: True), verbose=0),
        "evaluate": lambda: model.evaluate(*make_data(rows=12 + 4 * me), verbose=0),
        "predict": lambda: model.predict(make_data(rows=12 + 4 * me)[0], verbose=0),
        "train_on_batch": lambda: model.train_on_batch(*make_data(rows=6 + me)),
        "predict_on_batch": lambda: model.predict_on_batch(make_data(rows=6 + me)[0]),
        "evaluate or predict": lambda: model.predict(x, verbose=0) if me else model.evaluate(x, y, verbose=0),
        "evaluate or fit": lambda: model.fit(x, y, verbose=0) if me else model.evaluate(x, y, verbose=0),
        "save or fit": lambda: model.fit(x, y) if me else kdist.Checkpoint(model=model).save(mkdtemp()),
        "fit or scope": lambda: another_model() if me else model.fit(x, y, verbose=0),
    }
    dataset(4)  # imports TensorFlow
    starts.append(time.monotonic())  # a busy machine needs some seconds to get here
    actions[case]()


MISMATCHES = {
    "units": "variables",
    "last layer": "variables",
    "columns": "",  # the data or the model, whichever is compared first
    "rows": "number of rows",
    "batch size": "batch size",
    "epochs": "epochs",
    "initial_epoch": "initial_epoch",
    "steps": "number of batches",
    "validation data": "validation",
    "validation number of rows": "validation",
    "kind of data": "kind of data",
    "longer dataset": "",
    "unknown length": "step 4",
    "last batch": "step 4",
    "evaluate": "number of rows",
    "predict": "number of rows",
    "train_on_batch": "shapes",
    "predict_on_batch": "shapes",
    "evaluate or predict": "called different methods",
    "evaluate or fit": "called different methods",
    "save or fit": "saving or restoring a checkpoint, at ",
    "fit or scope": "called different methods",
}


@pytest.mark.kills(
    mismatch_of_workers_ignored="[epochs-torch]",
    other_methods_of_workers_ignored="[fit or scope-torch]",
    save_on_the_chief_only_is_a_key_error="[save or fit-torch]",
)
@each_backend
@pytest.mark.parametrize("case", MISMATCHES)
def test_workers_that_differ(backend, case):
    results = run(backend, 2, mismatch, case, timeout=60)
    for kind, message, seconds in results:
        assert kind == "WorkerMismatchError", f"{case}: {kind} {message}"
        assert "worker 0" in message.lower() and "worker 1" in message and MISMATCHES[case] in message
        assert seconds < PROMISED
    assert results[0][1] == results[1][1]


def other_lines():
    """Evaluates the model on the workers at different lines of this file; returns what kdist logs."""
    import logging

    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    with strategy().scope():
        model = network(4, 1)
    logging.getLogger("kdist").addHandler(handler)
    for _ in range(2):
        if strategy().runtime.worker_index:
            model.evaluate(*make_data(12), verbose=0)
        else:
            model.evaluate(*make_data(12), verbose=0)
    logging.getLogger("kdist").removeHandler(handler)
    return logged


@pytest.mark.kills("other_lines_of_workers_not_warned_about")
def test_workers_that_call_a_method_at_different_lines_are_warned_once():
    (warning,), others = run("jax", 2, other_lines, timeout=60)
    assert "worker 0 and worker 1 call a method at different lines" in warning
    assert others == []


def columns_of_the_data():
    """Trains the same model on both workers with data of different shapes: neither worker may hang."""
    me = strategy().runtime.worker_index
    with strategy().scope():
        model = __import__("keras").Sequential([__import__("keras").layers.Dense(1)])
        model.compile("sgd", "mse")
    start = time.monotonic()
    try:
        model.fit(*make_data(12, columns=3 + me), verbose=0)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "no error", "", 0.0


@each_backend
def test_data_of_another_shape_for_a_model_that_takes_its_shape_from_it(backend):
    for kind, message, seconds in run(backend, 2, columns_of_the_data, timeout=60):
        assert kind == "WorkerMismatchError" and "worker 1" in message and seconds < PROMISED


def usable_afterwards():
    with strategy().scope():
        model = network(4, 1)
    return model.fit(*make_data(12), verbose=0).history["loss"]


@each_backend
def test_workers_can_go_on_after_a_mismatch(backend):
    run(backend, 2, mismatch, "epochs", timeout=60)
    one, two = run(backend, 2, usable_afterwards, timeout=60)
    assert one == two


def wrong_calls():
    import keras

    with strategy().scope():
        model = network(4, 1)
        uncompiled = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    both_weights = {"sample_weight": np.ones(12), "class_weight": {0: 1.0}}
    said = []
    for action in (
        lambda: model.fit(*make_data(rows=0), verbose=0),
        lambda: model.fit(make_data(12)[0], make_data(rows=5)[1], verbose=0),
        lambda: network(4, 1).fit(make_data(12)[0], make_data(rows=5)[1], verbose=0),  # plain Keras
        lambda: model.train_on_batch(*make_data(12), **both_weights),
        lambda: uncompiled.fit(*make_data(12), verbose=0),
        lambda: model.fit(*make_data(12), batch_size=-1, verbose=0),
        lambda: model.evaluate(*make_data(12), batch_size=0, verbose=0),
    ):
        with pytest.raises(ValueError) as info:
            action()
        said.append(str(info.value))
    return said


@pytest.mark.kills(fit_batch_size_not_checked="[1-jax]", wrong_arguments_other_error="[1-torch]")
@each_backend
@pytest.mark.parametrize("num_workers", [1, 2])
def test_wrong_arguments_are_errors_on_all_workers(backend, num_workers):
    for said in run(backend, num_workers, wrong_calls, timeout=60):
        no_rows, unequal, of_keras, weights, uncompiled, *sizes = said
        for size, text in zip((-1, 0), sizes, strict=True):
            assert "`batch_size` is not a whole number of" in text and f"batch_size={size}\n" in text
        assert "The data has no rows." in no_rows
        assert unequal == of_keras and "'x' sizes: 12" in unequal and "'y' sizes: 5" in unequal
        assert "received both `sample_weight` and `class_weight`" in weights
        assert "compile" in uncompiled
