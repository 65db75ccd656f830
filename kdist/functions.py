"""`kdist.function` and `kdist.value_and_grad`: one training loop for three backends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from kdist.context import entered_function
from kdist.errors import InvalidArgumentError


def function(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compiles a function that speaks for all replicas, such as a training step that calls `strategy.run`.

    What `tf.function` is for TensorFlow, for three backends: `tf.function` on TensorFlow (without AutoGraph: use
    `keras.ops.cond` and `while_loop`, or pass `autograph=True`); on JAX, where
    `strategy.run` compiles what it runs, a function that calls it runs as it is, and any other one runs as it is
    at its first call and is then compiled by `jax.jit`, with the Keras variables that it reads and writes; on
    PyTorch the function as it is, or compiled by `torch.compile` with `jit_compile=True`.

    It may read distributed datasets: with `next(iterator)`, which raises an `OutOfRangeError` at the end (as in
    `tf.distribute`, and unlike outside, where `StopIteration` does), or with `for batch in dataset`, which on
    TensorFlow is a loop of the graph, made by AutoGraph.

    May be called in a replica, where it does nothing on JAX and PyTorch: what `run` runs is compiled, or eager.

    Args:
        fn: The function; `None` to use `function` as a decorator with options.
        **options: `jit_compile`, and what else the backend's own `function` or `compile` takes.

    Returns:
        A function with the same arguments and results.

    Example:

    ```python
    @kdist.function
    def train_step(batch):
        losses = strategy.run(replica_step, args=(batch,))
        return strategy.reduce("SUM", losses, axis=None)
    ```
    """
    if fn is None:
        return lambda decorated: function(decorated, **options)
    if not callable(fn):
        raise InvalidArgumentError(
            "kdist.function received an object that is not callable.",
            received={"fn": fn},
            hint="Pass a function: kdist.function(step)",
        )
    from kdist.backends import get_backend

    compiled = get_backend().function(fn, **options)

    @functools.wraps(compiled)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with entered_function():
            return compiled(*args, **kwargs)

    return wrapper


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool = False
) -> Callable[..., Any]:
    """Returns a function that gives the result of `fn` and its gradients with respect to variables.

    The gradients are those of this replica's loss: inside `strategy.run`, hand them to `optimizer.apply`, which
    sums them over the replicas. What `fn` writes to other variables (moving statistics, seeds, metrics) is kept.

    Args:
        fn: Returns a scalar loss of floating point; with `has_aux`, a pair of the loss and anything else.
        variables: Keras variables, such as `model.trainable_variables`.
        has_aux: Whether `fn` returns a pair.

    Returns:
        A function with the arguments of `fn` that returns `(loss, gradients)`, or `((loss, aux), gradients)`.
        The gradients are a list in the order of `variables`, with `None` for a variable that the loss does not
        depend on (zeros, on JAX).

    Raises:
        InvalidArgumentError: When called: the loss is no scalar, or there is no pair.

    Example:

    ```python
    def loss_fn(x, y):
        return keras.ops.mean(keras.ops.square(y - model(x, training=True)))

    loss, gradients = kdist.value_and_grad(loss_fn, model.trainable_variables)(x, y)
    optimizer.apply(gradients, model.trainable_variables)
    ```
    """
    import keras

    from kdist.backends import get_backend

    variables = list(variables)
    for variable in variables:
        if not isinstance(variable, keras.Variable):
            raise InvalidArgumentError(
                "Cannot compute gradients: one of the variables is not a Keras variable.",
                received={"variable": type(variable).__name__},
                hint="Pass Keras variables: kdist.value_and_grad(loss_fn, model.trainable_variables)",
            )
    return get_backend().value_and_grad(fn, variables, has_aux)
