"""Memory, file descriptors and threads of a worker do not grow over many steps, fits and saves."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.helpers.processes import each_backend_in_twelve_turns, run, strategy

COLUMNS, ROWS = 512, 512  # a global batch has 1 MiB
UNITS = 512  # the weights have 1 MiB, and 3 MiB with the optimizer's slots
MIB = 2**20


def measure():
    """Returns the resident bytes, file descriptors and threads of this process."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that glibc keeps is not growth
    with open("/proc/self/status", encoding="ascii") as file:
        status = dict(line.split(":", 1) for line in file)
    resident = int(status["VmRSS"].split()[0]) * 1024
    return resident, sorted(map(link_of, os.listdir("/proc/self/fd"))), int(status["Threads"])


def link_of(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # the file descriptor of the listing itself
        return ""


def in_worker_train_on(folder, rounds, steps, fits, saves):
    """Returns the measurements after each round of steps, fits and saves, without the rounds for warm-up."""
    import keras

    import kdist

    with strategy().scope():
        model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(UNITS)])
        model.compile("adam", "mse")
    random = np.random.default_rng(0)
    manager = kdist.CheckpointManager(kdist.Checkpoint(model=model), folder, max_to_keep=2)

    def batches(number):
        for _ in range(number):
            yield random.standard_normal((ROWS, COLUMNS), "float32"), np.zeros((ROWS, UNITS), "float32")

    def work(steps, fits, saves):
        for _ in range(fits):
            model.fit(batches(steps // fits), verbose=0)
        for _ in range(saves):
            manager.save()
        manager.wait()
        kdist.barrier()
        return measure()

    work(10, 2, 4)
    work(10, 2, 4)
    return [work(steps, fits, saves) for _ in range(rounds)]


def check(backend, folder, rounds, steps, fits, saves):
    # The memory of a process varies by some MiB, so this compares the minimum of the first and of the last rounds.
    half = rounds // 2
    batches, shards = half * steps * ROWS * COLUMNS * 4 // 2, half * saves * UNITS * COLUMNS * 4 * 3 // 2
    limit = min(batches, shards) // 2
    found = run(backend, 2, in_worker_train_on, str(folder), rounds, steps, fits, saves, timeout=500)
    for measured in found:
        memory, files, threads = zip(*measured, strict=True)
        print(
            f"{backend}: {[round(m / MIB, 1) for m in memory]} MiB, {len(files[0])} files, {threads[0]} threads"
        )
        assert len(files[-1]) <= len(files[0]), set(files[-1]) - set(files[0])
        # TensorFlow starts threads when it needs them. One leaked thread per round would exceed this limit.
        assert threads[-1] - threads[0] < half, threads
        growth = min(memory[half:]) - min(memory[:half])
        assert growth < limit, f"{growth / MIB:.1f} MiB more"


@pytest.mark.kills(growth_batches_kept="[torch]", growth_folders_stay_locked="[torch]")
@each_backend_in_twelve_turns
def test_a_job_does_not_grow(backend, tmp_path):
    check(backend, tmp_path, 6, 50, 1, 16)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_a_long_job_does_not_grow(backend, tmp_path):
    # On TensorFlow, Keras keeps a batch of each `fit` with a generator, also without kdist.
    check(backend, tmp_path, 20, 50, 1 if backend == "tensorflow" else 5, 10)


def in_worker_create(number):
    """Returns how much the peak memory grows when a strategy creates variables of 16 MiB."""
    import keras

    def peak():
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

    distributed = strategy()
    with distributed.scope():
        keras.Variable(np.zeros((2048, 2048), "float32"))  # the first collective allocates more
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # resets the peak
    before = peak()
    with distributed.scope():
        variables = [keras.Variable(np.full((2048, 2048), i, "float32")) for i in range(number)]
    return peak() - before, [float(variable[1, 1]) for variable in variables]


@pytest.mark.kills(new_variables_sent_at_once="[tensorflow]")
@each_backend_in_twelve_turns
def test_new_variables_need_little_memory_beside_their_values(backend):
    for growth, values in run(backend, 2, in_worker_create, 24):
        print(f"{backend}: {growth / MIB:.0f} MiB for 384 MiB")
        assert values == list(range(24))
        assert growth < 4 * 384 * MIB
