"""Checkpoints: each worker writes a share, and any number of workers on any backend can restore them."""
