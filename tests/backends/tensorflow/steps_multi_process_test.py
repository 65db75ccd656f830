"""Steps on TensorFlow: the number of their traces, their inputs, and functions that replicas call."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.processes import run, strategy

pytestmark = pytest.mark.xdist_group("pool-tensorflow")


def count_traces():
    import keras

    traces = []

    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            traces.append(data[0].shape)
            return super().train_step(data)

    x, y = np.random.randn(38, 3).astype("float32"), np.random.randn(38, 1).astype("float32")
    with strategy(3).scope():
        model = Counting()
        model.compile("sgd", "mse")
    model.fit(x, y, batch_size=16, verbose=0)
    after_fit = len(traces)
    for rows in (38, 7, 2):
        model.fit(x[:rows], y[:rows], batch_size=rows, verbose=0)
    model.fit(x.astype("float64"), y, batch_size=16, verbose=0)
    return after_fit, len(traces), {shape[0] for shape in traces}


def test_a_step_is_traced_once_for_any_number_of_rows():
    # Once per replica, or twice if TensorFlow creates variables in the first trace; not for other sizes.
    ((after_fit, at_the_end, rows),) = run("tensorflow", 1, count_traces)
    assert after_fit in (3, 6)
    assert at_the_end in (after_fit, after_fit + 3)  # Keras may convert float64 to float32 before the step
    assert rows == {None}


def operations_of_a_replica():
    import keras
    import tensorflow as tf

    import kdist

    one = kdist.OneDeviceStrategy("cpu:0")
    with one.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD()
        optimizer.build(model.trainable_variables)

    def step(x):
        _, gradients = kdist.value_and_grad(lambda: tf.reduce_sum(model(x)), model.trainable_variables)()
        optimizer.apply(gradients)

    def run_step(x):
        one.run(step, args=(x,))

    graph = tf.function(run_step).get_concrete_function(tf.ones((4, 3))).graph
    return {operation.type for operation in graph.get_operations()}


@pytest.mark.kills("packed_for_one_replica")
def test_a_single_replica_does_not_copy_its_gradients():
    (types,) = run("tensorflow", 1, operations_of_a_replica)
    assert "ConcatV2" not in types
    assert "MatMul" in types


def convert():
    import numpy as np
    import scipy.sparse
    import tensorflow as tf

    from kdist.backends.tensorflow.steps import as_tensor

    wide = np.arange(24, dtype="float32").reshape(4, 6)
    found = {}
    for name, array in {"whole": wide, "columns": wide[:, ::2], "turned": wide.T, "empty": wide[:0]}.items():
        expected, tensor = array.copy(), as_tensor(array)
        found[name] = (tensor.dtype == array.dtype, np.array_equal(tensor.numpy(), expected))
    tensor = as_tensor(wide)
    wide[:] = -1
    found["its own"] = bool(tf.reduce_all(tensor >= 0))
    big_endian = as_tensor(np.arange(3, dtype=">f4"))
    found["big endian"] = big_endian.numpy().tolist()
    unordered = scipy.sparse.coo_matrix(([5.0, 7.0, 9.0], ([2, 0, 2], [1, 3, 0])), (3, 4))
    sparse = as_tensor(unordered)
    found["sparse"] = np.array_equal(tf.sparse.to_dense(sparse).numpy(), unordered.toarray())
    found["indices"] = sparse.indices.numpy().tolist()
    return found


def test_arrays_of_any_layout_become_tensors_of_their_own():
    (found,) = run("tensorflow", 1, convert)
    for name in ("whole", "columns", "turned", "empty"):
        assert found[name] == (True, True), name
    assert found["its own"]
    assert found["big endian"] == [0.0, 1.0, 2.0]
    assert found["sparse"]
    assert found["indices"] == [[0, 3], [2, 0], [2, 1]]


def call_functions():
    import keras
    import tensorflow as tf

    import kdist

    traces = []

    @tf.function
    def decorated(x):
        traces.append(x.dtype)
        if tf.reduce_sum(x) > 100.0:  # for AutoGraph
            x = -x
        return kdist.get_replica_context().all_reduce("SUM", x)

    mine = strategy(2)

    def values(low):
        return mine.experimental_distribute_values_from_function(
            lambda context: tf.constant([low + context.replica_id_in_sync_group])
        )

    def numbers(result):
        return [float(keras.ops.squeeze(part)) for part in mine.experimental_local_results(result)]

    found = [(numbers(mine.run(decorated, args=(values(low),))), len(traces)) for low in (1.0, 3.0, 101.0)]
    outer = tf.function(lambda v: mine.run(decorated, args=(v,)))
    return found, numbers(outer(values(1.0)))


def test_replicas_call_functions_that_reduce():
    # TensorFlow itself refuses to reduce in a `tf.function` that a replica calls.
    ((found, inside),) = run("tensorflow", 1, call_functions)
    results, traces = zip(*found, strict=True)
    assert results == ([3.0, 3.0], [7.0, 7.0], [-203.0, -203.0])
    assert len(set(traces)) == 1, "the first call has traced it for all"
    assert inside == [3.0, 3.0]  # also in a user's function


def name_devices():
    from kdist.backends import get_backend
    from kdist.errors import DeviceError

    backend = get_backend()
    errors = []
    for names in (["gpu:7"], [f"cpu:{i}" for i in range(9)]):
        try:
            backend.require_devices(names)
            errors.append("")
        except DeviceError as error:
            errors.append(str(error))
    found = backend.require_devices(["/job:localhost/replica:0/task:0/device:CPU:2", "cpu:0"])
    return backend.list_devices("cpu"), found, errors


def test_devices_are_named_as_tensorflow_names_them_and_cannot_be_added_later():
    ((cpus, found, (missing, too_late)),) = run("tensorflow", 1, name_devices)
    assert cpus == ("cpu:0", "cpu:1", "cpu:2")
    assert found == ("cpu:2", "cpu:0")
    assert "gpu:7" in missing and "cpu:2" in missing
    assert "TensorFlow has already started" in too_late


def compiled_by_xla():
    """Returns the number and devices of calls that XLA must compile, for several models, and the logs."""
    import logging

    import keras
    import tensorflow as tf

    found, logged = {}, []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("kdist").addHandler(handler)

    def is_compiled(op):
        return op.type.endswith("PartitionedCall") and b"_XlaMustCompile" in op.node_def.SerializeToString()

    class Counting(keras.Model):
        def __init__(self, synchronized):
            super().__init__()
            self.dense = keras.layers.Dense(4, activation="tanh")
            self.norm = keras.layers.BatchNormalization(synchronized=synchronized)
            self.out = keras.layers.Dense(1)

        def call(self, x, training=False):
            return self.out(self.norm(self.dense(x), training=training))

        def train_step(self, data):
            logs = super().train_step(data)
            operations = tf.compat.v1.get_default_graph().get_operations()
            calls = [op for op in operations if is_compiled(op)]
            found[self.kind] = len(calls), {op.device[-5:] for op in calls}
            return logs

    x, y = np.random.randn(10, 3).astype("float32"), np.random.randn(10, 1).astype("float32")
    for kind, synchronized, options in (
        ("asked", False, {"jit_compile": True}),
        ("auto", False, {}),
        ("sums", True, {"jit_compile": True}),
    ):
        with strategy(2).scope():
            model = Counting(synchronized)
            model.kind = kind
            model.compile("sgd", "mse", **options)
        model.fit(x, y, batch_size=4, verbose=0)
        assert "call" not in vars(model)
    logging.getLogger("kdist").removeHandler(handler)
    return found, logged


@pytest.mark.kills("tensorflow_xla_off")
def test_xla_compiles_forward_and_backward_unless_replicas_sum_in_it():
    ((found, logged),) = run("tensorflow", 1, compiled_by_xla)
    assert found["asked"] == (4, {"CPU:0", "CPU:1"})  # both passes of both replicas
    assert found["auto"][0] == found["sums"][0] == 0
    (warning,) = [line for line in logged if "jit_compile" in line]
    assert "collectives in the forward pass" in warning
