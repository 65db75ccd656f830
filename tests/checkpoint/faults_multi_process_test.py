"""Damaged checkpoints, models that do not match, full disks, and saves that are killed."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import sys

import numpy as np
import pytest

from tests.checkpoint import jobs
from tests.helpers.compare import assert_equal
from tests.helpers.processes import each_backend, each_backend_in_twelve_turns, run
from tests.helpers.scripts import Script


def in_worker_two_saves(folder):
    """Saves two checkpoints; returns their paths."""
    import kdist

    checkpoint = kdist.Checkpoint(model=jobs.make_model(), epoch=1)
    paths = [checkpoint.save(folder, asynchronous=asynchronous) for asynchronous in (False, True)]
    checkpoint.wait()
    return paths


def in_worker_restore_error(path, width=5):
    """Returns the error of a restore, and checks that the restore has changed nothing."""
    import kdist

    model = jobs.make_model(width, seed=4)
    checkpoint = kdist.Checkpoint(model=model, epoch=7)
    before = model.get_weights()
    with pytest.raises(kdist.errors.CheckpointError) as caught:
        checkpoint.restore(path)
    assert_equal(model.get_weights(), before)
    assert checkpoint.epoch == 7
    return type(caught.value).__name__, str(caught.value)


@pytest.fixture
def two(backend, tmp_path):
    """Returns the paths of a complete checkpoint, and of a newer checkpoint that tests may damage."""
    return run(backend, 1, in_worker_two_saves, str(tmp_path))[0]


def error_of(backend, path, *args):
    ((kind, text),) = run(backend, 1, in_worker_restore_error, path, *args)
    return kind, text


def shard_of(path):
    (name,) = [name for name in os.listdir(path) if name.startswith("shard")]
    return os.path.join(path, name)


def in_worker_flip_everywhere(path):
    """Flips bytes all over the files, one at a time; returns the flips that no check noticed."""
    import kdist
    from kdist.checkpoint.checked_reading import verify

    checkpoint = kdist.Checkpoint(model=jobs.make_model(), epoch=0)
    random = np.random.RandomState(0)
    missed = []
    for name in sorted(os.listdir(path)):
        file = os.path.join(path, name)
        with open(file, "rb") as stream:
            good = stream.read()
        for at in sorted({0, 7, len(good) - 1, *random.randint(0, len(good), 60)}):
            bad = bytearray(good)
            bad[at] ^= 1 << random.randint(8)
            with open(file, "wb") as stream:
                stream.write(bad)
            try:
                verify(path)
                missed.append((name, int(at)))
            except kdist.errors.CheckpointError:
                pass
        with open(file, "wb") as stream:
            stream.write(good)
    checkpoint.restore(path)
    return missed


@pytest.mark.kills(checkpoint_checksum_not_verified="[torch]", checkpoint_header_not_verified="[torch]")
@each_backend
def test_every_flipped_byte_is_noticed(backend, two):
    (missed,) = run(backend, 1, in_worker_flip_everywhere, two[1])
    assert missed == []


@each_backend
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_offered(backend, two):
    good, bad = two
    offer = f"checkpoint.restore({good!r})"
    shard = shard_of(bad)
    with open(shard, "rb") as stream:
        content = stream.read()
    for spoil, kind, words in (
        (
            content[:-1],
            "CheckpointCorruptError",
            ("size of a shard", f"bytes={len(content) - 1}", f"saved={len(content)}"),
        ),
        (
            content[:-1] + b"\xff",
            "CheckpointCorruptError",
            ("the checksum of tensor 'model.metrics/", "bytes="),
        ),
        (None, "CheckpointCorruptError", ("a shard is missing", os.path.basename(shard))),
    ):
        os.unlink(shard)
        if spoil is not None:
            with open(shard, "wb") as stream:
                stream.write(spoil)
        found, text = error_of(backend, bad)
        assert found == kind
        assert all(word in text for word in (*words, shard, offer)), text
        if spoil is None:
            with open(shard, "wb") as stream:
                stream.write(content)
    index = os.path.join(bad, "index.json")
    with open(index, "rb") as stream:
        original = stream.read()
    from kdist.checkpoint.index import dump, parse

    with open(index, "wb") as stream:
        stream.write(dump(parse(original, index), version=3))
    kind, text = error_of(backend, bad)
    assert kind == "CheckpointError" and "version=3" in text and offer in text
    os.unlink(index)
    kind, text = error_of(backend, bad)
    assert kind == "CheckpointNotFoundError" and offer in text


@pytest.mark.in_turn(6)
def test_values_of_another_form_are_refused_before_anything_is_assigned(tmp_path):
    from kdist.checkpoint.index import dump, parse

    path = run("torch", 1, in_worker_two_saves, str(tmp_path))[0][0]
    index = os.path.join(path, "index.json")
    with open(index, "rb") as stream:
        good = parse(stream.read(), index)
    for changes in (
        {"values": {**good.values, "epoch": {"$array": ["float32", [2], "AAA="]}}},
        {"values": {**good.values, "epoch": {"$tensor": []}}},
        {"values": {**good.values, "save_counter": "many"}},
        {"states": {**good.states, "random": [{"$tuple": 3}]}},
    ):
        with open(index, "wb") as stream:
            stream.write(dump(dataclasses.replace(good, **changes)))
        kind, text = error_of("torch", path)
        assert kind == "CheckpointCorruptError" and "a saved value has an invalid format" in text, (
            changes,
            text,
        )


@pytest.mark.kills(checkpoint_model_not_checked="[torch]")
@each_backend
def test_a_model_that_does_not_match_is_named(backend, two):
    kind, text = error_of(backend, two[0], 6)
    assert kind == "CheckpointMismatchError"
    assert "variable 0, dense/kernel" in text
    assert "saved='dense/kernel float32[3, 5]" in text and "object='dense/kernel float32[3, 6]" in text


def in_worker_status(path):
    """Checks the status of restores with missing objects, and the errors for wrong objects."""
    import keras

    import kdist

    model = jobs.make_model()
    other = keras.Variable(1.0)
    status = kdist.Checkpoint(model=model, other=other).restore(path)
    with pytest.raises(kdist.errors.CheckpointMismatchError, match=r"missing=\['other'\]"):
        status.assert_existing_objects_matched()
    status = kdist.Checkpoint(numbers=0).read(path).expect_partial()
    with pytest.raises(kdist.errors.CheckpointMismatchError, match="numbers"):
        status.assert_consumed()
    assert "model" in status.unused
    with pytest.raises(kdist.errors.CheckpointMismatchError, match="kind"):
        kdist.Checkpoint(model=keras.Variable(1.0)).restore(path)
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(kdist.errors.CheckpointError, match="Input layer"):
        kdist.Checkpoint(model=unbuilt).restore(path)
    with pytest.raises(kdist.errors.InvalidArgumentError, match="get_state"):
        kdist.Checkpoint(thing=object()).save("never")
    with pytest.raises(kdist.errors.InvalidArgumentError, match="named 'save'"):
        kdist.Checkpoint(save=1)
    with pytest.raises(kdist.errors.InvalidArgumentError, match="underscore"):
        kdist.Checkpoint(_hidden=1)
    with pytest.raises(kdist.errors.InvalidArgumentError, match="`random` is not a boolean"):
        kdist.Checkpoint(random=keras.random.SeedGenerator(1))
    for kind, value in (("objects", other), ("arrays", np.zeros(2))):
        with pytest.raises(kdist.errors.InvalidArgumentError, match=f"Two {kind} in the checkpoint"):
            kdist.Checkpoint(table={1: value, "1": value}).save("never")


@each_backend
def test_status_and_wrong_objects(backend, two):
    run(backend, 1, in_worker_status, two[0])


def in_worker_killed(folder, phases):
    """Saves in child processes that exit in the middle; returns each phase's exit code and remains."""
    import kdist
    from kdist.checkpoint import folders, writing

    checkpoint = kdist.Checkpoint(model=jobs.make_model(), epoch=1)
    first = checkpoint.save(folder, asynchronous=False)
    left = []
    for module_name, function, call in phases:
        child = os.fork()
        if child == 0:
            module = {"folders": folders, "writing": writing, "os": os}[module_name]
            original, calls = getattr(module, function), []

            def die(*args, _original=original, _calls=calls, _call=call, **kwargs):
                _calls.append(1)
                if len(_calls) == _call:
                    os._exit(9)
                return _original(*args, **kwargs)

            setattr(module, function, die)
            try:
                checkpoint.write(first, asynchronous=False)  # replaces the old checkpoint: the hardest case
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        hidden = [name for name in os.listdir(folder) if name.startswith(".")]
        latest = kdist.latest_checkpoint(folder)
        assert latest is not None
        checkpoint.read(latest).assert_existing_objects_matched()
        checkpoint.read(first).assert_existing_objects_matched()
        left.append((status, len(hidden)))
        checkpoint.write(os.path.join(folder, "ckpt-2"), asynchronous=False)
        shutil.rmtree(os.path.join(folder, "ckpt-2"))
        assert os.listdir(folder) == ["ckpt-1"]
    return left


