"""Where workers on TensorFlow say that they wait for each other: the key-value store of its coordination service."""

from __future__ import annotations

import contextlib
import os

import tensorflow as tf
from tensorflow.python.eager import context as eager_context

from kdist.backends import mail
from kdist.backends.stalls import Board

_WAITS, _HUNG = "kdist/waits", "kdist/hung"
_ANSWER_MS = 300
_ENGINE = (
    os.path.join(os.path.dirname(tf.__file__), ""),
    os.path.join(os.path.dirname(__file__), ""),
    mail.__file__,
)
# A pipeline waits for its data.
_DATA = os.path.join(os.path.dirname(tf.__file__), "python", "data", "")


class ServiceBoard(Board):
    """Who waits for whom.

    Args:
        num_workers: How many workers there are.
        worker_index: Which of them this one is.
    """

    def __init__(self, num_workers: int, worker_index: int) -> None:
        self._index = worker_index
        self._others = [i for i in range(num_workers) if i != worker_index]

    def say(self, text: str | None) -> None:
        """Says where this worker waits for the others."""
        key = f"{_WAITS}/{self._index}"
        if text is None:
            eager_context.context().delete_config_key_value(key)
        else:
            eager_context.context().set_config_key_value(key, text)

    def read(self) -> dict[int, str]:
        """Returns the other workers that wait, and where."""
        found = {index: _value(f"{_WAITS}/{index}") for index in self._others}
        return {index: text for index, text in found.items() if text is not None}

    def waits_in(self, filename: str) -> bool:
        """Says whether the main thread is inside TensorFlow."""
        return filename.startswith(_ENGINE) and not filename.startswith(_DATA)

    def farewell(self, text: str) -> None:
        """Tells the others why this worker ends."""
        eager_context.context().set_config_key_value(f"{_HUNG}/{self._index}", text)


def last_words(index: int) -> str | None:
    """Returns what a worker has said of itself before it ended, if anything and if the chief is there."""
    return _value(f"{_HUNG}/{index}")


def _value(key: str) -> str | None:
    with contextlib.suppress(tf.errors.OpError):
        return str(eager_context.context().get_config_key_value(key, _ANSWER_MS))
    return None
