"""`TF_CONFIG`, a cluster description that kdist supports on every backend, and its form on Vertex AI."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from kdist.cluster.addresses import split_address
from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.resolver import ClusterResolver, Task, format_master
from kdist.errors import ClusterConfigError, malformed_as

KNOWN_JOBS = ("chief", "worker", "ps", "evaluator")
_EXAMPLE = (
    """Set it as in this example:\nexport TF_CONFIG='{"cluster": {"worker": ["host0:2222", "host1:2222"]}, """
    """"task": {"type": "worker", "index": 0}}'"""
)

VERTEX_NAME = "CLUSTER_SPEC"
# The documented job of each pool.
_POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
_VERTEX_HINT = "Unset CLUSTER_SPEC, or describe the cluster in TF_CONFIG, which has priority."


@dataclasses.dataclass(frozen=True, kw_only=True)
class TFConfig(Task):
    """The parsed and validated `TF_CONFIG`."""

    cluster: ClusterSpec
    session_master: str | None


def parse_tf_config(text: str | None) -> TFConfig:
    """Parses `TF_CONFIG` and validates each field.

    Blank text and `{}` give an empty cluster. The task may be missing, because a resolver can override it.

    Raises:
        ClusterConfigError: If a field is invalid. The message contains the name of the field.

    Example:

    >>> from kdist.cluster.tf_config import parse_tf_config
    >>> text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    >>> parse_tf_config(text).task_id
    1
    """
    config = _load(text)
    cluster = _read_cluster(config.get("cluster"))
    task_type, task_id = _read_task(config.get("task"), cluster)
    return TFConfig(
        cluster=cluster,
        task_type=task_type,
        task_id=task_id,
        rpc_layer=_read_text(config, "rpc_layer"),
        session_master=_read_text(config, "session_master"),
    )


def _wrong(field: str, problem: str, value: object) -> ClusterConfigError:
    if len(repr(value)) > 200:
        value = f"{str(value)[:190]}…"
    return ClusterConfigError(f"`TF_CONFIG`: {field} {problem}.", received={field: value}, hint=_EXAMPLE)


def _load(text: str | None) -> dict[str, Any]:
    if text is None or not text.strip():
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong("the value", f"is not JSON ({error})", text) from None
    if not isinstance(config, dict):
        raise _wrong("the value", "is not a JSON object", config)
    for name in config if "cluster" not in config else ():
        if name.lower() in ("cluster", *KNOWN_JOBS):
            raise _wrong(f'["{name}"]', 'is not a field, and ["cluster"] is missing', config[name])
    return config


def _read_text(config: Mapping[str, Any], name: str) -> str | None:
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong(f'["{name}"]', "is not a string", value)
    return value


def _read_cluster(cluster: Any) -> ClusterSpec:
    if cluster is None or cluster == {}:
        return ClusterSpec({})
    if not isinstance(cluster, dict):
        raise _wrong('["cluster"]', "is not an object from job names to addresses", cluster)
    seen: dict[str, str] = {}
    for job, tasks in cluster.items():
        _check_job(job, tasks)
        pairs = enumerate(tasks) if isinstance(tasks, list) else tasks.items()
        for index, address in pairs:
            field = f'["cluster"]["{job}"][{index}]'
            if isinstance(index, str) and not (index.isascii() and index.isdigit()):
                raise _wrong(field, "has an index that is not a non-negative integer", index)
            host, port = split_address(address, f"TF_CONFIG{field}")
            if f"{host}:{port}" in seen:
                raise _wrong(field, f"is the same address as {seen[f'{host}:{port}']}", address)
            seen[f"{host}:{port}"] = field
    if not cluster.get("chief") and not cluster.get("worker"):
        raise _wrong('["cluster"]', 'has no task of the job "chief" or "worker"', cluster)
    return ClusterSpec(cluster)


def _check_job(job: str, tasks: Any) -> None:
    field = f'["cluster"]["{job}"]'
    if job not in KNOWN_JOBS:
        raise _wrong(field, f"is not one of the jobs {', '.join(KNOWN_JOBS)}", job)
    if not isinstance(tasks, (list, dict)):
        raise _wrong(field, "is neither a list of addresses nor an object from index to address", tasks)
    if job in ("chief", "evaluator") and len(tasks) > 1:
        raise _wrong(field, "has more than one task", tasks)