# A process that has begun to compute on JAX or TensorFlow cannot be forked. However, the result does not
# depend on the backend, and the fault matrix kills saves on all backends.
@pytest.mark.in_turn(4)
@pytest.mark.kills("checkpoint_visible_too_early", "checkpoint_replaced_one_unreadable")
def test_a_save_that_is_killed_anywhere_leaves_the_checkpoint_before_it(tmp_path):
    phases = [
        ("folders", "clean", 1),  # the directory exists
        ("writing", "write_file", 1),  # before the shard
        ("os", "fsync", 1),  # the shard is not on disk
        ("writing", "write_file", 2),  # before its report
        ("writing", "merge", 1),
        ("writing", "write_file", 3),  # before the index
        ("writing", "publish", 1),  # all files are written
        ("os", "rename", 2),  # before the old checkpoint is moved aside
        ("os", "rename", 3),  # between the two renames
        ("writing", "remove", 1),  # before the old checkpoint is deleted
    ]
    (left,) = run("torch", 1, in_worker_killed, str(tmp_path), phases)
    assert left == [(9, 1)] * 8 + [(9, 2), (9, 1)]


def in_worker_failing(folder):
    """Simulates a full disk on worker 1 for some saves; returns the errors of a worker in three cases."""
    import kdist
    from kdist.checkpoint import snapshot, writing

    model = jobs.make_model()
    checkpoint = kdist.Checkpoint(model=model, epoch=1)
    index = int(os.environ["RANK"])
    first = checkpoint.save(folder, asynchronous=False)
    original = writing.write_file

    def full(path, parts):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def failing():
        if index == 1:
            writing.write_file = full
        try:
            checkpoint.save(folder)
            checkpoint.settle()
        finally:
            writing.write_file = original

    heard = []
    for ask in (
        checkpoint.wait,
        lambda: checkpoint.save(folder),
        lambda: model.fit(*jobs.data(), batch_size=9, verbose=0),
    ):
        failing()
        with pytest.raises(kdist.errors.CheckpointError) as caught:
            ask()
        heard.append(str(caught.value))
        kdist.barrier()
        assert os.listdir(folder) == [os.path.basename(first)]
        kdist.barrier()  # the other worker waits for this check before the next save
    last = checkpoint.save(folder, asynchronous=False)
    assert kdist.latest_checkpoint(folder) == last
    kdist.barrier()
    with pytest.raises(kdist.errors.CheckpointError, match="the objects of worker 0 and worker 1 differ"):
        kdist.Checkpoint(values=np.zeros(2 + index)).save(folder)
    kdist.barrier()
    with pytest.raises(kdist.errors.CheckpointMismatchError, match="restore different checkpoints"):
        checkpoint.restore((first, last)[index])
    own = os.path.join(folder, "own", str(index))
    path = checkpoint.save(own, asynchronous=False)  # directories that are not shared
    checkpoint.restore(path).assert_consumed()
    assert os.path.exists(os.path.join(path, "shard-00000-of-00001.safetensors"))

    def no_memory(share):
        raise MemoryError("no memory for a copy")

    original = snapshot.copy
    try:
        if index == 1:
            snapshot.copy = no_memory
        checkpoint.save(folder)
    except MemoryError:
        pass
    finally:
        snapshot.copy = original
    checkpoint.restore(last)  # waits on all workers for a save that only some workers write
    with pytest.raises(
        kdist.errors.CheckpointError, match="Worker 1 could not write its shard: MemoryError: no memory"
    ):
        checkpoint.wait()
    return heard


