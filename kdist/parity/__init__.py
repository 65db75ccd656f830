"""Whether training under a strategy gives the numbers of one device: two runs of a user's model, and what differs."""

from __future__ import annotations

from kdist.parity.comparison import ATOL, RTOL, check_options, differences, explain
from kdist.parity.training import Training, train

__all__ = ["ATOL", "RTOL", "Training", "check_options", "differences", "explain", "train"]
