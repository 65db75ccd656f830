"""These tests need PyTorch as Keras's backend, in a process of its own."""

from __future__ import annotations

import os

# Test modules import torch and Keras at their beginning: where Keras runs on something else, they are not read.
collect_ignore_glob = [] if os.environ.get("KERAS_BACKEND") == "torch" else ["*_test.py"]