@pytest.mark.kills(checkpoint_failed_write_not_told="[torch]", checkpoint_settled_on_some_workers="[torch]")
@each_backend
def test_a_failed_write_is_told_on_all_workers_and_harms_nothing(backend, tmp_path):
    for heard in run(backend, 2, in_worker_failing, str(tmp_path)):
        for text in heard:
            assert "worker 1" in text.lower() and "No space left on device" in text


DISKS = """
    import os, sys
    import numpy as np
    import keras
    import kdist

    folder = sys.argv[0] + ".disk"
    os.mkdir(folder)
    assert os.system(f"mount -t tmpfs -o size=3m tmpfs {folder}") == 0
    values = np.random.RandomState(0).rand(2**18).astype("float32")
    weights = keras.Variable(values)
    checkpoint = kdist.Checkpoint(weights=weights, random=False)
    first = checkpoint.save(folder, asynchronous=False)

    def restore(path):
        weights.assign(np.zeros(2**18))
        checkpoint.restore(path).assert_consumed()
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(weights), values)

    for asynchronous in (False, True):
        with open(folder + "/filler", "wb") as filler:
            filler.write(bytes(2**20 + 2**19))
        try:
            checkpoint.save(folder, asynchronous=asynchronous)
            checkpoint.wait()
            print("no error")
        except kdist.errors.CheckpointError as error:
            print("full:", repr(error))
        os.unlink(folder + "/filler")
        assert sorted(os.listdir(folder)) == ["ckpt-1"], os.listdir(folder)
        restore(first)
    checkpoint.save(folder, asynchronous=False)
    assert os.system(f"mount -o remount,ro {folder}") == 0
    try:
        checkpoint.save(folder)
        print("no error")
    except kdist.errors.CheckpointError as error:
        print("read-only:", repr(error))
    restore(kdist.latest_checkpoint(folder))
    assert os.system(f"mount -o remount,rw {folder}") == 0
    checkpoint.save(folder)  # nobody waits for it: the end of the process does
"""


@each_backend_in_twelve_turns
def test_a_full_disk_and_a_read_only_folder(backend, tmp_path):
    command = ("unshare", "--user", "--map-root-user", "--mount", sys.executable)
    script = Script(tmp_path, "disks", DISKS, {"KERAS_BACKEND": backend}, command).finish()
    lines = script.stdout().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["full", "full", "read-only"]
    assert all("No space left on device" in line for line in lines[:2])
    assert "Read-only file system" in lines[2]
