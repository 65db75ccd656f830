"""`IndexedJobClusterResolver`, which reads the cluster of a Kubernetes Job with indexed pods."""

from __future__ import annotations

from collections.abc import Mapping

from kdist.cluster.addresses import split_address
from kdist.cluster.process_variables import ProcessClusterResolver, ProcessLayout, read_index
from kdist.cluster.resolver import require

INDEX, COUNT, COORDINATOR = "JOB_COMPLETION_INDEX", "KDIST_NUM_WORKERS", "KDIST_COORDINATOR_ADDRESS"


class IndexedJobClusterResolver(ProcessClusterResolver):
    """Reads the cluster of a Kubernetes Job with `completionMode: Indexed`. Every pod is a worker.

    Kubernetes sets `JOB_COMPLETION_INDEX`, the index of the pod. In the manifest, set `KDIST_NUM_WORKERS` to
    the number of pods, and `KDIST_COORDINATOR_ADDRESS` to the address of pod 0, `<job>-0.<service>:<port>`.
    The service must be headless and publish the addresses of pods that are not ready yet.

    Args:
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster import IndexedJobClusterResolver
    >>> resolver = IndexedJobClusterResolver(environ={
    ...     "JOB_COMPLETION_INDEX": "1", "KDIST_NUM_WORKERS": "2",
    ...     "KDIST_COORDINATOR_ADDRESS": "train-0.train:2222"})
    >>> resolver.task_id, resolver.master()
    (1, 'train-0.train:2222')
    """

    _HINT = (
        "Set completionMode: Indexed in the Job. In the env of its container, set KDIST_NUM_WORKERS, and "
        "KDIST_COORDINATOR_ADDRESS, for example to train-0.train:2222."
    )

    def read_layout(self, environ: Mapping[str, str]) -> ProcessLayout:
        """Reads the variables of the Job's pods; see the base class."""
        index, count = read_index(environ, INDEX, COUNT, self._HINT)
        first = environ.get(COORDINATOR, "").strip() or None
        if first is not None:
            split_address(first, COORDINATOR)
        require(
            first is not None or count == 1,
            f"`{COORDINATOR}`, the address of pod 0, is not set.",
            self._HINT,
            **{COORDINATOR: environ.get(COORDINATOR), COUNT: count},
        )
        return ProcessLayout(count, index, (first, *[None] * (count - 1)))
