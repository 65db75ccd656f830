"""Cluster errors that are also the built-in error which `tf.distribute` documents for the same mistake.

Scripts that were written for `tf.distribute` catch `TypeError`, `KeyError` or `RuntimeError`; new ones can
catch `ClusterConfigError` for all of them.
"""

from __future__ import annotations

from kdist.errors import ClusterConfigError


class ClusterTypeError(ClusterConfigError, TypeError):
    """A part of a cluster's description has the wrong type."""


class ClusterKeyError(ClusterConfigError, KeyError):
    """Two descriptions of one cluster claim the same task."""

    # KeyError shows the repr of its argument, which would put the whole message in quotes.
    __str__ = Exception.__str__


class ClusterRuntimeError(ClusterConfigError, RuntimeError):
    """The workload manager's variables are missing or promise less than was asked for."""


class ClusterImportError(ClusterConfigError, ImportError):
    """The package that asks a cloud is not installed."""
