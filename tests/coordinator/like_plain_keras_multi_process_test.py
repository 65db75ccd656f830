"""Scheduled functions give the results of plain Keras: no two are mixed up, writes are exact, and optimizers agree.

One script per backend runs all tasks as threads of one process. The tests check the script's findings.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.processes import each_backend
from tests.helpers.scripts import Script

_SCRIPT = """
import faulthandler
faulthandler.dump_traceback_later(120, exit=True)
import copy, functools, gc, json, threading, weakref
import numpy as np
import keras, kdist
from kdist.testing import free_ports

is_native = keras.backend.backend() == "tensorflow"
places = [f"localhost:{port}" for port in free_ports(4)]
cluster = {"worker": places[:2], "ps": places[2:]}
for job in cluster:
    for index in range(2):
        kdist.Server(cluster, job, index)
spec = kdist.cluster_resolver.ClusterSpec(cluster)
strategy = kdist.ParameterServerStrategy(kdist.cluster_resolver.SimpleClusterResolver(spec))
coordinator = kdist.coordinator.ClusterCoordinator(strategy)
found = {}


def result_of(function, *args):
    return np.array(coordinator.fetch(coordinator.schedule(function, args=args))).tolist()


# Functions and arguments that look alike ----------------------------------------------------------------------
class Times:
    def __init__(self, factor):
        self.factor = factor

    def __repr__(self):
        return "Times()"

    def __call__(self, value):
        return value * self.factor

    def method(self, value):
        return value * self.factor


def call(times, value):
    return times(value)


@functools.wraps(call)
def negative(times, value):
    return -times(value)


two, three, value = Times(2.0), Times(3.0), np.float32(1)
calls = [(two.method,), (three.method,), (call, two), (call, three), (negative, three), (two,)]
found["alike"] = [result_of(*one, value) for one in calls]
copied = copy.copy(two)
copied.factor = 5.0
found["alike"].append(result_of(copied, value))

# Values that are not sums -------------------------------------------------------------------------------------
with strategy.scope():
    numbers = [keras.Variable(np.float32(start), trainable=False) for start in (np.inf, -3e38, 1e10, 3.7)]


def extremes(first, last):
    def replica_fn():
        numbers[0].assign(keras.ops.minimum(numbers[0], 3.5))
        numbers[1].assign(keras.ops.maximum(numbers[1], 3.5))
        numbers[2].assign(0.25)
        first.assign(0.1)

    strategy.run(replica_fn)
    return last


found["returned"] = result_of(extremes, numbers[3], numbers[2])
found["extremes"] = [float(np.array(number)) for number in numbers]


# Optimizers ---------------------------------------------------------------------------------------------------
class Boosted(keras.optimizers.SGD):
    def __init__(self, boost=1.0, **options):
        super().__init__(**options)
        self.boost = boost

    def update_step(self, gradient, variable, rate):
        super().update_step(gradient * self.boost, variable, rate)


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))


gradients = np.random.default_rng(1).normal(size=(4, 2, 3)).astype("float32")


def differences(make, names="ab", missing=()):
    # The second of two variables has no gradient in the missing steps.

    def variables():
        return [keras.Variable(np.ones(3, "float32"), name=name) for name in names]

    def apply(optimizer, variables, *gradients):
        present = [None if one is None else keras.ops.convert_to_tensor(one) for one in gradients]
        optimizer.apply(present, variables)

    plain, alone = variables(), make()
    with strategy.scope():
        served, optimizer = variables(), make()
    found = []
    for number, (first, last) in enumerate(gradients):
        last = None if number in missing else last
        apply(alone, plain, first, last)
        coordinator.schedule(strategy.run, args=(apply, (optimizer, served, first, last)))
        coordinator.join()
        found += [float(np.abs(a.numpy() - b.numpy()).max()) for a, b in zip(served, plain)]
    return found


