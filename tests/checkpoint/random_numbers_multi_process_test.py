"""Random numbers that belong to no object continue after a restore on each worker, as after the save."""

from __future__ import annotations

import pytest

from tests.helpers.processes import each_backend, run


def draw():
    """Draws a number from each generator that a script may use."""
    import random

    import keras
    import numpy as np

    drawn = keras.ops.convert_to_numpy(keras.random.uniform((3,)))
    return [
        random.random(),
        np.random.rand(),
        np.random.randn(),
        *map(float, drawn),
        *draw_from_the_backend(),
    ]


def draw_from_the_backend():
    import keras

    if keras.backend.backend() == "torch":
        import torch

        return torch.rand(3).tolist()
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.random.uniform((3,)).numpy().tolist()
    return []  # JAX has no global random state


def in_worker_draw_restore_and_draw(folder):
    import os

    import keras

    import kdist

    index = int(os.environ["RANK"])
    keras.utils.set_random_seed(7 + index)
    np_normal_is_half_used()
    path = kdist.Checkpoint(step=0).save(folder, asynchronous=False)
    following = draw()
    keras.utils.set_random_seed(99)
    draw()
    kdist.Checkpoint(step=0).restore(path)
    again = draw()
    kdist.Checkpoint(step=0, random=False).restore(path)
    return following, again, draw()


def np_normal_is_half_used():
    import numpy as np

    np.random.randn()  # computes two normal numbers, and keeps one for the next call


def in_worker_draw_after(path):
    """Draws after a save in a new directory, or after a restore."""
    import os

    import keras

    import kdist

    is_saved = os.path.exists(path)
    keras.utils.set_random_seed(7 + is_saved)
    checkpoint = kdist.Checkpoint(step=0)
    if is_saved:
        checkpoint.restore(path)
    else:
        checkpoint.write(path, asynchronous=False)
    return draw()


@pytest.mark.kills(checkpoint_random_numbers_without_additional_workers="[torch]")
@each_backend
def test_additional_workers_continue_with_the_state_of_all(backend, tmp_path):
    (following,) = run(backend, 1, in_worker_draw_after, str(tmp_path / "saved"))
    assert run(backend, 2, in_worker_draw_after, str(tmp_path / "saved")) == [following] * 2


@pytest.mark.kills(
    checkpoint_random_numbers_not_restored="[torch]", checkpoint_random_numbers_of_the_chief="[torch]"
)
@each_backend
def test_random_numbers_go_on_after_a_restore(backend, tmp_path):
    results = run(backend, 2, in_worker_draw_restore_and_draw, str(tmp_path))
    for following, again, others in results:
        assert again == following
        assert all(a != b for a, b in zip(others, again, strict=True))  # random=False does not restore them
    first, second = (following for following, _, _ in results)
    assert all(a != b for a, b in zip(first, second, strict=True)), "each worker has its own"
