"""Every way in Keras to use variables, metrics and optimizers: a table of small functions.

Each function gets fresh `Things` and returns its results. Plain Keras on one device provides the expected
results.
"""

from tests.ways import of_models, of_optimizers, of_variables
from tests.ways.things import WAYS

__all__ = ["WAYS", "of_models", "of_optimizers", "of_variables"]
