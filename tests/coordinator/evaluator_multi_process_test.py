"""`SidecarEvaluator` in one process: the checkpoints that it skips, when it ends, and wrong input."""

from __future__ import annotations

import pathlib
import time

import numpy as np
import pytest

from tests.helpers.processes import each_backend, each_backend_in_twelve_turns, run, scope, strategy

X = np.random.RandomState(0).rand(24, 3).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def make_model(width=4, is_built=True, under_strategy=False):
    import keras

    with scope(under_strategy):
        layers = [keras.layers.Dense(width, activation="relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers] if is_built else layers)
        model.compile("adam", "mse", metrics=["mae"])
    return model


def make_accumulating_model():
    """Returns a model whose inner optimizer counts the batches and updates the weights every second batch."""
    import keras

    model = make_model()
    inner = keras.optimizers.Adam(gradient_accumulation_steps=2)
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse", metrics=["mae"])
    return model


def save(folder, factors):
    """Saves one checkpoint per factor, with all weights multiplied by it; returns the evaluation results."""
    import kdist

    model, losses = make_model(), []
    begin = model.get_weights()
    checkpoint = kdist.Checkpoint(a_number=3, net=model)
    for factor in factors:
        model.set_weights([factor * weight for weight in begin])
        model.optimizer.iterations.assign(int(10 * factor))
        checkpoint.save(folder, asynchronous=False)
        losses.append(model.evaluate(X, Y, verbose=0))
    return losses


def evaluator(folder, model=None, **arguments):
    import kdist

    defaults = {"poll_seconds": 0.05, "first_timeout": 5.0, "timeout": 0.3, "end_delay": 0.1, "verbose": 0}
    return kdist.SidecarEvaluator(model or make_model(), (X, Y), folder, **defaults | arguments)


def message_of(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def play(folder):
    import logging

    import keras

    import kdist

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("kdist").addHandler(handler)
    found = {}

    # Evaluates only the newest checkpoint, both with an unbuilt model and under a strategy.
    losses = save(f"{folder}/a", [1, 2, 3])
    kdist.SidecarEvaluator.announce_end(f"{folder}/a")
    for kind in ({"is_built": False}, {"under_strategy": True}):
        done = evaluator(f"{folder}/a", make_model(**kind)).start()
        assert [(one.number, one.iterations) for one in done] == [(3, 30)]
        np.testing.assert_allclose([done[0].logs["loss"], done[0].logs["mae"]], losses[2], rtol=1e-5)

    # Skips a damaged checkpoint.
    shard = next(pathlib.Path(f"{folder}/a/ckpt-3").glob("*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-250] + bytes(byte ^ 1 for byte in data[-250:]))
    done = evaluator(f"{folder}/a").start()
    assert [one.number for one in done] == [2]
    np.testing.assert_allclose([done[0].logs["loss"], done[0].logs["mae"]], losses[1], rtol=1e-5)
    found["damaged"] = said[-1]

    # Evaluates Keras files, and skips half-written files.
    model = make_model()
    pathlib.Path(f"{folder}/b").mkdir()
    for name in ("model-1.keras", "model-2.weights.h5"):
        (model.save if name.endswith(".keras") else model.save_weights)(f"{folder}/b/{name}")
        kdist.SidecarEvaluator.announce_end(f"{folder}/b")
        done = evaluator(f"{folder}/b", end_delay=0.0).start()
        assert done[0].logs["loss"] == pytest.approx(model.evaluate(X, Y, verbose=0)[0], rel=1e-5)
        half = pathlib.Path(f"{folder}/b/model-9{name[7:]}")
        half.write_bytes(pathlib.Path(f"{folder}/b/{name}").read_bytes()[:-100])
        assert [one.number for one in evaluator(f"{folder}/b").start()] == [done[0].number]
        found[f"half of {name[8:]}"] = said[-1]
        half.unlink()

    pathlib.Path(folder, "link").symlink_to("b")
    # Does not evaluate the files that its callback exports to the same directory, also after a restart.
    for name in ("best-{loss:.3f}.keras", "best.keras", "best.keras"):
        export = kdist.callbacks.SidecarEvaluatorModelExport(f"{folder}/b/{name}")
        for path in ("b", "link"):
            assert [one.number for one in evaluator(f"{folder}/{path}", callbacks=[export]).start()] == [2]
        for file in pathlib.Path(f"{folder}/b").glob("best-*"):
            file.unlink()
    pathlib.Path(f"{folder}/b/best.keras").unlink()

    # Ends after `max_evaluations`, and ignores the end marker of an earlier training.
    assert [one.number for one in evaluator(f"{folder}/b", max_evaluations=2).start()] == [2]
    began = time.monotonic()
    import os

    os.utime(f"{folder}/b/.training-ended", (10, 10))
    evaluator(f"{folder}/b", first_timeout=1.0, timeout=None).start()
    assert time.monotonic() - began >= 1.0
    found["old sign"] = message_of(lambda: evaluator(f"{folder}/b", first_timeout=None).start())

    # Wrong input.
    os.remove(f"{folder}/b/.training-ended")
    export = kdist.callbacks.SidecarEvaluatorModelExport(f"{folder}/best.keras", monitor="val_accuracy")
    found["never"] = message_of(lambda: evaluator(f"{folder}/never", first_timeout=0.2).start())
    found["no more"] = message_of(lambda: evaluator(f"{folder}/b").start())
    found["monitor"] = message_of(lambda: evaluator(f"{folder}/b", callbacks=[export]).start())
    found["other model"] = message_of(lambda: evaluator(f"{folder}/a", make_model(width=5)).start())
    found["other file"] = message_of(lambda: evaluator(f"{folder}/b", make_model(width=5)).start())
    found["generator"] = message_of(lambda: kdist.SidecarEvaluator(model, (n for n in "ab"), folder))
    found["file"] = message_of(lambda: evaluator(f"{folder}/b/model-1.keras"))
    found["not compiled"] = message_of(lambda: evaluator(folder, keras.Sequential([keras.layers.Dense(1)])))
    with kdist.cluster.environment.patched(
        TF_CONFIG='{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps", "index": 0}}'
    ):
        found["server"] = message_of(kdist.MultiWorkerMirroredStrategy)
    logging.getLogger("kdist").removeHandler(handler)
    return found


@pytest.mark.kills(
    evaluator_ends_by_an_old_sign="[torch]",
    evaluator_without_a_limit_ends_by_an_old_sign="[torch]",
    evaluator_leaves_the_last_checkpoint_out="[torch]",
    evaluator_evaluates_its_exports="[torch]",
    evaluator_evaluates_its_exports_through_links="[torch]",
)
@each_backend_in_twelve_turns
def test_what_is_passed_over_and_what_is_an_error(backend, tmp_path):
    found = run(backend, 1, play, str(tmp_path))[0]
    assert "skips a checkpoint" in found["damaged"] and "ckpt-3" in found["damaged"]
    for kind in ("keras", "weights.h5"):
        assert "model-9" in found[f"half of {kind}"]
    for name, kind, part in (
        ("never", "WorkerTimeoutError", "`first_timeout`"),
        ("old sign", "WorkerTimeoutError", "evaluated=1"),
        ("no more", "WorkerTimeoutError", "announce_end"),
        ("monitor", "InvalidArgumentError", "evaluated=['loss', 'mae']"),
        ("other model", "CheckpointMismatchError", "kernel float32[3, 4]"),
        ("other file", "CheckpointMismatchError", "model-2.weights.h5"),
        ("generator", "InvalidArgumentError", "read only once"),
        ("file", "InvalidArgumentError", "not a directory"),
        ("not compiled", "ValueError", "compile"),
        ("server", "ClusterConfigError", "parameter server"),
    ):
        assert found[name][0] == kind and part in found[name][1], found[name]


def play_signs(folder):
    import os

    import keras

    import kdist
    from kdist.checkpoint import end_of_training

    def fit(*callbacks):
        model.fit(X, Y, batch_size=8, epochs=1, verbose=0, callbacks=list(callbacks))
        return sorted(str(path.parent.name) for path in pathlib.Path(folder).rglob(".training-ended"))

    class Saves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert not os.path.exists(f"{folder}/files/.training-ended"), "training runs"
            kdist.Checkpoint(model=model).save(f"{folder}/own")

    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("on purpose")

    model = make_model(under_strategy=True)
    file = keras.callbacks.ModelCheckpoint(f"{folder}/files/{{epoch}}.keras")
    signs = [fit(), fit(file)]
    with end_of_training.watched(f"{folder}/files"), end_of_training.watched(f"{folder}/own"):
        signs += [fit(file), fit(file, Saves())]
        message_of(lambda: fit(file, Fails()))
    signs.append(sorted(str(path.parent.name) for path in pathlib.Path(folder).rglob(".training-ended")))
    return signs


@pytest.mark.kills(evaluator_sign_after_a_failed_fit="[torch]")
@each_backend
def test_fit_leaves_a_sign_where_it_has_saved_and_an_evaluator_watches(backend, tmp_path):
    found = run(backend, 1, play_signs, str(tmp_path))[0]
    assert found == [[], [], ["files"], ["files", "own"], ["own"]]


def play_estimator(folder):
    import keras

    import kdist

    calls = []

    def input_fn(context):
        calls.append(context)
        mine = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        return Batches(X[mine], Y[mine], batch_size=4)

    class Batches(keras.utils.PyDataset):
        def __init__(self, x, y, batch_size):
            super().__init__()
            self.x, self.y, self.size = x, y, batch_size

        def __len__(self):
            return len(self.x) // self.size

        def __getitem__(self, index):
            rows = slice(index * self.size, (index + 1) * self.size)
            return self.x[rows], self.y[rows]

    module, chosen = kdist.estimator, strategy()
    results = []
    for source in (make_model, make_model(under_strategy=True), make_accumulating_model):
        config = module.RunConfig(
            model_dir=f"{folder}/{len(results)}",
            save_checkpoints_steps=1,
            train_distribute=chosen,
            eval_distribute=chosen,
            tf_random_seed=3,
        )
        estimator = module.Estimator(source, config)
        spec = module.EvalSpec(input_fn, steps=None, throttle_secs=0)
        logs = module.train_and_evaluate(estimator, module.TrainSpec(input_fn, max_steps=2), spec)
        trained = estimator.model(trains=True)
        np.testing.assert_allclose(logs["loss"], trained.evaluate(X, Y, verbose=0)[0], rtol=1e-5)
        # The steps of earlier calls count, and `train` adds more steps.
        again = module.train_and_evaluate(estimator, module.TrainSpec(input_fn, max_steps=2), spec)
        assert again == logs
        estimator.train(input_fn, steps=1)
        results.append([logs["global_step"], estimator.evaluate(lambda: input_fn(calls[0]))["global_step"]])
    assert all(context.num_replicas_in_sync == 2 for context in calls)
    errors = [message_of(lambda: module.Estimator(keras.Sequential()))]
    with kdist.cluster.environment.patched(
        TF_CONFIG='{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    ):
        specs = module.TrainSpec(input_fn), module.EvalSpec(input_fn)
        for config in (module.RunConfig(), module.RunConfig(model_dir=folder)):
            errors.append(message_of(lambda c=config: module.train_and_evaluate(make_model, *specs, c)))
    return results, errors


@pytest.mark.kills(estimator_forgets_earlier_steps="[torch]")
@each_backend
def test_train_and_evaluate_alone(backend, tmp_path):
    results, errors = run(backend, 1, play_estimator, str(tmp_path))[0]
    assert results == [[2, 3], [2, 3], [2, 3]]
    for (kind, text), part in zip(errors, ("compile", "model_dir", "does not connect them"), strict=True):
        assert kind == "InvalidArgumentError" and part in text, text


def play_estimator_of_plain_keras(folder):
    import keras

    import kdist

    class Counts(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            Counts.batches += 1

    def make_scaled_model():
        model = make_model()
        # Every gradient overflows, so the optimizer skips and does not count all steps.
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**127)
        model.compile(optimizer, "mse")
        return model

    def rows():
        for _ in range(100):
            drawn.append(float(np.random.random()))
            yield X, 1e6 * Y

    def test_rows():
        yield X, Y

    module, drawn, results = kdist.estimator, [], []
    for max_steps in (3, 4):
        config = module.RunConfig(model_dir=f"{folder}/scaled", save_checkpoints_steps=2)
        estimator = module.Estimator(make_scaled_model, config)
        estimator.train(rows, max_steps=max_steps, callbacks=[Counts()])
        results.append([estimator.evaluate(test_rows)["global_step"], Counts.batches])
    drawn.clear()
    config = module.RunConfig(tf_random_seed=7, save_checkpoints_steps=2)
    spec = module.EvalSpec(test_rows, throttle_secs=0)
    module.train_and_evaluate(make_model, module.TrainSpec(rows, max_steps=6), spec, config)
    results.append(len(drawn) - len(set(drawn)))
    return results, message_of(lambda: module.RunConfig(save_checkpoints_steps=0))


@pytest.mark.kills(
    estimator_evaluates_an_older_checkpoint="[jax]",
    estimator_forgets_skipped_steps="[jax]",
    estimator_seed_set_again="[jax]",
)
@each_backend
def test_an_estimator_of_plain_keras_counts_all_steps_and_evaluates_the_last(backend, tmp_path):
    results, (kind, text) = run(backend, 1, play_estimator_of_plain_keras, str(tmp_path))[0]
    assert results == [[3, 3], [4, 4], 0]
    assert kind == "InvalidArgumentError" and "save_checkpoints_steps" in text
