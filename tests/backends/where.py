"""Distinguishes workers, which run the tests, from pytest's own process, which imports no framework."""

from __future__ import annotations

import sys

# Each worker of a `WorkerPool` runs this module; see conftest.py.
in_worker = "kdist.testing.pool_worker" in sys.modules
