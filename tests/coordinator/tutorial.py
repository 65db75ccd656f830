"""TensorFlow's tutorial on parameter servers, ported from `tf.distribute` to `kdist` as a user would do it.

It keeps the order and the names. Comments explain each change, which Keras 3 or another backend requires.
In a task of `TF_CONFIG`, it follows the tutorial's last part ("clusters in the real world"). Otherwise, it
starts a cluster of threads.
"""

# ruff: noqa: B905, UP031
import json
import os
import random

import keras
import tensorflow as tf  # for the tutorial's data

import kdist
from kdist.testing import free_ports

keras.utils.set_random_seed(1)
found = {}


# The cluster ------------------------------------------------------------------------------------------------------


def create_in_process_cluster(num_workers, num_ps):
    """Starts servers in this process; returns their resolver."""
    ports = free_ports(num_workers + num_ps)  # originally portpicker
    cluster_dict = {"worker": [f"localhost:{port}" for port in ports[:num_workers]]}
    if num_ps > 0:
        cluster_dict["ps"] = [f"localhost:{port}" for port in ports[num_workers:]]

    cluster_spec = tf.train.ClusterSpec(cluster_dict)

    worker_config = tf.compat.v1.ConfigProto()
    worker_config.inter_op_parallelism_threads = num_workers + 1

    for i in range(num_workers):
        kdist.Server(cluster_spec, job_name="worker", task_index=i, config=worker_config, protocol="grpc")

    for i in range(num_ps):
        kdist.Server(cluster_spec, job_name="ps", task_index=i, protocol="grpc")

    return kdist.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


os.environ["GRPC_FAIL_FAST"] = "use_caller"

if "TF_CONFIG" in os.environ:
    cluster_resolver = kdist.cluster_resolver.TFConfigClusterResolver()
    if cluster_resolver.task_type in ("worker", "ps"):
        server = kdist.Server(
            cluster_resolver.cluster_spec(),
            job_name=cluster_resolver.task_type,
            task_index=cluster_resolver.task_id,
            protocol=cluster_resolver.rpc_layer or "grpc",
            start=True,
        )
        server.join()
else:
    NUM_WORKERS = 3
    NUM_PS = 2
    cluster_resolver = create_in_process_cluster(NUM_WORKERS, NUM_PS)

variable_partitioner = kdist.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=(256 << 10), max_shards=2
)

strategy = kdist.ParameterServerStrategy(cluster_resolver, variable_partitioner=variable_partitioner)


# Training with Model.fit ------------------------------------------------------------------------------------------

global_batch_size = 64

x = tf.random.uniform((10, 10))
y = tf.random.uniform((10, 1))  # originally (10,), which the loss of Keras 2 turned into a column

dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat()
dataset = dataset.batch(global_batch_size)
dataset = dataset.prefetch(2)

with strategy.scope():
    model = keras.models.Sequential([keras.layers.Dense(10)])

    # Originally optimizers.legacy.SGD.
    model.compile(keras.optimizers.SGD(), loss="mse", steps_per_execution=10)

working_dir = "my_working_dir"  # originally below /tmp
log_dir = os.path.join(working_dir, "log")
ckpt_filepath = os.path.join(working_dir, "ckpt.keras")  # Keras 3 requires the suffix
backup_dir = os.path.join(working_dir, "backup")

callbacks = [
    keras.callbacks.TensorBoard(log_dir=log_dir),
    keras.callbacks.ModelCheckpoint(filepath=ckpt_filepath),
    keras.callbacks.BackupAndRestore(backup_dir=backup_dir),
]

history = model.fit(dataset, epochs=5, steps_per_epoch=20, callbacks=callbacks, verbose=2)
found["losses"] = history.history["loss"]
found["steps"] = int(model.optimizer.iterations)
found["files"] = sorted(os.listdir(working_dir))


# Training with a custom training loop -----------------------------------------------------------------------------

feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
label_vocab = ["yes", "no"]

with strategy.scope():
    feature_lookup_layer = keras.layers.StringLookup(vocabulary=feature_vocab, mask_token=None)
    label_lookup_layer = keras.layers.StringLookup(vocabulary=label_vocab, num_oov_indices=0, mask_token=None)

    # Originally functional models around both layers. In Keras 3 they take only batches; the pipeline maps rows.
    feature_preprocess_stage, label_preprocess_stage = feature_lookup_layer, label_lookup_layer


def feature_and_label_gen(num_examples=192):  # originally 200, but then the last batch of 32 has fewer rows
    examples = {"features": [], "label": []}
    for _ in range(num_examples):
        features = random.sample(feature_vocab, 3)
        label = ["yes"] if "avenger" in features else ["no"]
        examples["features"].append(features)
        examples["label"].append(label)
    return examples


examples = feature_and_label_gen()


def dataset_fn(_):
    raw_dataset = tf.data.Dataset.from_tensor_slices(examples)

    train_dataset = (
        raw_dataset.map(
            lambda x: (
                {"features": feature_preprocess_stage(x["features"])},
                label_preprocess_stage(x["label"]),
            )
        )
        .shuffle(200)
        .batch(32)
        .repeat()
    )
    return train_dataset


