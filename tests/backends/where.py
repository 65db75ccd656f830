"""Whether a test module is read by a worker, which runs its tests, or by pytest, which imports no framework."""

from __future__ import annotations

import sys

# What a worker of a `WorkerPool` runs; see conftest.py.
in_worker = "kdist.testing.pool_worker" in sys.modules
