"""The TensorFlow backend, which uses `tf.distribute` and adds exact global batches."""
