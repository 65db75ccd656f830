"""The one file that touches `keras.src` or changes anything in Keras.

Every hook does nothing outside a kdist strategy: models created elsewhere behave exactly as without kdist.
`install` is idempotent and runs when the first strategy is created. The hooks and why each is needed:

- `Trainer.__init__` remembers the strategy a model is created under; `fit` and its relatives dispatch on it.
- `Variable.__init__` tells the strategy in scope, which gives all workers the chief's values; `assign_add` and
  `assign_sub` tell the replica's scope that a write is no new value; `int` and `float` of mirrored variables.
- Keras's functions that write a model's files: one worker writes, and all find the file complete.
- `get_metrics_result` of PyTorch's trainer in Keras 3.16, which sums over processes a second time.
- `reduce_values`, `apply_mask`, `reduce_weighted_values` (keras.src.losses.loss): denominators of losses that
  are not a plain mean over rows must be counted over all replicas. There is no public place between a loss's
  per-row values and its reduction.
- `Mean.update_state`, `Sum.update_state`: a scalar counts as much as the rows it stands for.
- `Optimizer.apply`: sums the gradients over the replicas first, so that clipping comes after.
- TensorFlow's optimiser: its own `tf.distribute` branches reduce a second time, or fail in a `cond`; inside a
  replica of kdist, the backend-neutral methods of the base class are right.
- `SeedGenerator.next`: replicas must draw different random numbers.
- `BatchNormalization(synchronized=True)` and `moments`: refused by Keras outside TensorFlow.

`tests/keras_hooks_test.py` says which name is gone when a new Keras breaks one of them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kdist import context
from kdist.errors import StrategyScopeError

if TYPE_CHECKING:
    from kdist.strategies.strategy import Strategy

# The strategy of each model. Kept outside the models, so that saved files contain nothing of kdist.
_strategies: weakref.WeakKeyDictionary[Any, Strategy] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_installed = False

MODEL_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def install(native_moments: bool) -> None:
    """Puts the hooks into Keras, once a process.

    Args:
        native_moments: Whether the backend's own moments can be synchronised.
    """
    global _installed
    with _lock:
        if _installed:
            return
        _hook_models()
        _hook_variables()
        _hook_saving()
        _hook_torch_metrics()
        _hook_losses()
        _hook_scalars()
        _hook_optimizers()
        _hook_seeds()
        _hook_batch_normalization(native_moments)
        _installed = True


def strategy_of(model: Any) -> Strategy | None:
    """Returns the strategy that a model was created under, or `None`."""
    return _strategies.get(model)


def _replica() -> Any:
    """The replica that this thread runs on behalf of a step, or `None`."""
    replica = context.current_replica()
    return replica if getattr(replica, "scope", None) is not None else None


def _model_replica() -> Any:
    """The replica that runs a step of a model's, whose losses are to be those of all rows; or `None`.

    In a function that `strategy.run` runs, losses are what the function makes of them.
    """
    replica = _replica()
    return replica if replica is not None and replica.is_model_step else None


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    wrapper = functools.wraps(original)(make(original))
    # Keras reads the arguments of layers' constructors with `inspect.getfullargspec`, which does not look
    # behind a wrapper but believes this attribute.
    wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


# Models ------------------------------------------------------------------------------------------------------


def _hook_models() -> None:
    import keras
    from keras.src.trainers import trainer as trainers

    # Keras 3.16 calls the class that all backends share by another name.
    Trainer = getattr(trainers, "BaseTrainer", None) or trainers.Trainer

    def remember(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if context.in_cross_replica_context() and hasattr(context.get_strategy(), "runtime"):
                _strategies[self] = context.get_strategy()

        return __init__

    _wrap(Trainer, "__init__", remember)

    for name in MODEL_METHODS:
        _wrap(keras.Model, name, functools.partial(_dispatch, name))


def _hook_variables() -> None:
    """A strategy whose scope sees a new variable is to make it equal on all workers."""
    import keras

    def note(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if context.in_cross_replica_context() and hasattr(context.get_strategy(), "new_variables"):
                context.get_strategy().new_variables.add(self)

        return __init__

    def addition(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, value: Any) -> Any:
            adding = getattr(stateless_scope(), "adding", contextlib.nullcontext)
            with adding():
                return original(self, value)

        return wrapper

    def number(kind: type, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any) -> Any:
            mirrored = isinstance(getattr(self.value, "values", None), tuple)  # on TensorFlow
            if not mirrored or self.ndim > 0:
                return original(self)
            return kind(keras.ops.convert_to_numpy(self.value))

        return wrapper

    _wrap(keras.Variable, "__init__", note)
    for name in ("assign_add", "assign_sub"):
        _wrap(keras.Variable, name, addition)
    for kind in (int, float):
        _wrap(keras.Variable, f"__{kind.__name__}__", functools.partial(number, kind))


def _hook_saving() -> None:
    """What all ways to save a model end in; `keras.Model.save` is only one of them."""
    import keras
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib
    from keras.src.utils import file_utils

    def save(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
            strategy = strategy_of(model)
            if strategy is None:
                return original(model, filepath, *args, **kwargs)
            from kdist.training import saving

            write = lambda path: original(model, path, *args, **kwargs)  # noqa: E731
            return saving.save(strategy, model, filepath, write)

        return wrapper

    def ask(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
            strategy = strategy_of(self)
            if overwrite or strategy is None or strategy.runtime.worker_index == 0:
                return original(self, filepath, overwrite, *args, **kwargs)
            from kdist.training import saving

            # A file that is there may be the chief's of this very save: only the chief can ask.
            with saving.keeping_files():
                return original(self, filepath, True, *args, **kwargs)

        return wrapper

    def load_weights(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            strategy = strategy_of(self)
            if strategy is not None:
                from kdist.training.session import session_of

                session_of(strategy, self).has_loaded = True
            return result

        return wrapper

    def makedirs(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(path: Any) -> Any:
            try:
                return original(path)
            except FileExistsError:
                # Keras asks first whether the folder is there; another worker may make it in between.
                if not file_utils.isdir(path):
                    raise

        return wrapper

    _wrap(saving_lib, "save_model", save)
    _wrap(saving_lib, "save_weights_only", save)
    _wrap(legacy_h5_format, "save_model_to_hdf5", save)
    _wrap(keras.Model, "save", ask)
    _wrap(keras.Model, "save_weights", ask)
    _wrap(keras.Model, "export", save)
    _wrap(keras.Model, "load_weights", load_weights)
    _wrap(file_utils, "makedirs", makedirs)


def _hook_torch_metrics() -> None:
    """Keras 3.16 sums metrics over all processes itself; those of a strategy's model are global already."""
    import keras

    def neutral(owner: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_metrics_result(self: Any) -> Any:
            return original(self) if strategy_of(self) is None else super(owner, self).get_metrics_result()

        return get_metrics_result

    for owner in keras.Model.__mro__:
        if owner.__module__ == "keras.src.backend.torch.trainer" and "get_metrics_result" in vars(owner):
            _wrap(owner, "get_metrics_result", functools.partial(neutral, owner))


def _dispatch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            _refuse_distributed(self, name, *args[:1], *[kwargs[key] for key in ("x",) if key in kwargs])
            with _outside_of_scopes():
                return original(self, *args, **kwargs)
        from kdist.training import methods

        return getattr(methods, name)(strategy, self, *args, **kwargs)

    return method


def _refuse_distributed(model: Any, method: str, *data: Any) -> None:
    """A dataset of a strategy's is of no use to a model that has none."""
    from kdist.data.distributed_dataset import DistributedDataset

    if any(isinstance(x, DistributedDataset) for x in data):
        raise StrategyScopeError(
            f"`{method}` on a distributed dataset needs a model that was created under the strategy.",
            received={"model": model.name, "dataset": data[0]},
            hint="Create and compile the model inside `with strategy.scope():`.",
        )


def _outside_of_scopes() -> contextlib.AbstractContextManager[Any]:
    """For models that belong to no strategy: one that happens to be in scope must not touch them."""
    runtime = getattr(context.get_strategy(), "runtime", None)
    return contextlib.nullcontext() if runtime is None else runtime.suspended()


def epoch_iterator(native: Callable[[Any], Any], keeps_batches: bool, **arguments: Any) -> Any:
    """Returns Keras's `EpochIterator` over *global* batches, in the order that plain Keras would give.

    Its attribute `prepare` may be set to a function from the iterable of an epoch's batches to an iterator of
    what the steps take.

    Args:
        native: From Keras's data adapter to the iterable of batches that the backend's own loop takes, since each
            shuffles differently.
        keeps_batches: Whether one iterable serves all epochs: its shuffles follow from how often it was iterated.
        **arguments: Those of Keras's `EpochIterator`.
    """
    from keras.src.trainers.epoch_iterator import EpochIterator

    class GlobalBatchIterator(EpochIterator):
        prepare: Callable[[Any], Any] | None = None
        _kept: Any = None

        def _get_iterator(self) -> Any:
            if self._kept is None:
                self._kept = native(self.data_adapter)
            batches = self._kept
            if not keeps_batches:
                self._kept = None
            return batches if self.prepare is None else self.prepare(batches)

    return GlobalBatchIterator(**arguments)


def data_adapter(num_batches: int | None, epochs: Iterable[Any]) -> Any:
    """Returns a `DataAdapter` of Keras for batches that come from kdist.

    Args:
        num_batches: Steps of an epoch, where known.
        epochs: Gives the batches of an epoch each time it is iterated; some iterators are never started.
    """
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    class DistributedDataAdapter(DataAdapter):
        batch_size = None

        @property
        def num_batches(self) -> int | None:
            return num_batches

        def get_numpy_iterator(self) -> Any:
            return epochs

        get_tf_dataset = get_jax_iterator = get_torch_dataloader = get_numpy_iterator

    return DistributedDataAdapter()


def shuffles_py_dataset(iterator: Any) -> bool:
    """Says whether an `epoch_iterator` shuffles the batches of a PyDataset, with Python's `random`."""
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    return isinstance(iterator.data_adapter, PyDatasetAdapter) and bool(iterator.data_adapter.shuffle)


def first_of_py_dataset(iterator: Any) -> Any:
    """Returns a batch of a PyDataset without its queue, which would lose what was read and not used."""
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    if not isinstance(iterator.data_adapter, PyDatasetAdapter):
        return None
    return iterator.data_adapter._standardize_batch(iterator.data_adapter.py_dataset[0])


def release(iterator: Any) -> None:
    """Lets go of what an `epoch_iterator` has begun to read."""
    iterator.prepare = iterator._current_iterator = iterator._epoch_iterator = None


def forget_batches(iterator: Any) -> None:
    """Lets an `epoch_iterator` make its batches anew, from the random numbers that come now."""
    iterator._kept = None


def is_torch_loader(iterator: Any) -> bool:
    """Says whether an `epoch_iterator` reads a PyTorch `DataLoader`, which may shuffle by the global seed."""
    from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

    return isinstance(iterator.data_adapter, TorchDataLoaderAdapter)


def dataset_of(iterator: Any) -> Any:
    """Returns the dataset that an `epoch_iterator` reads, where Keras keeps one."""
    return getattr(iterator.data_adapter, "_dataset", None)


def py_dataset_batches(dataset: Any) -> Iterator[Any]:
    """Yields the batches of one epoch of a PyDataset, prepared by its own threads or processes."""
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    adapter = PyDatasetAdapter(dataset, class_weight=None, shuffle=False)
    adapter.on_epoch_begin()
    try:
        yield from adapter.get_numpy_iterator()
    finally:
        adapter.on_epoch_end()


def num_array_rows(iterator: Any) -> int | None:
    """Returns the rows of the arrays that an `epoch_iterator` reads; `None` for data of other kinds."""
    return getattr(iterator.data_adapter, "_num_samples", None)


def shuffles_arrays(iterator: Any) -> bool:
    """Says whether the order of an `epoch_iterator` comes from the backend's global random state."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    return isinstance(iterator.data_adapter, ArrayDataAdapter) and bool(iterator.data_adapter._shuffle)


def train_validation_split(arrays: Any, validation_split: float) -> Any:
    """Keras's own split of arrays into a training and a validation part."""
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.train_validation_split(arrays, validation_split=validation_split)


def class_weight_to_sample_weights(y: Any, class_weight: Any) -> Any:
    """Keras's own translation of `class_weight` into one weight a row."""
    from keras.src.trainers.data_adapters import data_adapter_utils

    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def pythonify_logs(logs: Any) -> dict[str, Any]:
    """Keras's own translation of logs into Python floats, flattened and sorted."""
    from keras.src.utils.python_utils import pythonify_logs as keras_pythonify_logs

    return keras_pythonify_logs(logs)


def callback_list(callbacks: Any, **arguments: Any) -> Any:
    """Wraps callbacks in Keras's `CallbackList`, unless they are in one."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(callbacks, **arguments)


def build(model: Any, data_batch: Any) -> None:
    """Creates the variables of model, metrics, loss and optimiser from the shapes of one global batch."""
    model._symbolic_build(data_batch=data_batch)


def is_built(model: Any) -> bool:
    """Says whether all variables of a compiled model are there: what Keras asks before it looks at the data."""
    return (
        all(layer.built for layer in model._flatten_layers())
        and (model._compile_metrics is None or model._compile_metrics.built)
        and (model._compile_loss is None or model._compile_loss.built)
        and (model.optimizer is None or model.optimizer.built)
    )


def build_layers(model: Any, data_batch: Any) -> None:
    """Creates the variables of the layers alone, for a model that was not compiled."""
    import keras
    from keras.src import backend

    if all(layer.built for layer in model._flatten_layers()):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data_batch)
    symbolic = keras.tree.map_structure(
        lambda v: None if v is None else keras.KerasTensor(v.shape, keras.backend.standardize_dtype(v.dtype)),
        x,
    )
    backend.compute_output_spec(model, symbolic, training=False)


def all_variables(model: Any) -> list[Any]:
    """All Keras variables of a model, its seeds, metrics and optimiser included, in one order on all workers."""
    found = list(model.variables)
    seen = {id(v) for v in found}
    parts = [*model.metrics_variables] if getattr(model, "compiled", False) else []
    optimizer = getattr(model, "optimizer", None)
    parts += list(optimizer.variables) if optimizer is not None and hasattr(optimizer, "variables") else []
    parts += [v for v in model.non_trainable_variables if id(v) not in seen]
    for v in parts:
        if id(v) not in seen:
            seen.add(id(v))
            found.append(v)
    return found


# Losses and metrics ------------------------------------------------------------------------------------------


def _hook_losses() -> None:
    from keras.src.losses import loss as losses

    def reduce_values(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size") -> Any:
            replica = _model_replica()
            if replica is None or len(values.shape) == 0:
                return original(values, sample_weight, reduction)
            return _reduce_rows(replica, original, values, sample_weight, reduction)

        return wrapper

    def apply_mask(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
            replica = _model_replica()
            if replica is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
                return original(sample_weight, mask, dtype, reduction)
            # With reduction="sum" Keras leaves the mask as zeros and ones; what is missing is the factor.
            weights = original(sample_weight, mask, dtype, "sum")
            return weights * _total_over_valid(replica, mask, dtype)

        return wrapper

    def reduce_weighted_values(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(values: Any, sample_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
            replica = _model_replica()
            if replica is None or sample_weight is None or len(values.shape) > 0:
                return original(values, sample_weight, *args, **kwargs)
            # A scalar loss with weights: Keras multiplies it with the mean weight, of all rows.
            import keras

            factor = original(keras.ops.ones_like(values), sample_weight, *args, **kwargs)
            return values * replica.mean_over_rows([factor])[0]

        return wrapper

    def scaled(original: Callable[..., Any], up: bool) -> Callable[..., Any]:
        def wrapper(value: Any) -> Any:
            replica = _replica()
            if replica is None or replica.is_model_step:
                # A model's step takes a mean over the replicas: nothing is to be divided for a sum to follow.
                return original(value) if replica is None else value
            # In the user's own function gradients are summed: there a mean loss counts one part in as many as
            # there are replicas, as Keras has it on TensorFlow.
            number = replica.num_replicas_in_sync
            return value * number if up else value / number

        return wrapper

    _wrap(losses, "reduce_values", reduce_values)
    _wrap(losses, "apply_mask", apply_mask)
    _wrap(losses, "reduce_weighted_values", reduce_weighted_values)
    _wrap(losses, "scale_loss_for_distribution", functools.partial(scaled, up=False))
    _wrap(losses, "unscale_loss_for_distribution", functools.partial(scaled, up=True))


def _reduce_rows(replica: Any, original: Any, values: Any, sample_weight: Any, reduction: str) -> Any:
    from keras import ops

    if reduction in (None, "none"):
        # The gradient of a vector is that of its sum, but its value stands for its rows.
        scaled = values * _cast(replica.rows.counts / replica.rows.share, values)
        return scaled + ops.stop_gradient(values - scaled)
    if reduction == "sum":
        return original(values, None, "sum") * _cast(replica.rows.counts / replica.rows.share, values)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        counts = _cast(replica.rows.counts, values)
        local_weight = ops.cast(ops.sum(sample_weight), values.dtype) * counts
        (weight,) = replica.all_reduce_packed([local_weight])
        total = original(values, None, "sum") * _cast(replica.rows.counts / replica.rows.share, values)
        return ops.divide_no_nan(total, weight)
    return original(values, sample_weight, reduction)


def _total_over_valid(replica: Any, mask: Any, dtype: Any) -> Any:
    from keras import ops

    counts = ops.cast(replica.rows.counts, dtype)
    valid = ops.sum(ops.cast(mask, dtype))
    total = ops.sum(ops.ones_like(mask, dtype=dtype))
    total, valid = replica.all_reduce_packed([total * counts, valid * counts])
    return ops.divide_no_nan(total, valid)


def _cast(number: Any, like: Any) -> Any:
    from keras import ops

    return ops.cast(number, like.dtype)


def _hook_scalars() -> None:
    import keras

    def update_state(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, values: Any, sample_weight: Any = None) -> Any:
            replica = _model_replica()
            if replica is not None and sample_weight is None and _is_scalar(values):
                sample_weight = keras.ops.cast(replica.rows.scalar_weight, self.dtype)
            return original(self, values, sample_weight)

        return wrapper

    _wrap(keras.metrics.Mean, "update_state", update_state)
    _wrap(keras.metrics.Sum, "update_state", update_state)


def _is_scalar(values: Any) -> bool:
    # A list of the user's has no shape; a traced tensor may not be turned into an array.
    return len(values.shape) == 0 if hasattr(values, "shape") else not isinstance(values, (list, tuple))


# Optimisers --------------------------------------------------------------------------------------------------


def _hook_optimizers() -> None:
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

    def apply(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            replica = _replica()
            if replica is None or getattr(replica, "applying", False):
                return original(self, grads, trainable_variables)
            replica.applying = True  # the optimiser inside a LossScaleOptimizer must not sum again
            try:
                variables = trainable_variables or self._trainable_variables
                grads = _sum_gradients(replica, list(grads), list(variables))
                return replica.apply_gradients(lambda: original(self, grads, trainable_variables))
            finally:
                replica.applying = False

        return wrapper

    def scale_loss(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, loss: Any) -> Any:
            scaled = original(self, loss)
            replica = _replica()
            return scaled if replica is None or scaled is loss else replica.weight_loss(scaled)

        return wrapper

    _wrap(BaseOptimizer, "scale_loss", scale_loss)
    _wrap(LossScaleOptimizer, "scale_loss", scale_loss)
    _wrap(BaseOptimizer, "apply", apply)
    _wrap(LossScaleOptimizer, "apply", apply)


def _sum_gradients(replica: Any, grads: list[Any], variables: list[Any]) -> list[Any]:
    from keras import ops

    # IndexedSlices (TensorFlow's gradients of embeddings) are made dense: rows differ between replicas. Their
    # shape is not known while tracing, but is the variable's.
    present = [
        (i, ops.reshape(ops.convert_to_tensor(g), variables[i].shape))
        for i, g in enumerate(grads)
        if g is not None
    ]
    for (i, _), total in zip(present, replica.sum_gradients([g for _, g in present]), strict=True):
        grads[i] = total
    replica.loss_is_weighted = False
    return grads


def hook_tensorflow_optimizers() -> None:
    """Puts the hooks into Keras's optimisers for TensorFlow; called once, by the backend."""
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
    from keras.src.optimizers.base_optimizer import BaseOptimizer as base
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer as loss_scale

    def neutral(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = original if _replica() is None else getattr(base, name)
            return chosen(self, *args, **kwargs)

        return method

    for name in (
        "_apply_weight_decay",
        "_backend_update_step",
        "_backend_increment_gradient_accumulators",
        "_overwrite_model_variables_with_average_value",
        "add_variable_from_reference",
    ):
        _wrap(TFOptimizer, name, functools.partial(neutral, name))

    def var_key(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, variable: Any) -> Any:
            # Not the copy that a replica may work on.
            is_known = _replica() is not None and getattr(variable, "_value", None) is not None
            return original(self, variable._value if is_known else variable)

        return method

    def tf_apply(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            chosen = original if _replica() is None else loss_scale._common_apply
            return chosen(self, grads, trainable_variables)

        return method

    _wrap(TFOptimizer, "_var_key", var_key)
    _wrap(loss_scale, "_tf_apply", tf_apply)


# Random numbers and batch normalisation ----------------------------------------------------------------------

# Odd, and far above the number of draws between two replicas' seeds in any run; small enough that the seeds of
# many replicas stay within int32. PyTorch's generator takes the sum of both words of a seed, so replicas must
# not only differ in one of them.
_SEED_STRIDE = 7_368_787


def _hook_seeds() -> None:
    import keras

    def next_seed(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, ordered: bool = True) -> Any:
            replica = _replica()
            if replica is None:
                return original(self, ordered)
            with replica.scope.untracked():  # all replicas draw equally often
                seed = original(self, ordered)
            offset = [replica.replica_id_in_sync_group * _SEED_STRIDE, 0]
            return seed + keras.ops.cast(keras.ops.convert_to_tensor(offset), seed.dtype)

        return wrapper

    _wrap(keras.random.SeedGenerator, "next", next_seed)


def _hook_torch_dropout() -> None:
    """Without a seed of its own, Dropout draws from PyTorch's global generator: the same masks on each device."""
    import keras
    from keras.src import backend

    def dropout(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
            replica = _replica()
            shared = replica is not None and replica.num_replicas_in_sync > 1
            if shared and noise_shape is None and isinstance(seed, keras.random.SeedGenerator):
                noise_shape = tuple(inputs.shape)  # Keras asks the seed generator then
            return original(inputs, rate, noise_shape, seed)

        return wrapper

    # Keras 3.16 keeps the operations of a backend in a package of their own.
    _wrap(backend.random if hasattr(backend, "random") else backend.ops.random, "dropout", dropout)


def hook_torch_modules(zero_grad: Callable[..., Any], call_module: Callable[..., Any]) -> None:
    """Puts the hooks into what is special on PyTorch; called once, by the backend.

    Args:
        zero_grad: Wraps `Layer.zero_grad`, which clears gradients.
        call_module: Wraps `TorchModuleWrapper.call`, which runs modules of PyTorch's own.
    """
    import keras

    _wrap(keras.Layer, "zero_grad", zero_grad)
    _wrap(keras.layers.TorchModuleWrapper, "call", call_module)
    _hook_torch_dropout()


def _hook_batch_normalization(native: bool) -> None:
    import keras
    from keras.src import backend

    def init(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
            wanted = synchronized and context.has_strategy() and not native
            original(self, *args, synchronized=synchronized and not wanted, **kwargs)
            self.synchronized = synchronized

        return __init__

    def moments(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False) -> Any:
            replica = _replica()
            if synchronized and replica is not None:
                return replica.moments(x, axes, keepdims)
            # One program over all replicas (JAX), or no replicas at all: the moments are global anyway.
            return original(x, axes, keepdims, synchronized and native)

        return wrapper

    _wrap(keras.layers.BatchNormalization, "__init__", init)
    # Keras 3.16 keeps the operations of a backend in a package of their own.
    _wrap(backend.nn if hasattr(backend, "nn") else backend.ops.nn, "moments", moments)


def hook_cond(cond: Callable[..., Any]) -> None:
    """Wraps `keras.ops.cond` on JAX; called once, by the backend.

    A `LossScaleOptimizer` writes variables in the branches, which JAX does not let out.
    """
    from keras.src import backend

    # Keras 3.16 keeps the operations of a backend in a package of their own.
    _wrap(backend.core if hasattr(backend, "core") else backend.ops.core, "cond", cond)


def hook_assignments(assigned: Callable[[Any], None]) -> None:
    """Calls a function after a Keras variable was assigned to outside of replicas; called once, by the backend."""
    import keras

    def direct(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, value: Any) -> None:
            original(self, value)
            assigned(self)

        return wrapper

    _wrap(keras.Variable, "_direct_assign", direct)


# State of JAX ------------------------------------------------------------------------------------------------


# The second is what Keras 3.16 calls it.
_STATE_SYNC = ("jax_state_sync", "state_sync")


def show_state(model: Any, write: Callable[[], None]) -> None:
    """Lets callbacks that look at `self.model` in the middle of an epoch see the present weights.

    Keras's `Callback.model` calls `model.jax_state_sync()` before it hands out the model; on JAX the state
    lives outside the variables during an epoch.

    Args:
        model: The model that trains.
        write: Writes the state into the variables; may be called at any time between steps.
    """
    for name in _STATE_SYNC:
        model.__dict__[name] = write


def hide_state(model: Any) -> None:
    """Undoes `show_state`."""
    for name in _STATE_SYNC:
        model.__dict__.pop(name, None)


def sync_state(model: Any) -> None:
    """Brings the present state into the variables in the middle of an epoch: what `Callback.model` calls."""
    for name in _STATE_SYNC:
        if callable(getattr(model, name, None)):
            getattr(model, name)()
            return


def stateless_scope() -> Any:
    """Returns the innermost `keras.StatelessScope` of this thread, or `None`; Keras has no public way to."""
    from keras.src.backend.common.stateless_scope import get_stateless_scope

    return get_stateless_scope()


@contextlib.contextmanager
def without_scope() -> Iterator[None]:
    """Within this, variables are as outside of any `keras.StatelessScope`."""
    from keras.src.backend.common import global_state

    scope = stateless_scope()
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


# Threads -----------------------------------------------------------------------------------------------------


def global_seed_generator() -> Any:
    """Returns the generator of all random numbers without a seed of their own; Keras has no public way to."""
    from keras.src.random.seed_generator import global_seed_generator as keras_global_seed_generator

    # Keras draws its seed from Python's random numbers; the user's next draw must be the one that comes without kdist.
    drawn = random.getstate()
    generator = keras_global_seed_generator()
    random.setstate(drawn)
    return generator


class ThreadState:
    """What Keras keeps for each thread (dtype policy, seed generator, scopes), taken along to another thread.

    Made in the thread that has the state; entered in the threads that need it.
    """

    def __init__(self) -> None:
        from keras.src.backend.common import global_state

        # Made here, or every replica would make one of its own in the middle of a step.
        global_seed_generator()
        # The second is only in Keras before 3.16.
        trackers = ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")
        self._state = {t: dict(vars(getattr(global_state, t))) for t in trackers if hasattr(global_state, t)}

    def __enter__(self) -> None:
        from keras.src.backend.common import global_state

        for tracker, state in self._state.items():
            # Lists are stacks of scopes: two threads must not push on the same one.
            own = {name: list(value) if isinstance(value, list) else value for name, value in state.items()}
            vars(getattr(global_state, tracker)).update(own)

    def __exit__(self, *exc: object) -> None:
        return None
