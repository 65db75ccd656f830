"""The base class of all strategies: which replicas there are, and the scope that makes them current."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdist.context import Scope

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime
    from kdist.cluster import ClusterResolver


class Strategy:
    """A policy for distributing computation over devices and workers.

    Create one, build and compile models in its `scope()`, then call `fit`, `evaluate` and `predict` as on one
    device.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

    Example:

    ```python
    import kdist, keras

    strategy = kdist.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
    model.fit(x, y, batch_size=128)
    ```
    """

    def __init__(self, runtime: Runtime) -> None:
        from kdist import keras_hooks

        keras_hooks.install()
        self._runtime = runtime

    @property
    def runtime(self) -> Runtime:
        """The devices and workers of this strategy, as the backend drives them."""
        return self._runtime

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over which gradients are summed, over all workers."""
        return self._runtime.num_replicas

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of a multi-worker strategy; `None` for a strategy of one process."""
        return None

    def scope(self) -> Scope:
        """Returns a context manager that makes this strategy current.

        Models, optimisers and metrics created inside belong to the strategy, and remember it: `fit` works
        outside the scope too. Scopes of the same strategy may be nested, those of different ones not; a scope
        counts for the thread that entered it.

        Returns:
            A context manager whose `as` target is the strategy.

        Raises:
            StrategyScopeError: On entering, inside the scope of another strategy or inside a replica.
        """
        return Scope(self, self._runtime.scope)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} num_replicas_in_sync={self.num_replicas_in_sync}>"
