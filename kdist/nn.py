"""`kdist.nn`: losses per replica that add up to the loss of the global batch, with the names of `tf.nn`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdist.errors import InvalidArgumentError, StrategyScopeError
from kdist.strategies.default import get_replica_context

if TYPE_CHECKING:
    from kdist.values import Tensor


def compute_average_loss(
    per_example_loss: object, sample_weight: object = None, global_batch_size: int | Tensor | None = None
) -> Any:
    """Divides the losses of a replica by the number of rows of all replicas, and returns their sum.

    Source: https://www.tensorflow.org/api_docs/python/tf/nn/compute_average_loss

    Args:
        per_example_loss: The losses of this replica's rows, of rank 1 or higher.
        sample_weight: Weights with a shape that broadcasts to the shape of the losses; `None` for ones.
        global_batch_size: The number of rows of all replicas. `None` for this replica's rows times the number
            of replicas, which is only correct if all replicas have the same number of rows.

    Returns:
        A scalar: this replica's part of the mean loss. `strategy.reduce("SUM", …)` adds the parts. In the
        same way, `optimizer.apply` adds the gradients.

    Raises:
        InvalidArgumentError: If the losses are a scalar, or the batch size is not an integer.
        StrategyScopeError: If you call it in the cross-replica context.

    Example:

    ```python
    def replica_step(x, y):
        per_example_loss = keras.losses.mean_squared_error(y, model(x))
        return kdist.nn.compute_average_loss(per_example_loss, global_batch_size=128)
    ```
    """
    from keras import ops

    num_replicas = _num_replicas("compute_average_loss")
    losses = ops.convert_to_tensor(per_example_loss)
    if len(losses.shape) == 0:
        raise InvalidArgumentError(
            "per_example_loss is a scalar, but it must contain one loss per row.",
            received={"shape": tuple(losses.shape)},
            hint='Create the loss without a reduction: keras.losses.MeanSquaredError(reduction="none")',
        )
    if sample_weight is not None:
        weights = ops.cast(sample_weight, losses.dtype)
        while len(weights.shape) < len(losses.shape):
            weights = ops.expand_dims(weights, -1)
        losses = losses * weights
    if global_batch_size is None:
        global_batch_size = ops.shape(losses)[0] * num_replicas
    elif isinstance(global_batch_size, (bool, float)) or len(getattr(global_batch_size, "shape", ())):
        raise InvalidArgumentError(
            "global_batch_size is not an integer.",
            received={"global_batch_size": global_batch_size},
            hint="Pass the number of rows of all replicas, for example global_batch_size=128",
        )
    return ops.sum(losses) / ops.cast(global_batch_size, losses.dtype)


def scale_regularization_loss(regularization_loss: object) -> Any:
    """Divides a regularization loss by the number of replicas, because every replica computes all of it.

    Source: https://www.tensorflow.org/api_docs/python/tf/nn/scale_regularization_loss

    Args:
        regularization_loss: A tensor, or a list of tensors to add, such as `model.losses`.

    Returns:
        A scalar: this replica's part of the loss.

    Raises:
        StrategyScopeError: If you call it in the cross-replica context.

    Example:

    ```python
    loss += kdist.nn.scale_regularization_loss(model.losses)
    ```
    """
    import keras

    num_replicas = _num_replicas("scale_regularization_loss")
    leaves = [keras.ops.sum(leaf) for leaf in keras.tree.flatten(regularization_loss)]
    return sum(leaves, keras.ops.zeros(())) / num_replicas


def _num_replicas(function: str) -> int:
    replica = get_replica_context()
    if replica is None:
        raise StrategyScopeError(
            f"kdist.nn.{function} was called outside of a replica.",
            hint="Call it inside the function that you pass to `strategy.run`.",
        )
    return replica.num_replicas_in_sync
