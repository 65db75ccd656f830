"""`ClusterResolver`, which describes a cluster and this process's task in it, and two general resolvers."""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.environment import visible_gpus
from kdist.cluster.errors import ClusterKeyError, ClusterTypeError
from kdist.errors import ClusterConfigError, InvalidArgumentError, KdistError


def format_master(address: str | None, rpc_layer: str | None = None) -> str:
    """Returns an address, prefixed with the protocol if there is one."""
    return f"{rpc_layer}://{address}" if rpc_layer else (address or "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The task of this process and the protocol of the cluster, as described by a source."""

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None


class ClusterResolver(abc.ABC):
    """Describes the cluster of a process and the task of the process in it.

    Create a subclass if kdist does not support your cluster: implement `cluster_spec` and `master`, and set
    `task_type` and `task_id` in the constructor. A strategy reads the cluster once, when you create it.

    Example:

    >>> from kdist.cluster_resolver import ClusterResolver, ClusterSpec
    >>> class Fixed(ClusterResolver):
    ...     def cluster_spec(self):
    ...         return ClusterSpec({"worker": ["host0:2222", "host1:2222"]})
    ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
    ...         return ""
    >>> resolver = Fixed()
    >>> resolver.task_type, resolver.task_id = "worker", 1
    >>> resolver.task_id
    1
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str = ""
    _environ: Mapping[str, str] = os.environ

    def _described(self) -> Task | ClusterResolver:
        """Returns the task and the protocol that apply unless they are set explicitly."""
        return Task()

    def __repr__(self) -> str:
        name = type(self).__name__
        try:
            described = self._described()
            task_type = described.task_type if self._task_type is None else self._task_type
            task_id = described.task_id if self._task_id is None else self._task_id
        except KdistError as error:  # repr() must not raise
            return f"<{name}: {error}>"
        return f"<{name}: task {task_type} {task_id}>" if task_type is not None else f"<{name}>"

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the current cluster.

        Returns:
            A `ClusterSpec`, resolved again at each call.
        """

    @abc.abstractmethod
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the given task, or of the master by default.

        Args:
            task_type: The job of the task.
            task_id: The index of the task within the job.
            rpc_layer: The protocol to prefix to the address. Defaults to the resolver's protocol.

        Returns:
            An address, or an empty string if there is no remote master.
        """

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Returns the number of accelerators of this process, without importing a framework.

        Args:
            task_type: Ignored, because kdist can only inspect the machine of this process.
            task_id: Ignored, for the same reason.
            config_proto: Ignored. Accepted for compatibility with `tf.distribute`.

        Returns:
            A dictionary such as `{"GPU": 2}`. It is empty if no accelerator was found.
        """
        count = len(visible_gpus(self._environ))
        return {"GPU": count} if count else {}

    @property
    def environment(self) -> str:
        """The name of the environment. Empty unless it was passed to the constructor."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """The job of this process ("chief", "worker", "ps" or "evaluator"), or `None`."""
        return self._described().task_type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process within its job, or `None`."""
        return self._described().task_id if self._task_id is None else int(self._task_id)

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol of the cluster's tasks, or `None`. Only TensorFlow uses it."""
        return self._described().rpc_layer if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer


class TaskClusterResolver(ClusterResolver):
    """Base class of resolvers whose `master()` is the task of this process."""

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the given task. Defaults to this task, or to "" if it is unknown."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return format_master(address, rpc_layer or self.rpc_layer)


class SimpleClusterResolver(ClusterResolver):
    """A resolver that returns the values passed to its constructor.

    Args:
        cluster_spec: The cluster, as a `ClusterSpec`.
        master: The address that `master()` returns by default.
        task_type: The job of this process.
        task_id: The index of this process within the job.
        environment: The value of the property `environment`.
        num_accelerators: The value that `num_accelerators()` returns, such as `{"GPU": 2}`.
        rpc_layer: The protocol of TensorFlow's tasks, such as "grpc".

    Raises:
        ClusterTypeError: If `cluster_spec` or `master` has the wrong type. It is also a `TypeError`.

    Example:

    >>> from kdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
    >>> spec = ClusterSpec({"worker": ["host0:2222", "host1:2222"]})
    >>> resolver = SimpleClusterResolver(spec, task_type="worker", task_id=1, rpc_layer="grpc")
    >>> resolver.master("worker", 0)
    'grpc://host0:2222'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if isinstance(cluster_spec, Mapping) or not callable(getattr(cluster_spec, "as_dict", None)):
            raise ClusterTypeError(
                "`cluster_spec` is not a ClusterSpec.",
                received={"cluster_spec": cluster_spec},
                hint='Pass a ClusterSpec, for example:\nClusterSpec({"worker": ["host0:2222", "host1:2222"]})',
            )
        if not isinstance(master, str):
            raise ClusterTypeError(
                "`master` is not a string.",
                received={"master": master},
                hint='Pass an address, for example: master="host0:2222"',
            )
        self._cluster_spec = ClusterSpec(cluster_spec)
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster that was passed to the constructor."""
        return self._cluster_spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the given task. Defaults to the `master` passed to the constructor."""
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return format_master(address, rpc_layer or self._rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Returns the `num_accelerators` passed to the constructor, without any detection."""
        return dict(self._num_accelerators)


class UnionResolver(ClusterResolver):
    """Joins the clusters of several resolvers into one.

    The task, the protocol and the accelerators come from the first resolver. You can override the task and
    the protocol.

    Args:
        *args: The resolvers.
        **kwargs: `task_type`, `task_id` and `rpc_layer`, which override the values of the first resolver.

    Raises:
        ClusterTypeError: If an argument is not a `ClusterResolver`. It is also a `TypeError`.
        InvalidArgumentError: If there is no resolver or an unknown keyword. It is also a `ValueError`.

    Example:

    >>> from kdist.cluster_resolver import ClusterSpec, SimpleClusterResolver, UnionResolver
    >>> workers = SimpleClusterResolver(ClusterSpec({"worker": ["host0:2222"]}), task_type="worker")
    >>> servers = SimpleClusterResolver(ClusterSpec({"ps": ["host1:2222"]}))
    >>> UnionResolver(workers, servers).cluster_spec()
    ClusterSpec({'ps': ['host1:2222'], 'worker': ['host0:2222']})
    """

    def __init__(self, *args: ClusterResolver, **kwargs: Any) -> None:
        self._rpc_layer = kwargs.pop("rpc_layer", None)
        self._task_type = kwargs.pop("task_type", None)
        self._task_id = kwargs.pop("task_id", None)
        if kwargs:
            raise InvalidArgumentError(
                "UnionResolver does not accept these keyword arguments.",
                received=kwargs,
                hint="Pass only the keywords `task_type`, `task_id` and `rpc_layer`.",
            )
        if not args:
            raise InvalidArgumentError(
                "UnionResolver was called without a resolver.",
                hint="Pass at least one resolver, for example: UnionResolver(first, second)",
            )
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise ClusterTypeError(
                    "An argument of UnionResolver is not a ClusterResolver.",
                    received={"argument": resolver},
                    hint="Wrap a ClusterSpec in SimpleClusterResolver(...).",
                )
        self._cluster_resolvers = args

    def _described(self) -> ClusterResolver:
        return self._cluster_resolvers[0]

    def cluster_spec(self) -> ClusterSpec:
        """Returns the union of the clusters.

        A job that is a list in all clusters is concatenated in the order of the resolvers. A job that is
        sparse in any cluster is merged by task index.

        Returns:
            A `ClusterSpec`.

        Raises:
            ClusterKeyError: If two resolvers contain the same index of a sparse job. It is also a `KeyError`.
        """
        described = [resolver.cluster_spec().as_dict() for resolver in self._cluster_resolvers]
        merged: dict[str, Any] = {}
        for job in dict.fromkeys(name for cluster in described for name in cluster):
            parts = [cluster[job] for cluster in described if job in cluster]
            if all(isinstance(part, list) for part in parts):
                merged[job] = [address for part in parts for address in part]
            else:
                merged[job] = _merge_sparse(job, parts)
        return ClusterSpec(merged)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the given task. Defaults to the master of the first resolver."""
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return format_master(address, rpc_layer or self._rpc_layer)
        return self._cluster_resolvers[0].master(rpc_layer=rpc_layer)

    @property
    def environment(self) -> str:
        """The environment of the first resolver."""
        return self._cluster_resolvers[0].environment

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Returns the accelerators of the first resolver."""
        return self._cluster_resolvers[0].num_accelerators(task_type, task_id, config_proto)


def _merge_sparse(job: str, parts: list[list[str] | dict[int, str]]) -> dict[int, str]:
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        twice = sorted(set(tasks) & set(merged))
        if twice:
            raise ClusterKeyError(
                f"Two resolvers describe the same task of the sparse job {job!r}.",
                received={"indices described twice": twice},
                hint="Remove the task from one of the resolvers.",
            )
        merged.update(tasks)
    return merged


def require(condition: bool, problem: str, hint: str = "", **received: object) -> None:
    """Raises `ClusterConfigError` unless a condition holds."""
    if not condition:
        raise ClusterConfigError(problem, received=received, hint=hint)
