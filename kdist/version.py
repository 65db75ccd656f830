"""The version of kdist: read by the build, and written into checkpoints."""

__version__ = "0.2.0"
