"""Arguments of a wrong type or out of range raise an error of kdist with a hint, before anything happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.data import make_data
from tests.helpers.models import network
from tests.helpers.processes import each_backend, run, strategy

NAN = float("nan")
NUMBERS = ("64", None, NAN, -1, True, [64])


def calls(folder: str) -> dict[str, tuple[Callable[[Any], object], tuple[Any, ...]]]:
    """Returns the calls: their function of one value, and the wrong values."""
    import kdist
    from kdist import callbacks, experimental

    model, (x, y) = network(2, 1, scope=strategy().scope()), make_data(8)
    checkpoint = kdist.Checkpoint(model=model)
    spec = kdist.cluster_resolver.ClusterSpec({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]})
    resolver = kdist.cluster_resolver.SimpleClusterResolver(spec, task_type="chief", task_id=0)

    def fit(name: str) -> Callable[[Any], object]:
        return lambda value: model.fit(x, y, verbose=0, **{name: value})

    number, optional = NUMBERS, tuple(value for value in NUMBERS if value is not None)
    names = (4, 2.5, "cpu:0", [], [0], {"cpu:0"}, object())
    return {
        "MirroredStrategy(devices)": (kdist.MirroredStrategy, names),
        "MultiWorkerMirroredStrategy(devices)": (
            lambda value: kdist.MultiWorkerMirroredStrategy(devices=value),
            names,
        ),
        "CentralStorageStrategy(compute_devices)": (experimental.CentralStorageStrategy, names),
        "CommunicationOptions(bytes_per_pack)": (experimental.CommunicationOptions, number),
        "CommunicationOptions(timeout_seconds)": (
            lambda value: experimental.CommunicationOptions(timeout_seconds=value),
            (*optional, 0),
        ),
        "NcclAllReduce(num_packs)": (kdist.NcclAllReduce, number),
        "InputOptions(experimental_per_replica_buffer_size)": (
            lambda value: kdist.InputOptions(experimental_per_replica_buffer_size=value),
            number,
        ),
        "ParameterServerStrategy(timeout)": (
            lambda value: kdist.ParameterServerStrategy(resolver, timeout=value),
            (*number, 0),
        ),
        "CheckpointManager(keep_checkpoint_every_n_hours)": (
            lambda value: kdist.CheckpointManager(checkpoint, folder, 2, value),
            (*optional, 0),
        ),
        "CheckpointManager(max_to_keep)": (
            lambda value: kdist.CheckpointManager(checkpoint, folder, value),
            (*optional, 0),
        ),
        "BackupAndRestore(every_seconds)": (
            lambda value: callbacks.BackupAndRestore(folder, every_seconds=value),
            (*optional, 0),
        ),
        "DriftWatch(every)": (callbacks.DriftWatch, (*number, 0)),
        "TerminationConfig(grace_period)": (
            lambda value: experimental.TerminationConfig(grace_period=value),
            optional,
        ),
        "TerminationConfig(exit_fn)": (lambda value: experimental.TerminationConfig(exit_fn=value), (True,)),
        "barrier(timeout)": (lambda value: kdist.barrier("b", value), (*optional, 0)),
        "fit(batch_size)": (fit("batch_size"), (*optional, 0, 4.0)),
        "fit(epochs)": (fit("epochs"), number),
        "fit(initial_epoch)": (fit("initial_epoch"), number),
        "evaluate(batch_size)": (
            lambda value: model.evaluate(x, y, batch_size=value, verbose=0),
            (*optional, 0),
        ),
        "predict(batch_size)": (lambda value: model.predict(x, batch_size=value, verbose=0), (*optional, 0)),
        "distribute_datasets_from_function(dataset_fn)": (
            lambda value: strategy().distribute_datasets_from_function(value),
            ([1], None),
        ),
        "launch(timeout)": (lambda value: kdist.launch(abs, timeout=value), (*optional, 0)),
    }


def wrong_arguments(folder: str) -> list[str]:
    """Returns the calls that did not raise kdist's error with the name of the argument and a hint."""
    from kdist.errors import InvalidArgumentError

    missed = []
    for name, (function, values) in calls(folder).items():
        argument = name.partition("(")[2].rstrip(")")
        for value in values:
            said: object = "no error"
            try:
                function(value)
            except InvalidArgumentError as error:
                if f"`{argument}`" in str(error) and argument in error.received and error.hint:
                    continue
                said = error
            except Exception as error:
                said = repr(error)
            missed.append(f"{name} with {value!r}: {said}")
    return missed


@pytest.mark.kills(
    devices_of_any_type="[jax]",
    nan_is_a_time="[torch]",
    text_is_a_whole_number="[torch]",
    termination_function_not_checked="[torch]",
    dataset_taken_for_a_function="[torch]",
    batch_size_of_any_type="[jax]",
    epochs_of_any_type="[jax]",
)
@each_backend
def test_wrong_arguments_raise_an_error_with_a_hint(backend: str, tmp_path: Any) -> None:
    assert run(backend, 1, wrong_arguments, str(tmp_path), timeout=120) == [[]]


def numpy_arguments() -> int:
    import numpy as np

    import kdist

    model, (x, y) = network(2, 1, scope=strategy().scope()), make_data(8)
    kdist.experimental.CommunicationOptions(np.int64(4), np.float32(2.5))
    history = model.fit(x, y, batch_size=np.int64(4), epochs=np.int32(2), verbose=0)
    return len(history.epoch)


@each_backend
def test_numbers_of_numpy_are_numbers(backend: str) -> None:
    assert run(backend, 1, numpy_arguments) == [2]
