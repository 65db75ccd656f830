"""Trains a user's model on one device and under a strategy, and compares the results."""

from __future__ import annotations

from kdist.parity.comparison import ATOL, RTOL, check_options, differences, explain
from kdist.parity.training import Training, train

__all__ = ["ATOL", "RTOL", "Training", "check_options", "differences", "explain", "train"]
