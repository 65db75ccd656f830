"""Image layers give the results of one device without kdist, and do not copy their images."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.helpers.compare import assert_close
from tests.helpers.processes import run, run_plain, scope

FORMATS = ("channels_last", "channels_first")


def train(data_format: str, replicas: int) -> list[Any]:
    import keras

    import kdist

    layers = keras.layers
    random = np.random.default_rng(4)
    shape = (9, 8, 3) if data_format == "channels_last" else (3, 9, 8)
    x, y = random.normal(size=(24, *shape)).astype("float32"), random.integers(0, 4, 24)
    keras.utils.set_random_seed(3)
    to = {"data_format": data_format}
    # With one replica, kdist records a step and replays it later.
    one = kdist.OneDeviceStrategy("cpu:0").scope() if replicas == 1 else contextlib.nullcontext()
    with scope(replicas == 2), one:
        model = keras.Sequential(
            [
                keras.Input(shape),
                layers.Conv2D(6, 3, padding="same", activation="relu", **to),
                layers.MaxPooling2D(2, 1, padding="same", **to),
                layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same", strides=1, **to),
                layers.AveragePooling2D(3, 1, padding="same", **to),
                layers.SeparableConv2D(8, 3, activation="tanh", dilation_rate=2, padding="same", **to),
                layers.Conv2DTranspose(5, 2, strides=2, **to),
                layers.UpSampling2D(2, **to),
                layers.AveragePooling2D((3, 2), **to),
                layers.Conv2D(6, (3, 1), strides=2, groups=1, **to),
                layers.AdaptiveMaxPooling2D(3, **to),
                layers.MaxPooling2D(2, 1, **to),
                layers.AdaptiveAveragePooling2D((2, 1), **to),
                layers.Flatten(),
                layers.Dense(4),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    return [history, *model.get_weights(), model.predict(x, verbose=0)]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("data_format", FORMATS)
def test_layers_for_images_have_the_numbers_of_one_device(data_format: str, replicas: int) -> None:
    expected = run_plain("torch", train, data_format, 0)
    (found,) = run("torch", 1, train, data_format, replicas)
    assert_close(found, expected, rtol=2e-4, atol=2e-5)


def layouts() -> list[bool]:
    import torch

    found, original = [], torch.nn.functional.max_pool2d

    def pool(images: Any, **kwargs: Any) -> Any:
        if len(images) == 4:  # the rows of a replica; the model is built with all rows
            found.append(images.is_contiguous(memory_format=torch.channels_last))
        return original(images, **kwargs)

    with mock.patch.object(torch.nn.functional, "max_pool2d", pool):
        train("channels_last", 2)
    return found


@pytest.mark.kills("torch_images_copied_to_channels_first")
def test_images_with_channels_last_are_not_copied() -> None:
    (found,) = run("torch", 1, layouts)
    assert found
    assert all(found)
