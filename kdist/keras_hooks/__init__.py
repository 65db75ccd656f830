"""The only package that uses `keras.src` or patches Keras.

Outside a kdist strategy the hooks do nothing: models that are created there behave exactly as without kdist.
`install` is idempotent and runs when the first strategy is created. The hooks, and the reason for each:

- `Trainer.compile` on TensorFlow: records which models request XLA, because Keras turns "auto" into `True`.
- `Trainer.__init__`: records the strategy of a model, on which `fit` and similar methods dispatch.
- `Variable.__init__`: registers the variable with the strategy in scope, which gives all workers the chief's
  values. `assign_add` and `assign_sub`: mark a write as an addition in the replica's scope.
- Keras's functions that write model files: one worker writes, and all workers find a complete file. On JAX
  and PyTorch, they must not import TensorFlow to check the type of an object.
- `get_metrics_result` and `_initialize_ddp` of PyTorch's trainer: with any process group, Keras 3.16 wraps
  models in DDP. kdist's process group must not have this effect.
- `reduce_values`, `apply_mask`, `reduce_weighted_values` (keras.src.losses.loss): if a loss is not a plain
  mean over rows, its denominator must be counted over all replicas. Keras has no public hook between a loss's
  per-row values and its reduction.
- `Layer.add_loss` and the methods that read and clear such losses: Keras identifies losses by
  address, even deleted ones, and drops a loss at a reused address. kdist's scopes keep separate sets.
- `Mean.update_state`, `Sum.update_state`: a scalar has the weight of the rows that it summarizes.
- `Layer.add_loss` again: if a scalar is known to be a sum over the rows, it is added up over the replicas;
  see `training/probe.py`.
- `CompileLoss._flat_losses`: the same for losses. A class can override `__call__`, which kdist cannot wrap.
- `Variable.__array__` on JAX: gathers the shards of a variable from other workers. `Variable.value` and
  `__repr__`: a variable may be stored with padding.
- `Optimizer.add_variable_from_reference`: records the variable that the new one belongs to.
- `Optimizer.apply`: sums gradients over the replicas before clipping, and shards new variables.
- TensorFlow's optimizer: its `tf.distribute` branches reduce a second time, or fail in a `cond` and outside
  replicas. They run only under a native `tf.distribute` strategy; elsewhere the base class's methods do.
- `SeedGenerator.next`: replicas must draw different random numbers.
- `torch_seed_generator`: the same for PyTorch's generators, without a device transfer per draw.
- `remat`, `custom_gradient` on PyTorch: a GPU's backward pass runs in threads that have no replica.
  Recomputation must draw the same random numbers as the forward pass.
- `Embedding.call` on TensorFlow and JAX: looks up single rows of a table that is on parameter servers.
- `BatchNormalization(synchronized=True)` and `moments`: Keras refuses `synchronized` outside TensorFlow. On
  JAX, each layer needs one collective per direction.
- `adapt` of `Normalization` and other layers: refuses distributed datasets, because Keras reads the worker's rows only.

`make test-nightly` reports which name is missing when a new Keras breaks a hook.
"""

from __future__ import annotations

import threading

from kdist.keras_hooks import layers, losses, models, optimizers, saving, scalars, seeds, trainer, variables
from kdist.keras_hooks.data import (
    before_epoch_end,
    class_weight_to_sample_weights,
    create_batches,
    data_adapter,
    dataset_of,
    epoch_iterator,
    first_of_py_dataset,
    forget_batches,
    num_array_rows,
    py_dataset_batches,
    reads_generator,
    release,
    shuffles_arrays,
    shuffles_py_dataset,
    skip_steps,
    torch_loader_of,
    train_validation_split,
)
from kdist.keras_hooks.layers import hook_embedding, hook_moments, hook_torch_images, hook_torch_modules
from kdist.keras_hooks.losses import forget_layer_losses
from kdist.keras_hooks.models import (
    all_variables,
    build,
    build_layers,
    callback_list,
    claim_process_group,
    joined_ragged,
    layer_paths,
    reads_logs_at_once,
    stateful_recurrent_layers,
    without_distribution,
)
from kdist.keras_hooks.optimizers import (
    accumulators,
    build_optimizer,
    clipped,
    count_step,
    decays,
    hook_tensorflow_optimizers,
    is_elementwise,
    keeping_learning_rates,
    learning_rate,
    marking_gradients,
    only_accumulates,
    owner_in_creation,
    step_variable,
    taking_gradients,
    trained_variables,
)
from kdist.keras_hooks.own import (
    compute_step,
    has_torch_modules,
    is_own,
    kept_buffers,
    own_layers,
    own_losses,
    own_metrics,
)
from kdist.keras_hooks.recomputing import hook_torch_recomputing
from kdist.keras_hooks.recorded import StepState, has_own_values, own_code, step_tensors
from kdist.keras_hooks.saving import without_tensorflow
from kdist.keras_hooks.scalars import OwnLoss, add_up, handed, of_all_rows
from kdist.keras_hooks.seeds import SEED_STRIDE, drawn, draws_again, global_seed_generator, hook_torch_random
from kdist.keras_hooks.served import (
    arriving,
    new_variable,
    offset_seed,
    record_of,
    reduced,
    seed_stride,
    serve,
    stays_local,
    variable_like,
    variable_state,
)
from kdist.keras_hooks.threads import ThreadState
from kdist.keras_hooks.trainer import (
    asks_for_jit,
    compiled_state,
    has_all_variables,
    hook_compile,
    initial_epoch,
    is_built,
    is_reset,
    layers_are_built,
    metrics_or_logs,
    needs_batch,
    overrides,
    python_logs,
    pythonify_logs,
    require_compiled,
    set_initial_epoch,
    should_validate,
)
from kdist.keras_hooks.untracked import Buffer, boundaries, buffers, finish_loading
from kdist.keras_hooks.variables import (
    first_value,
    hide_state,
    hook_assignments,
    hook_cond,
    hook_reading,
    native_value,
    owner_path,
    set_native_value,
    show_state,
    stateless_scope,
    sync_state,
    without_scope,
)
from kdist.keras_hooks.wrapping import strategy_of, temporarily

_lock = threading.Lock()
_installed = False


def install(native_moments: bool) -> None:
    """Installs the hooks in Keras, once per process; for `native_moments` see `Backend`."""
    global _installed
    with _lock:
        if _installed:
            return
        models.hook_models()
        variables.hook_variables()
        saving.hook_saving()
        models.hook_torch_distribution()
        losses.hook_losses()
        losses.hook_layer_losses()
        scalars.hook_scalars()
        trainer.hook_functions()
        optimizers.hook_optimizers()
        seeds.hook_seeds()
        layers.hook_batch_normalization(native_moments)
        layers.hook_adapt()
        _installed = True
