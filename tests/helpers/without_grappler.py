"""Turns off TensorFlow's optimization of functions in forked workers: it takes longer than the functions."""

from __future__ import annotations

import tensorflow as tf

tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
