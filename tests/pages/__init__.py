"""What scripts write into docs/: `python -m tests.pages`."""
