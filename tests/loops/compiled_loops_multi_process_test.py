"""Datasets in compiled functions: `next(iterator)`, `for batch in dataset`, and the end of data."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from tests.helpers.processes import BACKENDS, strategy
from tests.loops.clusters import each_cluster, each_cluster_of, number_of, numpy_of, on_workers
from tests.loops.datasets import LEARNING_RATE, STEPS, by_hand, dataset_of

KINDS = {
    "tensorflow": ("tf.data", "generator", "function"),
    "jax": ("PyDataset", "generator", "function"),
    "torch": ("DataLoader", "PyDataset", "function"),
}


# Forms of loops ---------------------------------------------------------------------------------------------


class Training:
    """Gradient descent by hand under a strategy; `calls` counts the Python calls of `step`."""

    def __init__(self, s):
        import keras

        self.strategy = s
        self.calls = []
        self.epoch = None
        self.in_graph = keras.backend.backend() == "tensorflow"
        with s.scope():
            self.w = keras.Variable(np.zeros(3, "float32"))
            self.steps = keras.Variable(0, dtype="int32", trainable=False, aggregation="only_first_replica")
            self.optimizer = keras.optimizers.SGD(LEARNING_RATE)
            self.optimizer.build([self.w])

    def replica_step(self, x, y):
        ops = self._ops()
        number = ops.cast(ops.shape(x)[0], "float32")
        total = kdist.get_replica_context().all_reduce("SUM", number)
        # This uses the batch. Otherwise, a graph would not wait for a batch, and would also count at the end.
        self.steps.assign_add(ops.cast(ops.minimum(total, 1.0), "int32"))

        def loss_fn():
            return ops.sum(ops.square(ops.matmul(x, self.w) - y)) / total / 2

        loss, gradients = kdist.value_and_grad(loss_fn, [self.w])()
        self.optimizer.apply(gradients, [self.w])
        return loss

    def step(self, batch):
        self.calls.append("step")
        losses = self.strategy.run(self.replica_step, args=batch)
        return self.strategy.reduce("SUM", losses, axis=None)

    def _ops(self):
        import keras

        return keras.ops


def eager(training, dataset, function):
    return [training.step(batch) for batch in dataset]


def compiled_batches(training, dataset, function):
    step = function(training.step)
    return [step(batch) for batch in dataset]


def passed_iterator(training, dataset, function):
    begun = []

    @function
    def train_step(iterator):
        begun.append("step")
        return training.step(next(iterator))

    iterator = iter(dataset)
    losses = [train_step(iterator) for _ in range(STEPS)]
    with pytest.raises(end_in(function)):
        train_step(iterator)
    assert len(begun) == STEPS + 1 or training.in_graph, "what a step does is done once"
    with pytest.raises(StopIteration):
        next(iterator)
    return losses


def seen_iterator(training, dataset, function):
    iterator = iter(dataset)
    first = training.step(next(iterator))  # the function does not read this batch again

    @function
    def train_step():
        return training.step(iterator.get_next())

    losses = [first, *(train_step() for _ in range(STEPS - 1))]
    with pytest.raises(end_in(function)):
        train_step()
    return losses


def loop_over_dataset(training, dataset, function, step=None):
    step = step or training.step
    if training.epoch is None:  # the second epoch uses the same compiled function

        @function
        def epoch(dataset):
            ops = training._ops()
            losses = ops.zeros(STEPS)
            for batch in dataset:
                losses = ops.concatenate([losses[1:], ops.reshape(step(batch), (1,))])
            return losses

        training.epoch = epoch
    return list(numpy_of(training.epoch(dataset)))


def loop_of_compiled_steps(training, dataset, function):
    return loop_over_dataset(training, dataset, function, function(training.step))


def loop_over_iterator(training, dataset, function):
    iterator = iter(dataset)
    first = training.step(next(iterator))

    @function
    def rest(iterator):
        total = training.step(next(iterator))  # the loop continues after this batch
        for batch in iterator:
            total = total + training.step(batch)
        return total

    return [first, rest(iterator)]


FORMS = (
    eager,
    compiled_batches,
    passed_iterator,
    seen_iterator,
    loop_over_dataset,
    loop_over_iterator,
    loop_of_compiled_steps,
)


FORMS_OF_TENSORFLOW = FORMS[:-1]  # a graph in a loop of another graph cannot write variables of replicas


def end_in(function):
    if function is kdist.function:
        return kdist.errors.OutOfRangeError
    import tensorflow as tf

    return tf.errors.OutOfRangeError


def in_worker_forms(num_replicas, kinds, functions):
    import keras

    s = strategy(num_replicas)
    found = {}
    for kind in kinds:
        for name in functions:
            function = kdist.function
            if name == "tf.function":
                import tensorflow as tf

                function = tf.function
            for form in FORMS if function is kdist.function else FORMS_OF_TENSORFLOW:
                training, dataset = Training(s), dataset_of(kind, s)
                losses = [form(training, dataset, function) for _ in range(2)]  # two epochs
                losses = [np.asarray(keras.ops.convert_to_numpy(x)) for epoch in losses for x in epoch]
                result = numpy_of(training.w.value), number_of(training.steps), losses, len(training.calls)
                found[kind, name, form.__name__] = result
    return found


@pytest.mark.kills(
    function_does_not_see_the_end="[2-replicas-on-1-tensorflow]",
    function_in_a_function_is_separate="[2-replicas-on-1-tensorflow]",
    function_loops_go_on_with_the_first_pass="[2-replicas-on-1-tensorflow]",
    jax_function_traced_first="[3-replicas-on-1-jax]",
)
@each_cluster
def test_every_form_of_the_loop(backend, num_workers, num_replicas):
    check_forms(backend, num_workers, num_replicas, KINDS[backend], ["kdist.function"])


@each_cluster_of("tensorflow")
def test_every_form_of_the_loop_in_a_tf_function(backend, num_workers, num_replicas):
    check_forms(backend, num_workers, num_replicas, ["tf.data"], ["tf.function"])


def in_worker_nested(num_replicas):
    """Calls compiled functions in compiled functions: with options, and with a loop over a dataset."""
    import tensorflow as tf

    s = strategy(num_replicas)

    @kdist.function(autograph=True)
    def doubled(x):
        if tf.reduce_sum(x) > 0:  # AutoGraph compiles the branch
            return x * 2
        return x * 3

    @kdist.function(input_signature=[tf.TensorSpec((), "float32")])
    def converted(x):
        return tf.zeros((), x.dtype) + x

    def new_epoch():
        @kdist.function
        def epoch(dataset):
            total = 0.0
            for batch in dataset:
                total += s.reduce("SUM", s.run(tf.reduce_sum, (batch,)), axis=None)
            return total

        return epoch

    epochs = [new_epoch() for _ in range(3)]

    @kdist.function(autograph=True)
    def twice(dataset):
        total = 0.0
        for _ in tf.range(2):
            total += epochs[2](dataset)
        return total

    rows = tf.data.Dataset.from_tensor_slices(np.arange(8, dtype="float32")).batch(2)
    dataset = s.experimental_distribute_dataset(rows)
    found = [float(doubled(tf.constant(sign))) for sign in (1.0, -1.0)]
    for function in (kdist.function, tf.function):
        outer = function(lambda x: doubled(x) + 1)
        found += [float(outer(tf.constant(sign))) for sign in (1.0, -1.0)]
    mapped = tf.data.Dataset.from_tensor_slices(np.array([1, -1], "float32")).map(doubled)
    found += [float(x) for x in mapped]
    found += [
        float(kdist.function(lambda d: epochs[0](d))(dataset)),
        float(tf.function(lambda d: epochs[1](d))(dataset)),
    ]
    found.append(float(kdist.function(lambda: converted(7))()))
    return [*found, float(twice(dataset))]


def in_worker_tensors(num_replicas):
    """Loops over a tensor, and branches on one, also in a replica."""
    import tensorflow as tf

    s = strategy(num_replicas)

    def positive_sum(x):
        if tf.reduce_sum(x) < 8:
            return tf.zeros((), x.dtype)
        return tf.reduce_sum(x)

    @kdist.function
    def two_steps(iterator):
        total = 0.0
        for _ in tf.range(3):
            batch = iterator.get_next_as_optional()
            if not batch.has_value():
                break
            total += s.reduce("SUM", s.run(positive_sum, (batch.get_value(),)), axis=None)
        return total

    rows = tf.data.Dataset.from_tensor_slices(np.arange(40, dtype="float32")).batch(8)
    iterator = iter(s.experimental_distribute_dataset(rows))
    return [float(two_steps(iterator)) for _ in range(3)]


@pytest.mark.kills(function_without_autograph_for_tensors="[2-replicas-on-1-tensorflow]")
@each_cluster_of("tensorflow")
def test_python_control_flow_on_tensors(backend, num_workers, num_replicas):
    first = sum(part.sum() for part in np.array_split(np.arange(8), num_replicas) if part.sum() >= 8)
    for found in on_workers(backend, num_workers, num_replicas, in_worker_tensors):
        assert found == [first + sum(range(8, 24)), sum(range(24, 40)), 0]


@pytest.mark.kills("nested_function_loses_its_options")
@each_cluster_of("tensorflow")
def test_compiled_functions_in_compiled_functions(backend, num_workers, num_replicas):
    for found in on_workers(backend, num_workers, num_replicas, in_worker_nested):
        assert found == [2, -3, 3, -2, 3, -2, 2, -3, 28, 28, 7, 56]


def check_forms(backend, num_workers, num_replicas, kinds, functions):
    w, losses = by_hand(2 * STEPS)
    first, second = losses[:STEPS], losses[STEPS:]
    for found in on_workers(backend, num_workers, num_replicas, in_worker_forms, kinds, functions):
        forms = FORMS if functions == ["kdist.function"] else FORMS_OF_TENSORFLOW
        assert len(found) == len(forms) * len(kinds)
        for (kind, _, form), (found_w, steps, found_losses, calls) in found.items():
            message = f"{kind} {form}"
            np.testing.assert_allclose(found_w, w, rtol=1e-5, err_msg=message)
            assert steps == 2 * STEPS, message
            expected = losses
            if form == "loop_over_iterator":
                expected = [first[0], sum(first[1:]), second[0], sum(second[1:])]
            np.testing.assert_allclose(found_losses, expected, rtol=1e-5, err_msg=message)
            if backend != "tensorflow" or form == "eager":
                assert calls == 2 * STEPS, f"{message}: what a step does is done once"
            elif form in ("loop_over_dataset", "loop_of_compiled_steps"):
                assert calls <= 4, f"{message}: a loop of the graph, however long"


def test_every_backend_has_kinds():
    assert set(KINDS) == set(BACKENDS)
