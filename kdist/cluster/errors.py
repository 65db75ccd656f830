"""Cluster errors that also derive from the built-in errors that `tf.distribute` raises in the same cases.

Scripts written for `tf.distribute` catch `TypeError`, `KeyError` or `RuntimeError`. New scripts can catch
`ClusterConfigError` instead.
"""

from __future__ import annotations

from kdist.errors import ClusterConfigError


class ClusterTypeError(ClusterConfigError, TypeError):
    """Part of a cluster description has the wrong type."""


class ClusterKeyError(ClusterConfigError, KeyError):
    """Two descriptions of the same cluster contain the same task."""

    # str() of a KeyError is the repr of its argument, which would put the whole message in quotes.
    __str__ = Exception.__str__


class ClusterRuntimeError(ClusterConfigError, RuntimeError):
    """The workload manager's variables are missing, or it provides fewer resources than requested."""


class ClusterImportError(ClusterConfigError, ImportError):
    """The client package for a cloud API is not installed."""
