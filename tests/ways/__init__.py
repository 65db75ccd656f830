"""Every way to use variables, metrics and optimizers that Keras has: a table of small functions.

Each gets fresh `Things` and returns what it saw; plain Keras on one device says what that is.
"""

from tests.ways import of_models, of_optimizers, of_variables
from tests.ways.things import WAYS

__all__ = ["WAYS", "of_models", "of_optimizers", "of_variables"]
