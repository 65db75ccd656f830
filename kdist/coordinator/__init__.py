"""Asynchronous training: a coordinator, workers that compute, and servers that hold the variables."""
