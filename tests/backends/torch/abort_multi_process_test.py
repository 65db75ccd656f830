"""Gloo simulates how NCCL ends collectives: Python waits for no results, and a lost worker aborts them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.processes import run_plain
from tests.helpers.scripts import Script, environments_of

STEPS = 6
AFTER = 4  # number of complete steps before the abort

PLAYED = """
    import json
    import os

    import keras
    import numpy as np
    import torch

    import kdist
    from kdist.control import stalls
    from kdist.backends.torch import workers
    from kdist.control.loss_reasons import DIED, Loss
    from tests.backends.torch.abort_multi_process_test import AFTER, build, data

    workers.JoinedWorkers._is_queued = lambda self, tensor: True
    torch.cuda.synchronize = lambda: None
    workers.abort_nccl = lambda: None
    gloo = kdist.experimental.CommunicationOptions(implementation="RING")
    strategy = kdist.MultiWorkerMirroredStrategy(communication_options=gloo)
    group = strategy.runtime.group
    group._nccl = True
    with strategy.scope():
        model = build()
    x, y = data()
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, epochs=1)
    whole = [weights.tolist() for weights in model.get_weights()]

    # The other worker dies in a step: what the collective leaves is a part of the sum.
    group.channel.wait_for_loss = lambda timeout: {1 - group.worker_index: "it died"}

    def aborted(work, tensor, finish=workers.JoinedWorkers._finish):
        if model.optimizer.iterations.value >= AFTER and tensor.is_floating_point() and not group._aborted:
            group._abort(1 - group.worker_index, Loss(DIED, "it died"))
            tensor.fill_(1e9)
        return finish(group, work, tensor)

    with strategy.scope():
        model = build()
    group._finish = aborted
    said = []
    checkpoints = keras.callbacks.ModelCheckpoint("each-epoch.keras")
    try:
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[checkpoints])
    except kdist.errors.WorkerLostError as error:
        said.append(str(error))
    group._finish = lambda work, tensor: workers.JoinedWorkers._finish(group, work, tensor)
    kept = [keras.ops.convert_to_numpy(weights).tolist() for weights in model.weights]
    group.all_gather_bytes = lambda data, timeout=None: [data] * 2  # it has arrived: the worker died just after
    group.begin_gather_bytes = lambda data: lambda: [data] * 2
    for save, path in ((model.save, "by-hand.keras"), (kdist.Checkpoint(model=model).save, "checkpoint")):
        try:
            save(path)
        except (kdist.errors.WorkerLostError, kdist.errors.CheckpointError) as error:
            said.append(str(error))
    print(json.dumps([whole, kept, said]), flush=True)
    os._exit(0)  # the connection cannot be closed in good order any more
"""


def build():
    import keras

    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    rng = np.random.default_rng(3)
    model.set_weights([rng.normal(size=weights.shape).astype("float32") for weights in model.get_weights()])
    return model


def data():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(8 * STEPS, 3)).astype("float32")
    return x, (x[:, :1] - x[:, 1:2]).astype("float32")


def plain():
    found = []
    for steps in (STEPS, AFTER):
        model = build()
        x, y = data()
        model.fit(x[: 8 * steps], y[: 8 * steps], batch_size=8, shuffle=False, verbose=0)
        found.append(model.get_weights())
    return found


@pytest.mark.kills(
    "checkpoint_after_an_abort",
    "saved_after_an_abort",
    "torch_applied_after_an_abort",
    "torch_variables_change_before_an_exchange",
)
def test_what_was_computed_after_an_abort_is_neither_applied_nor_saved(tmp_path):
    scripts = []
    for index, env in enumerate(environments_of("torch")):
        (folder := tmp_path / str(index)).mkdir()
        scripts.append(Script(folder, "played", PLAYED, env))
    whole, part = run_plain("torch", plain)
    for script in scripts:
        trained, kept, said = script.finish().told()
        for one, expected in [*zip(trained, whole, strict=True), *zip(kept, part, strict=True)]:
            np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)
        assert len(said) == 3 and all("it died" in text for text in said), said
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"played.py", "played.out", "played.err"}, "no file, not even a half one"
