"""Chooses the devices of this process and finds the workers of the cluster."""

from __future__ import annotations

from collections.abc import Sequence

from kdist.backends import get_backend
from kdist.backends.contract import Backend, Runtime
from kdist.backends.messages import check_equal
from kdist.cluster import ClusterResolver, TFConfigClusterResolver, discover
from kdist.communication.options import CommunicationOptions, hint_ignored
from kdist.errors import InvalidArgumentError
from kdist.topology import Mirrored, Sharded, Topology


def choose_devices(
    backend: Backend, devices: Sequence[str] | None, argument: str = "devices"
) -> tuple[str, ...]:
    """Returns the short names of the user's or the backend's devices, and checks that they exist."""
    names = check_device_names(devices, argument) if devices is not None else backend.list_devices()
    names = backend.require_devices(names)
    if len(set(names)) != len(names):
        raise InvalidArgumentError(
            f"`{argument}` contains a device twice.",
            received={argument: devices},
            hint="Name each device once.",
        )
    return names


def check_device_names(devices: Sequence[str], argument: str = "devices") -> tuple[str, ...]:
    """Returns the names as a tuple. Raises an error if it is not a list of at least one name."""
    is_list = isinstance(devices, Sequence) and not isinstance(devices, str)
    if not (is_list and devices and all(isinstance(name, str) for name in devices)):
        raise InvalidArgumentError(
            f"`{argument}` is not a list of device names, or the list is empty.",
            received={argument: devices},
            hint=f'Pass at least one device, for example {argument}=["cpu:0", "cpu:1"]',
        )
    return tuple(devices)


def check_options(options: CommunicationOptions | None) -> CommunicationOptions:
    if isinstance(options, CommunicationOptions | None):
        return options or CommunicationOptions()
    raise InvalidArgumentError(
        "`communication_options` is not an instance of kdist.experimental.CommunicationOptions.",
        received={"communication_options": options},
        hint="Pass an instance, for example kdist.experimental.CommunicationOptions(timeout_seconds=600)",
    )


def join_workers(topology: Topology, options: CommunicationOptions) -> Runtime:
    """Joins the workers, and compares the options that must be equal. Returns the runtime of a strategy."""
    runtime = get_backend().create_runtime(topology, options)
    if runtime.num_workers > 1:
        if options.compression_rank is None:
            runtime.compression = options.compression
        elif isinstance(topology.storage, Mirrored):
            from kdist.backends.low_rank import LowRank  # needs Keras

            runtime.low_rank = LowRank(options.compression_rank)
        else:
            why = "not every device holds all variables."
            hint_ignored(f"compression={options.compression!r}", why, runtime.worker_index)
        with runtime.engine_errors():
            facts = {"compression": options.compression, "compression_rank": options.compression_rank}
            check_equal(runtime, "communication options", facts, "Pass the same compression on all workers.")
    return runtime


def find_workers(
    resolver: ClusterResolver | None, devices: Sequence[str] | None, storage: Mirrored | Sharded | None = None
) -> tuple[Topology, ClusterResolver]:
    """Returns the devices of this worker with its cluster, and the resolver of the cluster.

    The devices come from the user, or else from the resolver. `()` means that the backend chooses.
    """
    cluster = discover(resolver)
    names = check_device_names(devices) if devices is not None else _told_devices(resolver)
    topology = Topology(names, cluster if cluster.num_workers > 1 else None, storage or Mirrored())
    return topology, cluster.resolver or TFConfigClusterResolver()


def _told_devices(resolver: ClusterResolver | None) -> tuple[str, ...]:
    """Returns the devices that a resolver sets explicitly. Backends detect devices better than resolvers."""
    if not isinstance(resolver, ClusterResolver):
        return ()
    if type(resolver).num_accelerators is ClusterResolver.num_accelerators:
        return ()
    count = resolver.num_accelerators().get("GPU")
    return () if count is None else tuple(f"gpu:{i}" for i in range(count)) or ("cpu:0",)
