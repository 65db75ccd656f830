"""The script of `promises_multi_process_test.py`: a whole job with parameter servers in one process."""

from __future__ import annotations

SCRIPT = """
import faulthandler
faulthandler.dump_traceback_later(150, exit=True)
import contextlib, gc, json, logging, sys, threading, time
import numpy as np
import keras, kdist
from kdist import keras_hooks
from kdist.control import waiting
from kdist.testing import free_ports

found = {}
is_native = keras.backend.backend() == "tensorflow"
ports = free_ports(6)
places = [f"localhost:{port}" for port in ports]
cluster = {"worker": places[:3], "ps": places[3:5]}
for job, index in [("worker", 0), ("worker", 1), ("worker", 2), ("ps", 0), ("ps", 1)]:
    kdist.Server(cluster, job, index)


def resolver(cluster, **task):
    spec = kdist.cluster_resolver.ClusterSpec(cluster)
    return kdist.cluster_resolver.SimpleClusterResolver(spec, **task)


def error(name, function, *args, **kwargs):
    began = time.monotonic()
    try:
        function(*args, **kwargs)
        found[name] = "no error"
    except Exception as raised:
        found[name] = f"{type(raised).__name__}: {raised}"
    found[name + " seconds"] = time.monotonic() - began


# Clusters that cannot be --------------------------------------------------------------------------------------
make = lambda cluster, **task: kdist.ParameterServerStrategy(resolver(cluster, **task), timeout=1)
error("no worker", make, {"ps": places[3:5]})
error("no server", make, {"worker": places[:3]})
error("two chiefs", make, cluster | {"chief": ["localhost:1", "localhost:2"]})
error("a worker's strategy", make, cluster, task_type="worker", task_id=1)
error("a server's strategy", make, cluster, task_type="ps", task_id=0)
found["waits"] = []
handler = logging.Handler()
handler.emit = lambda record: found["waits"].append(record.getMessage())
logging.getLogger("kdist").addHandler(handler)
waiting._FIRST = 0.3
if not is_native:  # which connects a process to one cluster
    from kdist.coordinator import grpc_coordination

    grpc_coordination._LOOK = 0.2
    error("a worker that never comes", make, {"worker": [*places[:3], places[5]], "ps": places[3:5]})
    error("a server that never comes", make, {"worker": places[:3], "ps": places[4:6]})
error("a wrong job", kdist.Server, cluster, "chief", 0)
error("a wrong index", kdist.Server, cluster, "worker", 3)
error("a wrong protocol", kdist.Server, cluster, "worker", 0, protocol="http")
error("a port that is taken", kdist.Server, {"worker": places[3:4]}, "worker", 0)
error("a partitioner that is none", kdist.ParameterServerStrategy, resolver(cluster), 2)
error("a staleness below zero", kdist.ParameterServerStrategy, resolver(cluster), max_staleness=-1)

# Staleness, and each closure once -----------------------------------------------------------------------------
strategy = kdist.ParameterServerStrategy(
    resolver(cluster), kdist.experimental.partitioners.FixedShardsPartitioner(2), max_staleness=1
)
found["repr"] = repr(strategy)
coordinator = kdist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weights = keras.Variable(np.zeros((5, 3), "float32"), name="weights")
    counter = keras.Variable(0, dtype="int32", trainable=False)
    optimizer = keras.optimizers.SGD(1.0)


@kdist.function
def step(slope):
    def replica_fn():
        value, gradients = kdist.value_and_grad(lambda: keras.ops.sum(weights * slope), [weights])()
        optimizer.apply(gradients, [weights])
        counter.assign_add(1)
        return value

    return strategy.run(replica_fn)


slopes = np.random.default_rng(0).integers(-3, 4, (90, 5, 3)).astype("float32")
results = [coordinator.schedule(step, args=(slope,)) for slope in slopes]
coordinator.join()
found["weights differ by"] = float(np.abs(np.array(weights) + slopes.sum(axis=0)).max())
found["counted"] = int(np.array(counter))
found["iterations"] = int(optimizer.iterations)
found["values"] = len(coordinator.fetch(results))
found["done"] = coordinator.done()

# Closures meet in this process: each waits until others run beside it -----------------------------------------
barriers = {number: threading.Barrier(number, timeout=15) for number in (2, 3)}


def meet(number, value):
    # Returns the value once so many closures have come here.

    def wait(value):
        sys.modules["__main__"].barriers[number].wait()
        return value

    if not is_native:
        return wait(value)
    import tensorflow as tf

    return tf.ensure_shape(tf.numpy_function(wait, [value], value.dtype), value.shape)


def results_of(number, function, *args):
    try:
        results = [coordinator.schedule(function, args=args) for _ in range(number)]
        coordinator.join()
        return sorted(np.array(result).tolist() for result in coordinator.fetch(results))
    except Exception as raised:
        with contextlib.suppress(Exception):
            coordinator.join()  # for the errors of those that still ran
        return f"{type(raised).__name__}: {raised}"


with strategy.scope():
    updates = keras.Variable(0, dtype="int32", trainable=False)


def update():
    found = meet(2, updates + 0)
    strategy.run(lambda: updates.assign_add(1))
    return found


found["updates found"] = results_of(12, update)
found["updates"] = int(np.array(updates))
# From here on, all workers run beside each other.
strategy.coordination.closures._staleness._most = None


# Values of the workers' own -----------------------------------------------------------------------------------
def dataset_fn():
    import tensorflow as tf

    index = kdist.coordinator.experimental_get_current_worker_index()
    return tf.data.Dataset.from_tensors(np.int32(10 + int(index))).repeat()


values = iter(coordinator.create_per_worker_dataset(dataset_fn))


def read(iterator):
    index = kdist.coordinator.experimental_get_current_worker_index()
    return meet(3, keras.ops.stack([keras.ops.convert_to_tensor(index), next(iterator)]))


found["read"] = results_of(9, read, values)
error("iterating here", next, values)


def kind(iterator):
    element = next(iterator)
    return keras.ops.is_tensor(element), keras.ops.sum(element + keras.ops.ones((2,)))


def pairs():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(np.arange(8, dtype="float32")).batch(2).repeat()


def kinds(dataset):
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    results = coordinator.fetch([coordinator.schedule(kind, args=(iterator,)) for _ in range(4)])
    return [(bool(is_tensor), float(total)) for is_tensor, total in results]


found["kinds"] = kinds(pairs)
if not is_native:
    from kdist.coordinator.worker import Task

    for _ in range(20):
        kinds(pairs)
    tasks = [one for one in gc.get_objects() if type(one) is Task]
    found["kept values"] = [len(strategy.coordination._own), *(len(task.own_values) for task in tasks)]
    found["kinds of a list"] = kinds([np.arange(i, i + 2, dtype="float32") for i in range(0, 8, 2)] * 4)

# Draws differ -------------------------------------------------------------------------------------------------
with strategy.scope():
    dropout = keras.layers.Dropout(0.5, seed=3)


def draw():
    return meet(3, strategy.run(lambda: dropout(keras.ops.ones((64,)), training=True)))


found["draws"] = results_of(30, draw)

# Functions that cannot be -------------------------------------------------------------------------------------
def fails():
    raise ValueError("an error of its own")


def scheduled(*args, **kwargs):
    coordinator.schedule(*args, **kwargs)
    coordinator.join()


def fails_as_dataset():
    scheduled(read, args=(iter(coordinator.create_per_worker_dataset(fails)),))


outside = keras.Variable(np.ones(2, "float32"), name="outside")


def step_outside():
    def replica_fn():
        optimizer.apply([np.ones(2, "float32")], [outside])

    return strategy.run(replica_fn)


lock = threading.Lock()


def locked():
    with lock:
        return 1


def alive(name):
    try:
        found[name + ", then"] = int(np.array(coordinator.fetch(coordinator.schedule(lambda: 7))))
    except Exception as raised:
        found[name + ", then"] = str(raised)


error("no function", coordinator.schedule, 7)
error("no strategy", kdist.coordinator.ClusterCoordinator, kdist.OneDeviceStrategy("cpu:0"))
error("no current worker", kdist.coordinator.experimental_get_current_worker_index)
error("a function that raises", scheduled, fails)
alive("a function that raises")
if not is_native:
    error("what cannot be pickled", scheduled, locked)
    alive("what cannot be pickled")
    error("a result that cannot be pickled", scheduled, threading.Lock)
    error("variables from outside", scheduled, step_outside)
    alive("variables from outside")

    def clipped(**options):
        with strategy.scope():
            divided = keras.Variable(np.zeros((4, 2), "float32"), name="divided")
            sgd = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2, **options)
        scheduled(lambda: strategy.run(lambda: sgd.apply([np.ones((4, 2), "float32")], [divided])))

    error("a norm of one variable's parts", clipped, clipnorm=1.0)
    error("a norm of all variables", clipped, global_clipnorm=1.0)
    alive("a norm of all variables")

if not is_native:
    # What nobody here knows any more is on no server.
    with strategy.scope():
        gone = keras.Variable(np.ones(3, "float32"))
    (place, key), *_ = keras_hooks.record_of(gone).home.keys_to_read()
    held = {"keys": [key], "versions": [-1]}
    found["held"] = len(strategy.coordination.served.servers[place].call("pull", held)[0]["versions"])
    del gone
    gc.collect()
    alive("what is gone")
    error("what is gone", strategy.coordination.served.servers[place].call, "pull", held)


def with_partitioner(answer):
    strategy._partitioner = lambda shape, dtype: answer
    if not is_native:
        strategy.coordination._partitioner = strategy._partitioner
    else:
        strategy.coordination.placement._partitioner = strategy._partitioner
    with strategy.scope():
        keras.Variable(np.ones((4, 2), "float32"))


error("no shards", with_partitioner, [0, 1])
error("no list", with_partitioner, 2)

error("a dataset that raises", fails_as_dataset)
for number in range(6):  # on each of the three workers
    alive(f"a dataset that raises {number}")
if not is_native:
    # A coordinator that comes later has the cluster.
    all_begun = threading.Event()

    def late():
        sys.modules["__main__"].all_begun.wait(30)
        strategy.run(lambda: updates.assign_add(1))

    began_before = coordinator.schedule(late)
    second = kdist.ParameterServerStrategy(resolver(cluster))
    with second.scope():
        another = keras.Variable(np.ones(3, "float32"))
    of_second = kdist.coordinator.ClusterCoordinator(second)
    error("all workers", lambda: [of_second.schedule(meet, args=(3, 1)) for _ in range(3)] and of_second.join())
    all_begun.set()
    error("a function of the first that ends later", began_before.fetch)
    error("the first of two coordinators", scheduled, step, args=(slopes[0],))
    found["the second of two"] = of_second.fetch(of_second.schedule(lambda: float(keras.ops.sum(another))))
    together = kdist.ParameterServerStrategy(resolver(cluster), synchronous=True)
    with together.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    error("synchronous in one process", model.fit, np.ones((6, 3)), np.ones((6, 1)), verbose=0)
print("found", json.dumps(found), flush=True)
"""
