"""Optimizers that run on the servers. Each server updates the parts of variables that it holds."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence

import keras

from kdist import keras_hooks
from kdist.context import StrategyLike
from kdist.coordinator import shipping
from kdist.coordinator.placement import Placement
from kdist.coordinator.served import Home, Record, Served
from kdist.errors import UnsupportedError

NUMBER = "_kdist_number"
"""The attribute of an optimizer with the number by which the servers identify it."""
_PLAIN = (bool, float, int, str, type(None))


@dataclasses.dataclass(eq=False)
class Optimizers:
    """The optimizers of one job, on its coordinator."""

    strategy: StrategyLike
    served: Served
    give: Callable[[Sequence[keras.Variable]], None]  # moves variables to the servers

    def __post_init__(self) -> None:
        self._numbers = weakref.WeakKeyDictionary[keras.optimizers.Optimizer, int]()
        self._by_number = weakref.WeakValueDictionary[int, keras.optimizers.Optimizer]()
        self._unused = itertools.count()  # numbers of deleted optimizers are not used again
        self._registered: weakref.WeakSet[keras.optimizers.Optimizer] = weakref.WeakSet()

    def reduced(self, optimizer: keras.optimizers.Optimizer) -> tuple[object, ...]:
        """Returns the reduced form of an optimizer. Sends a built optimizer to the servers first."""
        if hasattr(optimizer, "optimizers"):  # a `MultiOptimizer`, whose optimizers run on the servers
            return keras_hooks.reduced(optimizer)
        _check(optimizer)
        number = self._numbers.setdefault(optimizer, next(self._unused))
        self._by_number[number] = optimizer
        if optimizer.built and optimizer not in self._registered:
            self._register(optimizer, number)
        new, args, state, *rest = keras_hooks.reduced(optimizer)
        return new, args, state | {NUMBER: number}, *rest

    def build(self, number: int, variables: Sequence[keras.Variable]) -> None:
        optimizer = self._by_number[number]
        if not optimizer.built:
            keras_hooks.build_optimizer(optimizer, list(variables))

    def _register(self, optimizer: keras.optimizers.Optimizer, number: int) -> None:
        trained = list(optimizer._trainable_variables)
        self.give(trained)
        homes: dict[str, list[Home]] = {}  # several variables can have the same path
        counts = collections.Counter[tuple[str, str]]()
        for variable in trained:
            home = _home(variable)
            homes.setdefault(variable.path, []).append(home)
            if home.placement.num_shards > 1:
                _check_divided(optimizer, variable)
        for variable in optimizer.variables:
            path = keras_hooks.owner_path(variable)
            owner = next(itertools.islice(homes.get(path, ()), counts[path, variable.name], None), None)
            counts[path, variable.name] += 1
            if owner is not None and tuple(variable.shape) == owner.placement.shape:
                self._move(variable, owner.placement)
            else:
                self._move(variable, Placement(tuple(variable.shape), ((0, 1),), (0,)), is_everywhere=True)
        constraints = {
            key: v.constraint for v in trained if v.constraint for _, key in _home(v).keys_to_read()
        }
        with self.strategy.new_variables.left_out():
            pickled = shipping.dumps((_unbuilt(optimizer), constraints), self.strategy)
        for server, peer in enumerate(self.served.servers):
            header = {
                "optimizer": number,
                "trained": [key for v in trained for key in self._keys(v, server)],
                "undecayed": [
                    key
                    for v in trained
                    if not keras_hooks.decays(optimizer, v)
                    for key in self._keys(v, server)
                ],
                "own": [[v.name, key] for v in optimizer.variables for key in self._keys(v, server)],
            }
            peer.call("optimize", header, [pickled])
        self._registered.add(optimizer)

    def _keys(self, variable: keras.Variable, server: int) -> list[str]:
        home = _home(variable)
        return [key for _, where, key in home.keys_to_write(len(self.served.servers)) if where == server]

    def _move(self, variable: keras.Variable, placement: Placement, is_everywhere: bool = False) -> None:
        """Moves an optimizer variable to the servers that run its updates."""
        record = keras_hooks.record_of(variable)
        if record is not None and record.home == Home(record.home.number, placement, is_everywhere):
            return
        home = Home(self.served.new_number(), placement, is_everywhere)
        if record is None:
            record = Record(self.served, variable, home, keras_hooks.native_value(variable))
            self.served.add(record)
        self.served.hold(record, home)


def _home(variable: keras.Variable) -> Home:
    return keras_hooks.record_of(variable).home


def _check(optimizer: keras.optimizers.Optimizer) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise UnsupportedError(
            "LossScaleOptimizer is not supported, because it needs all gradients, and no server has all of them.",
            received={"optimizer": optimizer.name},
            hint='Use the policy "mixed_bfloat16", or ParameterServerStrategy(synchronous=True).',
        )
    if optimizer.gradient_accumulation_steps and optimizer.global_clipnorm:
        raise UnsupportedError(
            "global_clipnorm cannot be combined with gradient_accumulation_steps, because no server has all "
            "accumulated gradients.",
            received={"global_clipnorm": optimizer.global_clipnorm},
            hint="Use clipvalue, remove gradient_accumulation_steps, or use ParameterServerStrategy(synchronous=True).",
        )


def _check_divided(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> None:
    if optimizer.gradient_accumulation_steps and optimizer.clipnorm:
        raise UnsupportedError(
            "clipnorm cannot be combined with gradient_accumulation_steps and partitioned variables, because no "
            "server has all accumulated gradients of a variable.",
            received={"clipnorm": optimizer.clipnorm, "variable": variable.path},
            hint="Remove variable_partitioner, use clipvalue, or use ParameterServerStrategy(synchronous=True).",
        )
    if keras_hooks.is_elementwise(optimizer):
        return
    raise UnsupportedError(
        "The optimizer does not support partitioned variables, because it does not update each element separately.",
        received={"optimizer": type(optimizer).__name__, "variable": variable.path},
        hint="Remove variable_partitioner, so that each variable stays on one server.",
    )


def _unbuilt(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns an unbuilt copy of an optimizer, without clipping if the workers clip the gradients."""
    state = vars(optimizer)
    described = object.__new__(type(optimizer))
    vars(described).update(state, _learning_rate=0.0)  # a custom schedule may have no `get_config`
    config = described.get_config() | {"learning_rate": keras_hooks.learning_rate(optimizer)}
    if not optimizer.gradient_accumulation_steps:
        config |= dict.fromkeys(("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor"))
    copy = type(optimizer).from_config(config)
    if keras_hooks.is_own(optimizer):  # its `get_config` may omit attributes
        left = state.keys() & vars(copy).keys() - {*config, "built"}
        vars(copy).update({name: state[name] for name in left if isinstance(state[name], _PLAIN)})
    return copy
