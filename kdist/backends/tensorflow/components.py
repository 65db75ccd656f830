"""Per-replica copies of Keras variables that are not mirrored over the local devices.

There are two kinds. An on-read variable has one component per replica, which persists between `run` calls;
the mirrored variable holds the aggregate. If a variable was created outside the scope, all local replicas
share one `tf.Variable`. Each replica works on a copy, and the first replica's copy is written back.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tensorflow as tf

from kdist import keras_hooks
from kdist.backends.aggregation import share_of
from kdist.backends.contract import Runtime
from kdist.backends.variable_table import VariableTable
from kdist.errors import StrategyScopeError

if TYPE_CHECKING:
    import keras


_all: weakref.WeakSet[Components] = weakref.WeakSet()


@dataclass
class Part:
    """One local replica's copy of a variable, and the value outside replicas that it was derived from."""

    value: tf.Variable
    shown: tf.Variable


@dataclass
class _Known:
    native: tf.Variable | tf.distribute.DistributedValues
    parts: list[Part]

    def is_valid(self, variable: keras.Variable) -> bool:
        return self.native is keras_hooks.native_value(variable)


def native_of(variable: keras.Variable, index: int, num_local: int) -> tf.Variable:
    """Returns the `tf.Variable` of a local replica, or the only `tf.Variable` if replicas share it.

    Raises:
        StrategyScopeError: If the variable belongs to the replicas of another strategy.
    """
    value = keras_hooks.native_value(variable)
    if not isinstance(value, tf.distribute.DistributedValues):
        return value
    if len(value.values) != num_local:
        raise StrategyScopeError(
            f"The variable {variable.path!r} belongs to the scope of another strategy.",
            received={"variable": variable.path, "components": len(value.values), "replicas": num_local},
            hint="Create the variable in the scope of the strategy that runs the function.",
        )
    return value.values[index]


def is_shared(variable: keras.Variable, num_local: int) -> bool:
    return num_local > 1 and not isinstance(
        keras_hooks.native_value(variable), tf.distribute.DistributedValues
    )


class Components:
    """The replicas' copies of variables. A copy is created when a replica first uses the Keras variable.

    Outdated copies are detected by comparing values, because a graph leaves no other trace of an assignment.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # By `is_on_read`. In a model's step, an on-read variable has no components, but it can be shared.
        self._known: dict[bool, VariableTable[_Known]] = {True: VariableTable(), False: VariableTable()}
        _all.add(self)

    def get(self, variable: keras.Variable, index: int, is_on_read: bool) -> Part:
        """Returns a local replica's copy; see `enter`."""
        known = self._known[is_on_read].get(variable)
        if known is None or not known.is_valid(variable):
            known = self._known[is_on_read][variable] = self._make(variable, is_on_read)
        return known.parts[index]

    def enter(self, variable: keras.Variable, index: int, is_on_read: bool) -> None:
        """Updates the copy if the variable was assigned outside replicas. Repeated calls have no effect."""
        part = self.get(variable, index, is_on_read)
        outside = native_of(variable, index, len(self._runtime.devices)).read_value()
        same = tf.reduce_all(tf.equal(outside, part.shown))
        part.value.assign(tf.where(same, part.value, self._share(variable, index, outside, is_on_read)))
        part.shown.assign(outside)

    def show(self, variable: keras.Variable, index: int, total: tf.Tensor) -> None:
        """Stores the aggregated value of an on-read variable in the mirrored variable."""
        native_of(variable, index, len(self._runtime.devices)).assign(total)
        self.get(variable, index, True).shown.assign(total)

    def reset(self, variable: keras.Variable) -> None:
        """Resets the existing copies of all local replicas to their shares of the current value."""
        for is_on_read, table in self._known.items():
            known = table.get(variable)
            if known is None or not known.is_valid(variable):
                continue
            for index, part in enumerate(known.parts):
                outside = native_of(variable, index, len(known.parts)).read_value()
                part.value.assign(self._share(variable, index, outside, is_on_read))
                part.shown.assign(outside)

    def _share(self, variable: keras.Variable, index: int, value: tf.Tensor, is_on_read: bool) -> tf.Tensor:
        if not is_on_read:
            return value
        runtime = self._runtime
        return share_of(variable, value, runtime.replica_ids[index], runtime.num_replicas)

    def _make(self, variable: keras.Variable, is_on_read: bool) -> _Known:
        parts = []
        devices = self._runtime.devices
        # Outside replicas and graphs, as if the copies were created before the function.
        with keras_hooks.without_scope(), tf.init_scope(), self._runtime.suspended():
            for index, name in enumerate(devices):
                with tf.device(name):
                    native = native_of(variable, index, len(devices))
                    shown = native.read_value()
                    value = self._share(variable, index, shown, is_on_read)
                    # The flag at creation, because tapes must also watch a layer that is unfrozen later.
                    own = tf.Variable(value, trainable=native.trainable)
                    parts.append(Part(own, tf.Variable(shown, trainable=False)))
        return _Known(keras_hooks.native_value(variable), parts)


def assigned(variable: keras.Variable) -> None:
    """Called after a Keras variable was assigned outside replicas."""
    for components in _all:
        components.reset(variable)
