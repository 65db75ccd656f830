"""Tests that need GPUs: `make test-gpu`. Without enough GPUs, pytest skips them.

They compare results with plain Keras on one CPU. They cover behavior that a CPU cannot show: NCCL, the
current device, autograd in its own threads, CUDA's generators, donated memory, and a worker that dies in a
collective.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap

import pytest

from kdist.cluster import may_have_gpus, visible_gpus
from tests.helpers.compare import assert_close
from tests.helpers.environment import clean_environment
from tests.helpers.processes import each_backend
from tests.helpers.scripts import Script, local_addresses, tf_config

# Counted without a framework, because pytest's own process never imports a framework.
GPUS = len(visible_gpus()) if may_have_gpus() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        GPUS == 0, reason="no NVIDIA GPU is visible (no /dev/nvidia*, or CUDA_VISIBLE_DEVICES is empty)"
    ),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

COMMON = """
    import json
    import os
    import sys

    import keras
    import numpy as np

    def build(**layers):
        parts = [keras.layers.Input((6,)), keras.layers.Dense(16, "relu")]
        if layers.get("batch_norm"):
            parts.append(keras.layers.BatchNormalization(synchronized="kdist" in sys.modules))  # Keras alone refuses it
        if layers.get("dropout"):
            parts.append(keras.layers.Dropout(0.5))
        model = keras.Sequential([*parts, keras.layers.Dense(1)])
        # Adam would divide rounding errors. The decay needs a number on the device of the variables.
        model.compile(keras.optimizers.SGD(0.001, momentum=0.9, weight_decay=0.1), "mse")
        rng = np.random.default_rng(1)
        model.set_weights([rng.normal(size=w.shape).astype("float32") ** 2 for w in model.get_weights()])
        return model

    def data():
        rng = np.random.default_rng(2)
        x = rng.normal(size=(44, 6)).astype("float32")  # the last batch is short
        return x, (x[:, :1] * x[:, 1:2]).astype("float32")

    def train(model):
        x, y = data()
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return [keras.ops.convert_to_numpy(w).tolist() for w in model.weights]

    keras.config.set_floatx("float32")
    if keras.backend.backend() == "torch":
        import torch

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_default_matmul_precision", "highest")
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.enable_tensor_float_32_execution(False)
"""


def scripts(tmp_path, backend, source, workers=1, **told):
    """Runs a script in one or more processes, and returns the JSON in the last line of each output."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    addresses = local_addresses(workers)
    started = []
    for index in range(workers):
        (folder := tmp_path / f"{len(list(tmp_path.iterdir()))}").mkdir()
        env = {"KERAS_BACKEND": backend, "TF_FORCE_GPU_ALLOW_GROWTH": "true", **told}
        # The tests' XLA options are for CPUs, and the package for GPUs rejects unknown options.
        env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": ""}
        if workers > 1:
            env["TF_CONFIG"] = tf_config(addresses, index)
        whole = textwrap.dedent(COMMON) + textwrap.dedent(source)
        # A new process, because a fork cannot start CUDA if its parent has already started it.
        started.append(Script(folder, "gpu", whole, env, command=(sys.executable,)))
    return [script.finish(500).told() for script in started]


