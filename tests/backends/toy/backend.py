"""The devices of the toy backend, and its gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from kdist.backends.contract import Backend
from kdist.backends.device_names import missing_device, short_name
from kdist.backends.gradients import check_loss, split_aux
from kdist.backends.workers import Workers
from kdist.communication.options import CommunicationOptions
from kdist.keras_hooks import trainer
from kdist.topology import Topology
from tests.backends.toy.runtime import ToyRuntime
from tests.backends.toy.workers import join


class ToyBackend(Backend):
    """Keras on NumPy, with any number of CPU devices."""

    name = "numpy"

    def __init__(self) -> None:
        # On NumPy, Keras's models lack the first two methods, and the third one does not build an optimizer.
        keras.Model.train_step = train_step
        keras.Model.make_train_function = lambda model, force=False: None
        keras.Model._symbolic_build = trainer.base_trainer()._symbolic_build

    def native_batches(self, adapter: Any) -> Iterable[Any]:
        """Returns an iterator of NumPy arrays."""
        return adapter.get_numpy_iterator()

    def list_devices(self, kind: str | None = None) -> tuple[str, ...]:
        """Returns the only kind of device."""
        return ("cpu:0",) if kind in (None, "cpu") else ()

    def require_devices(self, devices: Sequence[str]) -> tuple[str, ...]:
        """Returns short names, of any number of CPU devices."""
        names = tuple(map(short_name, devices))
        for name in names:
            if not name.startswith("cpu:"):
                raise missing_device(name, ["cpu:0"])
        return names

    def create_runtime(
        self, topology: Topology, options: CommunicationOptions | None = None, ops: object = None
    ) -> ToyRuntime:
        """Joins the workers, and returns the runtime."""
        names = self.require_devices(topology.devices or ["cpu:0"])
        cluster, options = topology.cluster, options or CommunicationOptions()
        group = Workers() if cluster is None else join(cluster, options.timeout_seconds)
        return ToyRuntime(dataclasses.replace(topology, devices=names), group)

    def random_state(self) -> bytes:
        """Returns the state of the generator with which Keras shuffles arrays."""
        _, words, *rest = np.random.get_state()
        return np.array([*words, *rest], "float64").tobytes()

    def set_random_state(self, state: bytes) -> None:
        """Sets the state."""
        *words, position, has_gauss, gauss = np.frombuffer(state, "float64").tolist()
        np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[keras.Variable], has_aux: bool
    ) -> Callable[..., Any]:
        """Returns a function that computes a loss and its gradients from differences of losses.

        They are exact for each loss that is a quadratic function of the variables, such as the mean squared
        error of a `Dense` layer. Other losses get wrong gradients.
        """

        def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
            def loss() -> Any:
                return split_aux(fn(*args, **kwargs), has_aux)[0]

            result = fn(*args, **kwargs)
            check_loss(split_aux(result, has_aux)[0])
            gradients = []
            for variable in variables:
                start = np.array(variable.value)
                gradient = np.zeros_like(start)
                for position in np.ndindex(start.shape):
                    step = np.zeros_like(start)
                    step[position] = 1
                    losses = []
                    for moved in (start + step, start - step):
                        variable.assign(moved)
                        losses.append(loss())
                    gradient[position] = (losses[0] - losses[1]) / 2
                variable.assign(start)
                gradients.append(gradient)
            return result, gradients

        return wrapper


def train_step(model: keras.Model, data: Any) -> dict[str, Any]:
    """Trains a model on a batch, as the `train_step` of Keras's other backends."""
    import kdist

    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

    def loss_fn() -> tuple[Any, Any]:
        y_pred = model(x, training=True)
        return model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight), y_pred

    (loss, y_pred), gradients = kdist.value_and_grad(loss_fn, model.trainable_variables, has_aux=True)()
    model._loss_tracker.update_state(loss, sample_weight=len(x))
    model.optimizer.apply(gradients, model.trainable_variables)
    return model.compute_metrics(x, y, y_pred, sample_weight)
