"""A fourth backend for the tests: kdist on Keras's NumPy backend, which has no gradients and no `fit`.

It shows the least code that a backend needs; see docs/contribute/a-backend.md. Replicas are threads that take
turns, and workers exchange arrays through a dictionary in the first worker.
"""

from tests.backends.toy.backend import ToyBackend

__all__ = ["ToyBackend"]
