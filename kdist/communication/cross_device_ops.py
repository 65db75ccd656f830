"""How the devices of one worker add up their gradients, in the words of `tf.distribute`."""

from __future__ import annotations

from kdist.errors import InvalidArgumentError


class CrossDeviceOps:
    """Base class of the ways to reduce over the devices of one worker.

    TensorFlow follows the choice. JAX's compiler and PyTorch's process groups choose themselves, and no backend calls a
    class of one's own: there it is a hint that has no effect, of which a warning tells. The numbers are the same.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/CrossDeviceOps
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ReductionToOneDevice(CrossDeviceOps):
    """Adds up on one device and copies the result to the others.

    Args:
        reduce_to_device: The device to add up on; `None` for the first one.
        accumulation_fn: Ignored outside TensorFlow.
    """

    def __init__(self, reduce_to_device: str | None = None, accumulation_fn: object = None) -> None:
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn


class _PackedOps(CrossDeviceOps):
    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise InvalidArgumentError("num_packs must not be negative.", received={"num_packs": num_packs})
        self.num_packs = num_packs


class HierarchicalCopyAllReduce(_PackedOps):
    """Adds up along the tree of links between the GPUs of one host.

    Args:
        num_packs: Into how many packs the gradients are grouped; 0 for none.
    """


class NcclAllReduce(_PackedOps):
    """NVIDIA's all-reduce; needs GPUs.

    Args:
        num_packs: Into how many packs the gradients are grouped; 0 for none.
    """
