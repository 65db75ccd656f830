"""8 and 16 workers run `fit`, write a checkpoint and raise the same error, within a time limit."""

from __future__ import annotations

import itertools
import os
import zlib

import pytest

from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.data import make_data
from tests.helpers.models import network, weights_of
from tests.helpers.processes import BACKENDS, full_unless, run_plain, scope, start_pool, strategy
from tests.turn import turn

ROWS = 45  # batches of 20 are uneven for 8 and 16 workers, and the last batch has fewer rows than workers
# Seconds for each function that runs in the pool, on 2 cores that 16 workers share.
LIMIT = 150


def make_model(under_strategy):
    told = {"optimizer": "adam", "rate": 0.02, "metrics": ["mae"]}
    return network(8, 1, inputs=6, seed=7, scope=scope(under_strategy), **told)


def fit(model):
    x, y = make_data(ROWS, 6)
    history = model.fit(
        x, y, batch_size=20, epochs=2, shuffle=False, verbose=0, validation_data=(x[:9], y[:9])
    )
    return history.history | {"weights": weights_of(model)}


def plain():
    return fit(make_model(False))


def in_worker_train(folder):

    import kdist

    model = make_model(True)
    numbers = fit(model)
    path = kdist.Checkpoint(model=model).save(folder, asynchronous=False)
    kdist.barrier()
    trained = weights_of(model)
    model.set_weights([0 * w for w in trained])
    kdist.Checkpoint(model=model).restore(path)
    assert_equal(weights_of(model), trained)
    shards = sorted(name for name in os.listdir(path) if name.startswith("shard-"))
    return numbers, shards


def in_worker_disagree(who):
    import kdist

    x, y = make_data(ROWS, 6)
    rows = ROWS - 1 if strategy().runtime.worker_index == who else ROWS
    with pytest.raises(kdist.errors.WorkerMismatchError) as caught:
        make_model(True).fit(x[:rows], y[:rows], verbose=0)
    return str(caught.value)


def _params():
    today = (zlib.crc32(b"many workers") + turn()) % (4 * len(BACKENDS))  # each backend once in twelve turns
    for workers, (place, backend) in itertools.product((8, 16), enumerate(BACKENDS)):
        yield pytest.param(backend, workers, marks=full_unless(workers == 8 and place == today))


@pytest.mark.kills(many_workers_lose_a_row="[torch-8]")
@pytest.mark.timeout(4 * LIMIT + 60)
@pytest.mark.parametrize(("backend", "workers"), _params())
def test_many_workers_train_as_one_device(backend, workers, tmp_path):
    expected = run_plain(backend, plain)
    pool = start_pool(workers, backend, LIMIT)
    try:
        pool.run(strategy_is_there)
        results = pool.run(in_worker_train, str(tmp_path))
        messages = pool.run(in_worker_disagree, workers - 2)
    finally:
        pool.close()
    assert len(results) == workers
    for numbers, shards in results:
        number = min(workers, 8)  # of shards, because the model is small
        assert shards == [f"shard-{i:05d}-of-{number:05d}.safetensors" for i in range(number)]
        assert_close(numbers, expected)
    assert len(set(messages)) == 1
    assert f"worker {workers - 2}" in messages[0] and str(ROWS - 1) in messages[0], messages[0]


def strategy_is_there():
    """Joins the workers. As a separate function, it has a separate time limit."""
    import kdist

    assert strategy().num_replicas_in_sync == int(os.environ["WORLD_SIZE"])
    kdist.barrier()
