"""The one room that touches `keras.src` or changes anything in Keras.

Every hook does nothing outside a kdist strategy: models created elsewhere behave exactly as without kdist.
`install` is idempotent and runs when the first strategy is created. The hooks and why each is needed:

- `Trainer.compile` on TensorFlow: notes who asked for XLA, since Keras makes `True` of "auto".
- `Trainer.__init__` remembers the strategy a model is created under; `fit` and its relatives dispatch on it.
- `Variable.__init__` tells the strategy in scope, which gives all workers the chief's values; `assign_add` and
  `assign_sub` tell the replica's scope that a write is no new value.
- Keras's functions that write a model's files: one worker writes, and all find the file complete; and none of them
  imports TensorFlow beside another backend, to see whether something is one of its types.
- `get_metrics_result` and `_initialize_ddp` of PyTorch's trainer in Keras 3.16: any process group makes a model a DDP
  model there. kdist's own process group must not.
- `reduce_values`, `apply_mask`, `reduce_weighted_values` (keras.src.losses.loss): denominators of losses that
  are not a plain mean over rows must be counted over all replicas. There is no public place between a loss's
  per-row values and its reduction.
- `Layer.add_loss`, and what reads and clears such losses: Keras knows them by their addresses, even when they are gone,
  and drops other layers' losses that have come to be there. In kdist's scopes only those of the same scope count.
- `Mean.update_state`, `Sum.update_state`: a scalar counts as much as the rows it stands for.
- `Layer.add_loss` once more: a scalar that is known to be a sum over the rows is added up over the replicas; see
  `training/probe.py`.
- `CompileLoss._flat_losses`: the same for a loss, whose class may have a `__call__` of its own that nobody can wrap.
- `Variable.__array__` on JAX: the parts of a variable that other workers hold are gathered. `Variable.value` and
  `__repr__`: a variable may be stored with padding.
- `Optimizer.add_variable_from_reference`: notes whose variable it is, which is divided as that one.
- `Optimizer.apply`: sums the gradients over the replicas first, so that clipping comes after; where variables are
  divided, those that it makes are, too.
- TensorFlow's optimizer: its own `tf.distribute` branches reduce a second time, or fail in a `cond` and outside of
  replicas; but in a strategy of `tf.distribute`'s own, the backend-neutral methods of the base class are right.
- `SeedGenerator.next`: replicas must draw different random numbers.
- `torch_seed_generator`: the same for PyTorch's generators, without a transfer from and to the device per draw.
- `remat`, `custom_gradient` on PyTorch: a GPU's backward pass runs in threads that know of no replica, and what it
  recomputes must draw the random numbers of the forward pass.
- `Embedding.call` on JAX: of a table on parameter servers, programs take the rows that are looked up as arguments.
- `BatchNormalization(synchronized=True)` and `moments`: refused by Keras outside TensorFlow. On JAX, one collective for
  each layer in each direction.

`make test-nightly` says which name is gone when a new Keras breaks one of them.
"""

from __future__ import annotations

import threading

from kdist.keras_hooks import layers, losses, models, optimizers, saving, scalars, seeds, variables
from kdist.keras_hooks.data import (
    class_weight_to_sample_weights,
    data_adapter,
    dataset_of,
    epoch_iterator,
    first_of_py_dataset,
    forget_batches,
    is_torch_loader,
    num_array_rows,
    py_dataset_batches,
    release,
    shuffles_arrays,
    shuffles_py_dataset,
    skip_steps,
    train_validation_split,
)
from kdist.keras_hooks.layers import hook_embedding, hook_moments, hook_torch_modules
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
    without_distribution,
)
from kdist.keras_hooks.optimizers import (
    build_optimizer,
    clipped,
    count_step,
    decays,
    hook_tensorflow_optimizers,
    is_elementwise,
    is_undecayed,
    learning_rate,
    owner_in_creation,
    taking_gradients,
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
from kdist.keras_hooks.saving import without_tensorflow
from kdist.keras_hooks.scalars import OwnLoss, add_up, handed, of_all_rows
from kdist.keras_hooks.seeds import SEED_STRIDE, drawn, global_seed_generator, hook_torch_random
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
    hook_compile,
    initial_epoch,
    is_built,
    layers_are_built,
    metrics_or_logs,
    python_logs,
    pythonify_logs,
    require_compiled,
    set_initial_epoch,
    should_validate,
)
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
from kdist.keras_hooks.wrapping import strategy_of

_lock = threading.Lock()
_installed = False


def install(native_moments: bool) -> None:
    """Puts the hooks into Keras, once a process; told whether the backend's own moments can be synchronized."""
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
        optimizers.hook_optimizers()
        seeds.hook_seeds()
        layers.hook_batch_normalization(native_moments)
        _installed = True
