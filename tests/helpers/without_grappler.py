"""Imported where TensorFlow's workers are forked: to optimize functions takes longer than to run them."""

from __future__ import annotations

import tensorflow as tf

tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
