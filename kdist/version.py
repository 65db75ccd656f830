"""The version of kdist. The build reads it, and checkpoints contain it."""

__version__ = "0.2.0"
