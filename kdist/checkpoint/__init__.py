"""Checkpoints: every worker writes its share, and any number of workers on any backend restores it."""
