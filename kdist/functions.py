"""`kdist.function` and `kdist.value_and_grad`: one training loop for three backends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kdist.context import entered_function
from kdist.errors import InvalidArgumentError, check_function

if TYPE_CHECKING:
    import keras


def function(fn: Callable[..., object] | None = None, **options: object) -> Any:
    """Compiles a function that acts for all replicas, such as a training step that calls `strategy.run`.

    - TensorFlow uses `tf.function`, with AutoGraph only for functions that need it. On all backends, control
      flow can use `keras.ops.cond` and `while_loop`.
    - JAX does not compile functions that read a dataset or call `strategy.run`, because `run` compiles itself.
      It compiles all other functions with `jax.jit` from the second call on, with the Keras variables that they use.
    - PyTorch does not compile the function, unless you pass `jit_compile=True` for `torch.compile`.

    The function can read distributed datasets with `for batch in dataset`, which is a loop of the graph on
    TensorFlow, or with `next(iterator)`. At the end, `next` raises `OutOfRangeError` inside the function and
    `StopIteration` outside, as in `tf.distribute`.

    In a replica, TensorFlow and JAX do not compile the function separately from `run`.

    Args:
        fn: The function. Omit it to use `function` as a decorator with options.
        **options: `jit_compile`, and other options of `tf.function` or `torch.compile`. Ignored on JAX.

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
    check_function("fn", fn, "Pass a function: kdist.function(step)")
    from kdist.backends import get_backend

    compiled = get_backend().function(fn, **options)

    @functools.wraps(compiled)
    def wrapper(*args: object, **kwargs: object) -> object:
        with entered_function():
            return compiled(*args, **kwargs)

    return wrapper


def value_and_grad(
    fn: Callable[..., object], variables: Sequence[keras.Variable], has_aux: bool = False
) -> Callable[..., Any]:
    """Returns a function that computes the result of `fn` and its gradients with respect to variables.

    In `strategy.run` these are the gradients of this replica's loss, and `optimizer.apply` sums them over the
    replicas. Values that `fn` writes to other variables are kept (moving statistics, seeds, metrics).

    Args:
        fn: Returns a scalar floating-point loss, or with `has_aux` a pair of the loss and any other value.
        variables: Keras variables, such as `model.trainable_variables`.
        has_aux: Whether `fn` returns a pair.

    Returns:
        A function with the arguments of `fn` that returns `(loss, gradients)`, or `((loss, aux), gradients)`.
        The gradients are a list in the order of `variables`. If the loss does not depend on a variable, its
        gradient is `None`, or zeros on JAX.

    Raises:
        InvalidArgumentError: When called, if the loss is not a scalar, or `fn` does not return a pair.

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