sgd = functools.partial(keras.optimizers.SGD, 0.1)
average = functools.partial(sgd, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
found["optimizers"] = {}
for name, make, options in [
    ("scale", functools.partial(sgd, loss_scale_factor=4.0, global_clipnorm=1.0), {}),
    ("average", average, {"missing": (1, 3)}),
    ("accumulated", functools.partial(sgd, gradient_accumulation_steps=2), {"missing": (1,)}),
    ("names", functools.partial(sgd, momentum=0.9), {"names": "ww"}),
    ("own", lambda: Boosted(5.0, learning_rate=Falling()), {}),
]:
    try:
        found["optimizers"][name] = max(differences(make, **options))
    except Exception as error:
        found["optimizers"][name] = str(error)

# Models without references ------------------------------------------------------------------------------------
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
known = weakref.ref(model)
del model
gc.collect()
found["freed"] = known() is None

# Batches, of which none is lost when a step builds its optimizer -------------------------------------------------
def batches():
    yield from np.arange(20.0, dtype="float32").reshape(20, 1)


def dataset():
    if not is_native:
        return batches
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(np.stack(list(batches())))


with strategy.scope():
    unbuilt, trained = sgd(), keras.Variable(np.ones(1, "float32"))


def read(iterator, buffer):
    batch = next(iterator)
    strategy.run(lambda: unbuilt.apply([keras.ops.convert_to_tensor(batch)], [trained]))
    return kdist.coordinator.experimental_get_current_worker_index() + 0, batch, buffer["numbers"][0]


iterator, buffer = iter(coordinator.create_per_worker_dataset(dataset)), {"numbers": np.zeros(2)}
results = []
for number in range(12):
    buffer["numbers"][:] = number
    results.append(coordinator.schedule(read, args=(iterator, buffer)))
coordinator.join()
results = [[float(np.squeeze(part)) for part in result] for result in coordinator.fetch(results)]
found["read"] = [sorted(batch for index, batch, _ in results if index == worker) for worker in (0, 1)]
found["passed"] = [number for _, _, number in results]

# A function that needs the result of another ------------------------------------------------------------------
with strategy.scope():
    later, given = sgd(), keras.Variable(np.ones(3, "float32"))


def step(*gradients):
    strategy.run(lambda: later.apply(list(gradients), [given]))
    return 7


# The first function builds the optimizer on the coordinator.
first = coordinator.schedule(step, args=(np.ones(3, "float32"),))
last = coordinator.schedule((lambda: 7) if is_native else lambda: first)
waits = threading.Thread(target=coordinator.join, daemon=True)
waits.start()
waits.join(30)
found["chained"] = "hangs" if waits.is_alive() else int(coordinator.fetch(last))
if found["chained"] == 7:
    coordinator.schedule(step, args=(None,))
    try:
        coordinator.join()
    except ValueError as error:
        found["without gradients"] = str(error)
print("found", json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def found(backend: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    env = {"KERAS_BACKEND": backend}
    return Script(tmp_path_factory.mktemp(backend), "like", _SCRIPT, env).finish().told("found ")


@pytest.mark.kills(
    tensorflow_programs_of_methods_mixed="[tensorflow]",
    tensorflow_programs_of_arguments_mixed="[tensorflow]",
)
@each_backend
def test_functions_and_arguments_that_look_alike_are_not_mixed_up(found: dict[str, Any]) -> None:
    assert found["alike"] == [2, 3, 2, 3, -3, 2, 5]


@pytest.mark.kills(
    servers_add_everything="[torch]",
    tensorflow_servers_add_everything="[tensorflow]",
    tensorflow_results_before_writes="[tensorflow]",
)
@each_backend
def test_values_that_nobody_else_changed_are_exact(found: dict[str, Any]) -> None:
    assert found["extremes"] == [3.5, 3.5, 0.25, float(np.float32(0.1))]
    assert found["returned"] == 0.25


@pytest.mark.kills(
    servers_keep_the_scale_of_losses="[jax]",
    servers_averages_stop="[torch]",
    servers_accumulated_without_gradient="[torch]",
    servers_methods_of_the_strategy="[jax]",
    servers_averages_not_read="[jax]",
    servers_schedules_need_a_config="[torch]",
    servers_same_paths="[jax]",
    servers_lose_own_attributes="[torch]",
    servers_steps_without_gradients="[jax]",
)
@each_backend
def test_optimizers_train_as_without_servers(found: dict[str, Any]) -> None:
    assert found["optimizers"] == pytest.approx(dict.fromkeys(found["optimizers"], 0), abs=1e-5)
    assert found["without gradients"] == "No gradients provided for any variable."


@pytest.mark.kills(servers_keep_trained_models="[torch]")
@each_backend
def test_a_trained_model_can_be_freed(found: dict[str, Any]) -> None:
    assert found["freed"] is True


@pytest.mark.kills(servers_wait_in_the_thread_of_a_worker="[torch]")
@each_backend
def test_a_function_waits_for_the_result_that_it_needs(found: dict[str, Any]) -> None:
    assert found["chained"] == 7


@pytest.mark.kills(servers_batch_lost_by_building="[jax]", servers_arguments_not_copied="[torch]")
@each_backend
def test_steps_get_all_batches_and_their_own_arguments(found: dict[str, Any]) -> None:
    assert found["read"] == [list(range(len(read))) for read in found["read"]]
    assert sum(map(len, found["read"])) == 12
    assert found["passed"] == list(range(12))
