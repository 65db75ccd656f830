"""`Strategy.run` and its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdist.communication.options import hint_ignored
from kdist.context import StrategyLike
from kdist.errors import InvalidArgumentError, check_call
from kdist.values import regroup


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`, for compatibility with `tf.distribute.RunOptions`.

    They configure XLA on TPUs under TensorFlow. kdist ignores them, because no backend needs them.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/RunOptions

    Args:
        experimental_enable_dynamic_batch_size: Whether batches can differ in size. In kdist, they always can.
        experimental_bucketizing_dynamic_shape: Whether to pad inputs to a few sizes.
        experimental_xla_options: Options for XLA.

    Example:

    >>> import kdist
    >>> kdist.RunOptions().experimental_enable_dynamic_batch_size
    True
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object = None


def run(
    strategy: StrategyLike,
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    options: RunOptions | None,
) -> Any:
    """Calls a function once per replica; see `Strategy.run`."""
    import keras

    from kdist import keras_hooks
    from kdist.backends import debugging
    from kdist.strategies.reductions import check_components, require_cross_replica

    require_cross_replica("run")
    check_call(fn, args, kwargs, "strategy.run(step, args=(batch,)")
    if options is not None and options != RunOptions():
        hint_ignored(
            f"options={options}", "these options are for TPUs on TensorFlow.", strategy.runtime.worker_index
        )
    runtime = strategy.runtime
    for leaf in keras.tree.flatten((args, kwargs)):
        check_components(runtime, leaf)
    with runtime.engine_errors():
        strategy.new_variables.share()
        if debugging.is_on() and runtime.can_exchange:
            debugging.check(runtime, f"Strategy.run({getattr(fn, '__qualname__', fn)})")
        with keras_hooks.without_distribution():
            results = runtime.run(strategy, fn, tuple(args), dict(kwargs or {}))
    for index, other in enumerate(results[1:], start=1):
        try:
            keras.tree.assert_same_structure(results[0], other)
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError(
                f"The function returned different structures in replica 0 and replica {index}.",
                received={"replica_0": results[0], f"replica_{index}": other},
                hint="Return the same structure in every replica, with None for a missing value.",
            ) from error
    return regroup(results, always_wrap=False)