with strategy.scope():
    model_input = keras.layers.Input(shape=(3,), dtype="int64", name="model_input")

    emb_layer = keras.layers.Embedding(input_dim=len(feature_lookup_layer.get_vocabulary()), output_dim=16384)
    emb_output = keras.ops.mean(emb_layer(model_input), axis=1)
    dense_output = keras.layers.Dense(units=1, activation="sigmoid")(emb_output)
    model = keras.Model({"features": model_input}, dense_output)

    # Originally 0.1, which makes the sigmoid 0 or 1. Keras then has no gradient on JAX and PyTorch, even
    # without kdist. With stale variables, even 0.01 is too high.
    optimizer = keras.optimizers.RMSprop(learning_rate=0.003)
    accuracy = keras.metrics.Accuracy()

# Originally, `emb_layer.weights` were two shards. Keras 3 has one variable, and layers do not see its shards.
assert len(emb_layer.weights) == 1
assert emb_layer.weights[0].shape == (8, 16384)


@kdist.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        def loss_fn():  # originally: with tf.GradientTape() as tape
            pred = model(batch_data, training=True)
            per_example_loss = keras.losses.BinaryCrossentropy(reduction="none")(labels, pred)
            loss = kdist.nn.compute_average_loss(per_example_loss)
            model_losses = model.losses
            if model_losses:
                loss += kdist.nn.scale_regularization_loss(sum(model_losses))
            return loss, pred

        (loss, pred), gradients = kdist.value_and_grad(loss_fn, model.trainable_variables, has_aux=True)()

        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        actual_pred = keras.ops.cast(keras.ops.greater(pred, 0.5), "int64")
        accuracy.update_state(labels, actual_pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(kdist.ReduceOp.SUM, losses, axis=None)


coordinator = kdist.coordinator.ClusterCoordinator(strategy)


@kdist.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)

num_epochs = 4
steps_per_epoch = 5
found["accuracies"] = []
for i in range(num_epochs):
    accuracy.reset_state()  # Keras 3 has removed reset_states
    for _ in range(steps_per_epoch):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    # Wait at epoch boundaries.
    coordinator.join()
    print("Finished epoch %d, accuracy is %f." % (i, float(accuracy.result())), flush=True)
    found["accuracies"].append(float(accuracy.result()))
    found["rows"] = int(float(keras.ops.convert_to_numpy(accuracy.count)))

loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
print("Final loss is %f" % loss.fetch())
found["loss"] = float(loss.fetch())
found["loop steps"] = int(optimizer.iterations)


# Evaluation -------------------------------------------------------------------------------------------------------

eval_dataset = (
    tf.data.Dataset.from_tensor_slices(feature_and_label_gen(num_examples=16))
    .map(
        lambda x: (
            {"features": feature_preprocess_stage(x["features"])},
            label_preprocess_stage(x["label"]),
        )
    )
    .batch(8)
)

eval_accuracy = keras.metrics.Accuracy()

for batch_data, labels in eval_dataset:
    batch_data, labels = keras.tree.map_structure(keras.ops.convert_to_tensor, (batch_data, labels))
    pred = model(batch_data, training=False)
    actual_pred = keras.ops.cast(keras.ops.greater(pred, 0.5), "int64")
    eval_accuracy.update_state(labels, actual_pred)

print("Evaluation accuracy: %f" % float(eval_accuracy.result()))
found["direct"] = float(eval_accuracy.result())

with strategy.scope():
    # Define the eval metric on parameter servers.
    eval_accuracy = keras.metrics.Accuracy()


@kdist.function
def eval_step(iterator):
    def replica_fn(batch_data, labels):
        pred = model(batch_data, training=False)
        actual_pred = keras.ops.cast(keras.ops.greater(pred, 0.5), "int64")
        eval_accuracy.update_state(labels, actual_pred)

    batch_data, labels = next(iterator)
    strategy.run(replica_fn, args=(batch_data, labels))


def eval_dataset_fn():
    return (
        tf.data.Dataset.from_tensor_slices(feature_and_label_gen(num_examples=16))
        .map(
            lambda x: (
                {"features": feature_preprocess_stage(x["features"])},
                label_preprocess_stage(x["label"]),
            )
        )
        .repeat()
        .batch(8)
    )


per_worker_eval_dataset = coordinator.create_per_worker_dataset(eval_dataset_fn)
per_worker_eval_iterator = iter(per_worker_eval_dataset)

eval_steps_per_epoch = 2
for _ in range(eval_steps_per_epoch):
    coordinator.schedule(eval_step, args=(per_worker_eval_iterator,))
coordinator.join()
print("Evaluation accuracy: %f" % float(eval_accuracy.result()))
found["scheduled"] = float(eval_accuracy.result())
found["scheduled rows"] = int(float(keras.ops.convert_to_numpy(eval_accuracy.count)))

print("found", json.dumps(found), flush=True)
