"""Writes the generated files in docs/: `python -m tests.pages`."""