def same_as_plain_keras(tmp_path, backend, source, workers=1, build="", **told):
    plain = f"print(json.dumps(train(build({build}))))"
    (expected,) = scripts(tmp_path, backend, plain, CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
    for weights in scripts(tmp_path, backend, source, workers, **told):
        assert_close(weights, expected, rtol=2e-4, atol=2e-5)


MIRRORED = """
    import kdist

    strategy = kdist.MirroredStrategy({devices})
    with strategy.scope():
        model = build({build})
    print(json.dumps(train(model)))
"""
WORKERS = """
    import kdist

    strategy = kdist.MultiWorkerMirroredStrategy()
    assert all("gpu" in name.lower() for name in strategy.runtime.devices), strategy.runtime.devices
    with strategy.scope():
        model = build({build})
    print(json.dumps(train(model)))
"""


@each_backend
def test_one_gpu_trains_as_one_cpu(backend, tmp_path):
    same_as_plain_keras(tmp_path, backend, MIRRORED.format(devices='["gpu:0"]', build=""))


@each_backend
def test_a_gpu_trains_with_variables_on_the_cpu(backend, tmp_path):
    source = """
        import kdist

        strategy = kdist.experimental.CentralStorageStrategy(["gpu:0"], "cpu:0")
        with strategy.scope():
            model = build()
        print(json.dumps(train(model)))
    """
    same_as_plain_keras(tmp_path, backend, source)


@two_gpus
@each_backend
def test_two_gpus_of_a_process_train_as_one_cpu(backend, tmp_path):
    source = MIRRORED.format(devices='["gpu:0", "gpu:1"]', build="batch_norm=True")
    same_as_plain_keras(tmp_path, backend, source, build="batch_norm=True")


@two_gpus
@each_backend
def test_two_workers_of_one_gpu_each_train_as_one_cpu(backend, tmp_path):
    """Both workers see all GPUs, and share them."""
    source = WORKERS.format(build="batch_norm=True")
    same_as_plain_keras(tmp_path, backend, source, workers=2, build="batch_norm=True")


def test_two_workers_on_one_gpu_use_gloo(tmp_path):
    source = WORKERS.format(build="") + "    assert strategy.runtime.communication == 'gloo'\n"
    same_as_plain_keras(tmp_path, "torch", source, workers=2, CUDA_VISIBLE_DEVICES="0")


@two_gpus
def test_replicas_compute_on_their_own_device(tmp_path):
    source = """
        import kdist

        strategy = kdist.MirroredStrategy(["gpu:1", "gpu:0"])
        found = strategy.run(lambda: torch.ones(1, device="cuda") + torch.cuda.current_device())
        print(json.dumps([[str(t.device), float(t)] for t in strategy.experimental_local_results(found)]))
    """
    assert scripts(tmp_path, "torch", source) == [[["cuda:1", 2.0], ["cuda:0", 1.0]]]


def test_rematerialization_with_dropout_repeats_the_mask(tmp_path):
    source = """
        import kdist

        def once(scope):
            keras.utils.set_random_seed(3)
            strategy = kdist.MirroredStrategy(["gpu:0"])
            with strategy.scope(), scope:
                return train(build(dropout=True))

        import contextlib
        print(json.dumps([once(contextlib.nullcontext()), once(keras.RematScope("full"))]))
    """
    ((without, with_it),) = scripts(tmp_path, "torch", source)
    assert_close(without, with_it, rtol=1e-4, atol=1e-5)


def test_cuda_generators_are_restored(tmp_path):
    source = """
        import kdist
        from kdist.backends import get_backend

        kdist.MirroredStrategy(["gpu:0"])
        state = get_backend().random_state()
        first = torch.rand(4, device="cuda:0").tolist()
        get_backend().set_random_state(state)
        print(json.dumps([first, torch.rand(4, device="cuda:0").tolist()]))
    """
    ((first, second),) = scripts(tmp_path, "torch", source)
    assert first == second


def test_jax_keeps_the_user_s_arrays_when_it_donates_state(tmp_path):
    source = """
        import kdist

        strategy = kdist.MirroredStrategy(["gpu:0"])
        with strategy.scope():
            model = build()
        before = [variable.value for variable in model.weights]
        train(model)
        print(json.dumps([np.asarray(value).tolist() for value in before]))  # "Array has been deleted"?
    """
    assert scripts(tmp_path, "jax", source)


@two_gpus
def test_a_worker_that_dies_in_nccl_is_named(tmp_path):
    source = """
        import kdist

        strategy = kdist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = build()

        class Dies(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 1 and strategy.runtime.worker_index == 1:
                    os.kill(os.getpid(), 9)

        x, y = data()
        model.fit(x, y, batch_size=16, epochs=50, verbose=0, callbacks=[Dies()])
    """
    addresses = local_addresses(2)
    started = []
    for index in range(2):
        (folder := tmp_path / str(index)).mkdir()
        told = {"KERAS_BACKEND": "torch", "TF_CONFIG": tf_config(addresses, index)}
        whole = textwrap.dedent(COMMON) + textwrap.dedent(source)
        started.append(Script(folder, "dies", whole, told, command=(sys.executable,)))
    assert started[1].wait(300) == -9
    assert started[0].wait(120) not in (0, None) and "worker 1" in started[0].stderr()


def test_kdist_info_lists_the_gpus():
    told = clean_environment() | {"KERAS_BACKEND": "torch"}
    command = [sys.executable, "-m", "kdist", "info"]
    said = subprocess.run(command, env=told, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "cuda:0 (NVIDIA" in said
