"""`kdist checkpoint convert` selects a model of a checkpoint, which Keras or a user's function creates."""

from __future__ import annotations

import contextlib
import io
import os
import threading

import numpy as np
import pytest

from tests.helpers.processes import run, strategy

pytestmark = pytest.mark.xdist_group("pool-torch")

# Keras cannot create `Own` from a configuration.
USER = """
import keras

class Own(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.dense = keras.layers.Dense(units)
    def build(self, shape):
        self.dense.build(shape)
    def call(self, x):
        return self.dense(x) * 2

def loss(y, p):
    return keras.ops.mean((y - p) ** 2)

def make(units=2):
    model = Own(units)
    model.build((None, 3))
    return model

def make_wider():
    return make(4)
"""


def in_worker_convert(folder):
    """Saves checkpoints of one and of several models; returns the commands' output and the files' contents."""
    import sys

    import keras

    import kdist
    from kdist.command_line import main

    before = os.getcwd()
    os.chdir(folder)
    with open("user_models.py", "w", encoding="utf-8") as file:
        file.write(USER)
    sys.path.insert(0, folder)
    import user_models

    sys.path.remove(folder)
    keras.utils.set_random_seed(2)
    with strategy().scope():
        plain = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
        second = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
        own = user_models.make()
        plain.compile("sgd", user_models.loss)
        second.compile("adam", "mse")
    x = np.random.RandomState(0).rand(6, 3).astype("float32")
    second.fit(x, x[:, :2], batch_size=3, verbose=0)
    made = {"plain": plain, "second": second, "own": own}
    expected = {name: model.predict(x, verbose=0) for name, model in made.items()}
    kdist.Checkpoint(**made).save("several", asynchronous=False)
    kdist.Checkpoint(model=second, epoch=1).save("one", asynchronous=False)
    said = {}

    def convert(label, *arguments):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = main(["checkpoint", "convert", *arguments])
        said[label] = code, printed.getvalue()

    def convert_unsafely():
        keras.config.enable_unsafe_deserialization()
        convert("unsafe", "lambdas", "lambdas.keras")

    convert("the only one", "one", "one.keras")
    convert("which", "several", "which.keras")
    convert("no such name", "several", "no.keras", "--name", "third")
    convert("no such directory", "one", "missing/one.keras")
    os.mkdir("directory.keras")
    convert("a directory", "one", "directory.keras")
    os.rmdir("directory.keras")
    convert("second", "several", "second.keras", "--name", "second")
    convert("weights", "several", "plain.weights.h5", "--name", "plain")
    convert("unknown loss", "several", "plain.keras", "--name", "plain")
    convert("cannot be made", "several", "own.keras", "--name", "own")
    del sys.modules["user_models"]  # the command finds it in the current directory
    convert("by a function", "several", "own.weights.h5", "--name", "own", "--model", "user_models:make")
    convert("no such function", "several", "x.weights.h5", "--name", "own", "--model", "user_models:missing")
    convert("no function", "several", "x.weights.h5", "--name", "own", "--model", "user_models:__name__")
    convert("no module", "several", "x.weights.h5", "--name", "own", "--model", ":make")
    convert("no such module", "several", "x.weights.h5", "--name", "own", "--model", "no_module:make")
    convert("another model", "several", "x.weights.h5", "--name", "own", "--model", "user_models:make_wider")
    lambdas = keras.Sequential([keras.layers.Input((3,)), keras.layers.Lambda(lambda x: x * 2)])
    kdist.Checkpoint(lambdas=lambdas).save("lambdas", asynchronous=False)
    thread = threading.Thread(target=convert_unsafely)  # Keras keeps the setting per thread
    thread.start()
    thread.join()
    assert all((code == 0) == (label not in WRONG) for label, (code, _) in said.items()), said
    files = sorted(name for name in os.listdir() if name.endswith((".keras", ".h5")))

    loaded = {name: keras.saving.load_model(f"{name}.keras") for name in ("one", "second", "plain")}
    found = {name: model.predict(x, verbose=0) for name, model in loaded.items()}
    steps = [int(np.asarray(loaded[name].optimizer.iterations)) for name in ("one", "second")]
    again = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    again.load_weights("plain.weights.h5")
    found["weights"] = again.predict(x, verbose=0)
    again = user_models.make()
    again.load_weights("own.weights.h5")
    found["own"] = again.predict(x, verbose=0)
    os.chdir(before)
    return said, expected, files, found, steps


@pytest.mark.kills("checkpoint_bytecode_converted", "checkpoint_convert_raises")
def test_which_model_and_who_makes_it(tmp_path):
    ((said, expected, files, found, steps),) = run("torch", 1, in_worker_convert, str(tmp_path))
    for name, model in {
        "one": "second",
        "second": "second",
        "plain": "plain",
        "weights": "plain",
        "own": "own",
    }.items():
        np.testing.assert_array_equal(found[name], expected[model], err_msg=name)
    assert steps == [2, 2], "the optimizer is in the file"
    assert files == ["one.keras", "own.weights.h5", "plain.keras", "plain.weights.h5", "second.keras"]
    assert said["the only one"] == (0, "Wrote one.keras.\n")
    for label, words in WRONG.items():
        code, text = said[label]
        assert code == words[0], f"{label}: {text}"
        for word in words[1:]:
            assert word in text, f"{label}: {text}"
    assert "not compiled" in said["unknown loss"][1]


WRONG = {
    "unsafe": (1, "lambda", "--model module:function"),
    "which": (2, "several models", "name=None", "['plain', 'second', 'own']", "--name plain"),
    "no such name": (2, "no model 'third'", "name='third'"),
    "no such directory": (2, "Cannot write the output file.", "mkdir -p missing"),
    "a directory": (2, "Cannot write the output file.", "Is a directory"),
    "cannot be made": (1, "model='own'", "--model module:function"),
    "no such function": (2, "Cannot create the model: ", "missing"),
    "no function": (2, "Cannot create the model: '__name__' is not a function", "user_models:__name__"),
    "no module": (2, "Cannot create the model: ", "':make'"),
    "no such module": (2, "Cannot create the model: ", "no_module"),
    "another model": (1, "'own' does not match the checkpoint"),
}
