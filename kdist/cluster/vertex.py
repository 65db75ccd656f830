"""`VertexClusterResolver`, which reads the worker pools of a Vertex AI custom training job."""

from __future__ import annotations

import json
from typing import Any

from kdist.cluster.tf_config import TFConfig, TFConfigClusterResolver, parse_tf_config
from kdist.errors import ClusterConfigError, malformed_as

NAME = "CLUSTER_SPEC"
# The documented job of each pool.
_JOBS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
_HINT = "Unset CLUSTER_SPEC, or describe the cluster in TF_CONFIG, which has priority."


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
    >>> from kdist.cluster import VertexClusterResolver
    >>> spec = {"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"]},
    ...         "task": {"type": "workerpool1", "index": 0}, "environment": "cloud"}
    >>> resolver = VertexClusterResolver(environ={"CLUSTER_SPEC": json.dumps(spec)})
    >>> resolver.task_type, resolver.task_id, resolver.master()
    ('worker', 0, 'b:2222')
    """

    def _described(self) -> TFConfig:
        text = self._environ.get(NAME, "")
        try:
            with malformed_as(
                lambda error: ClusterConfigError(
                    f"`{NAME}` is not a JSON object with the worker pools of the cluster and this task.",
                    received={NAME: text[:200], "error": error},
                )
            ):
                return parse_tf_config(json.dumps(_renamed(json.loads(text))))
        except ClusterConfigError as error:
            problem = error.problem.replace("TF_CONFIG", NAME)
            raise ClusterConfigError(problem, received=error.received, hint=_HINT) from None


def _renamed(spec: dict[str, Any]) -> dict[str, Any]:
    task = dict(spec["task"]) if spec.get("task") else {}
    task["type"] = _JOBS.get(task.get("type", ""), task.get("type"))
    return {
        "cluster": {_JOBS.get(pool, pool): tasks for pool, tasks in spec["cluster"].items() if tasks},
        "task": {"type": task["type"], "index": task.get("index")},
    }
