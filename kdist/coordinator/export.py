"""`SidecarEvaluatorModelExport`: saves the model of the best checkpoint of an evaluator."""

from __future__ import annotations

import os

import keras

from kdist.errors import InvalidArgumentError


class SidecarEvaluatorModelExport(keras.callbacks.ModelCheckpoint):
    """Saves the model of the best checkpoint that a `kdist.SidecarEvaluator` has evaluated.

    Source: https://www.tensorflow.org/api_docs/python/tf/keras/callbacks/SidecarEvaluatorModelExport

    Args:
        export_filepath: The file to write: `.keras`, or `.weights.h5` with `save_weights_only=True`.
            `{epoch}` stands for the number of the checkpoint, and `{loss}` and other names for its logs.
        checkpoint_filepath: Unused, because the evaluator passes the number of the checkpoint. TensorFlow's
            callback reads the number from this pattern.
        monitor: The name of the loss or of a metric, with or without the prefix "val_".
        **kwargs: Arguments of `keras.callbacks.ModelCheckpoint`: `mode` ("auto", "min" or "max"),
            `save_best_only`, `save_weights_only`, `verbose`, `initial_value_threshold`.

    Raises:
        InvalidArgumentError: At the first evaluation, if `monitor` is not in its logs.

    Example:

    ```python
    kdist.callbacks.SidecarEvaluatorModelExport("best.keras", monitor="accuracy", mode="max")
    ```
    """

    def __init__(
        self,
        export_filepath: str | os.PathLike[str],
        checkpoint_filepath: str | os.PathLike[str] | None = None,
        monitor: str = "loss",
        **kwargs: object,
    ) -> None:
        super().__init__(export_filepath, monitor.removeprefix("val_"), **{"save_best_only": True} | kwargs)
        self.checkpoint_filepath = checkpoint_filepath
        self.checkpoint_number: int | None = None
        # The files of this callback, which are not checkpoints of the training.
        self.exported = {os.path.realpath(self.filepath)}
        self._count = 0

    def on_test_end(self, logs: dict[str, float] | None = None) -> None:
        """Saves the model if it is the best so far."""
        logs = logs or {}
        if self.save_best_only and self.monitor not in logs:
            raise InvalidArgumentError(
                "`monitor` is neither the loss nor a metric of the evaluated model.",
                received={"monitor": self.monitor, "evaluated": sorted(logs)},
                hint="Set `monitor` to an evaluated name, or add the metric: model.compile(..., metrics=[...])",
            )
        self._count += 1
        number = self._count if self.checkpoint_number is None else self.checkpoint_number
        named = logs | {f"val_{name}": value for name, value in logs.items()}
        super().on_epoch_end(number - 1, named)
        self.exported.add(os.path.realpath(self.filepath.format(epoch=number, **named)))