def _read_task(task: Any, cluster: ClusterSpec) -> tuple[str | None, int | None]:
    if task is None:
        return None, None
    if not isinstance(task, dict):
        raise _wrong('["task"]', 'is not an object with "type" and "index"', task)
    task_type = task.get("type")
    if task_type is not None and task_type not in KNOWN_JOBS:
        raise _wrong('["task"]["type"]', f"is not one of {', '.join(KNOWN_JOBS)}", task_type)
    task_id = _read_index(task.get("index"))
    if cluster and task_type is not None and task_type != "evaluator":
        if task_type not in cluster.jobs:
            raise _wrong(
                '["task"]["type"]', f"is not one of the jobs of the cluster, {cluster.jobs}", task_type
            )
        if task_id is not None and task_id not in cluster.task_indices(task_type):
            known = cluster.task_indices(task_type)
            raise _wrong(
                '["task"]["index"]',
                f'is not one of the indices of ["cluster"]["{task_type}"], {known}',
                task_id,
            )
    return task_type, task_id


def _read_index(index: Any) -> int | None:
    if index is None:
        return None
    if isinstance(index, str) and index.isascii() and index.isdigit() and len(index) < 10:
        index = int(index)  # some operators write the index as a string, which TensorFlow accepts
    if not isinstance(index, int) or isinstance(index, bool):
        raise _wrong('["task"]["index"]', "is not an integer", index)
    if index < 0:
        raise _wrong('["task"]["index"]', "is negative", index)
    return index


class TFConfigClusterResolver(ClusterResolver):
    """Reads the cluster from the environment variable `TF_CONFIG`.

    It reads and validates the variable again at each access.

    Args:
        task_type: Overrides `task.type` of the variable.
        task_id: Overrides `task.index` of the variable.
        rpc_layer: Overrides `rpc_layer` of the variable.
        environment: The value of the property `environment`.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> import json
    >>> from kdist.cluster_resolver import TFConfigClusterResolver
    >>> config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    >>> resolver = TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps(config)})
    >>> resolver.task_type, resolver.task_id, resolver.master()
    ('worker', 1, 'b:1')
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._task_type = None if task_type is None else str(task_type)
        self._task_id = None if task_id is None else int(task_id)
        self._rpc_layer = rpc_layer
        self._environment = environment  # type: ignore[assignment]  # may be None, as in TensorFlow
        if environ is not None:
            self._environ = environ

    def _described(self) -> TFConfig:
        return parse_tf_config(self._environ.get("TF_CONFIG"))

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster in `TF_CONFIG`, which may be empty.

        Raises:
            ClusterConfigError: If a field of `TF_CONFIG` is invalid.
        """
        return self._described().cluster

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the given task. Defaults to this task.

        If `TF_CONFIG` contains `session_master`, returns it instead. With only one task, returns "".
        """
        config = self._described()
        if config.session_master is not None:
            return config.session_master
        if sum(config.cluster.num_tasks(job) for job in config.cluster.jobs) <= 1:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise _wrong('["task"]', 'does not have "type" and "index"', None)
        return format_master(config.cluster.task_address(task_type, task_id), rpc_layer or self.rpc_layer)


class VertexClusterResolver(TFConfigClusterResolver):
    """Reads the cluster from `CLUSTER_SPEC`, which Vertex AI sets in the containers of a custom training job.

    It is like `TF_CONFIG`, but with worker pools instead of jobs. Pool 0 contains the chief, pool 1 the
    workers, pool 2 the parameter servers, and pool 3 the evaluator.

    Args:
        task_type: Overrides the job of this task.
        task_id: Overrides the index of this task.
        rpc_layer: The protocol of TensorFlow's tasks.
        environment: The value of the property `environment`.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> import json
    >>> from kdist.cluster_resolver import VertexClusterResolver
    >>> spec = {"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"]},
    ...         "task": {"type": "workerpool1", "index": 0}, "environment": "cloud"}
    >>> resolver = VertexClusterResolver(environ={"CLUSTER_SPEC": json.dumps(spec)})
    >>> resolver.task_type, resolver.task_id, resolver.master()
    ('worker', 0, 'b:2222')
    """

    def _described(self) -> TFConfig:
        text = self._environ.get(VERTEX_NAME, "")
        try:
            with malformed_as(
                lambda error: ClusterConfigError(
                    f"`{VERTEX_NAME}` is not a JSON object with the worker pools of the cluster and this task.",
                    received={VERTEX_NAME: text[:200], "error": error},
                )
            ):
                return parse_tf_config(json.dumps(_renamed(json.loads(text))))
        except ClusterConfigError as error:
            problem = error.problem.replace("TF_CONFIG", VERTEX_NAME)
            raise ClusterConfigError(problem, received=error.received, hint=_VERTEX_HINT) from None


def _renamed(spec: dict[str, Any]) -> dict[str, Any]:
    task = dict(spec["task"]) if spec.get("task") else {}
    task["type"] = _POOLS.get(task.get("type", ""), task.get("type"))
    return {
        "cluster": {_POOLS.get(pool, pool): tasks for pool, tasks in spec["cluster"].items() if tasks},
        "task": {"type": task["type"], "index": task.get("index")},
    }
