"""The resolvers give the same answers as TensorFlow's own for the same variables."""

from __future__ import annotations

from typing import Any

from tests.helpers.processes import run


def both_say(own: bool) -> list[Any]:
    """Returns the answers of kdist's or TensorFlow's resolvers; needs a process with TensorFlow."""
    import json
    from types import SimpleNamespace as Object

    import tensorflow as tf
    from tensorflow.python.distribute.cluster_resolver.sagemaker_cluster_resolver import (
        SageMakerClusterResolver,
    )

    import kdist
    from kdist.cluster import environment

    module = kdist.cluster_resolver if own else tf.distribute.cluster_resolver
    sagemaker = kdist.cluster_resolver.SageMakerClusterResolver if own else SageMakerClusterResolver

    def said(resolver: Any) -> list[Any]:
        tasks = [
            resolver.cluster_spec().as_dict(),
            resolver.task_type,
            resolver.task_id,
            resolver.master(),
            resolver.environment,
        ]
        resolver.task_id = 0
        return [*tasks, resolver.master(), resolver.master("worker", 0)]

    found = []
    with environment.patched(SM_HOSTS='["algo-2", "algo-10", "algo-1"]', SM_CURRENT_HOST="algo-2"):
        found.append(said(sagemaker()))
        found.append(said(sagemaker(80, "worker", 1, "grpc", "cloud")))

    tasks = [("chief", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)]
    cluster = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["d:1"]}
    for job, index in tasks:
        config = {"cluster": cluster, "task": {"type": job, "index": index}, "rpc_layer": "grpc"}
        with environment.patched(TF_CONFIG=json.dumps(config)):
            resolver = module.TFConfigClusterResolver()
            spec = resolver.cluster_spec()
            found.append([resolver.task_type, resolver.task_id, resolver.rpc_layer, spec.as_dict()])
            found.append([[spec.num_tasks(name), spec.job_tasks(name)] for name in cluster])
        simple = module.SimpleClusterResolver(spec, task_type=job, task_id=index, rpc_layer="grpc")
        found.append([simple.task_type, simple.task_id, simple.cluster_spec().task_address("worker", 1)])
        found.append([simple.master(), simple.master("ps", 0)])

    # The pods share the network of their node, because TensorFlow's resolver uses the node's address.
    pods = [
        Object(
            metadata=Object(name=f"w-{i}", labels={}), status=Object(phase="Running", pod_ip=ip, host_ip=ip)
        )
        for i, ip in ((10, "10.0.0.1"), (2, "10.0.0.2"), (0, "10.0.0.3"))
    ]

    def listed(*namespace, label_selector, **_):
        return Object(items=pods)

    client = Object(list_pod_for_all_namespaces=listed, list_namespaced_pod=listed)
    kubernetes = module.KubernetesClusterResolver({"worker": ["job-name=w"]}, 2222, override_client=client)
    kubernetes.task_type = "worker"
    found.append(said(kubernetes))

    page = {"items": [{"instance": f"zones/z/instances/{name}"} for name in ("4", "30", "12")]}
    request = Object(execute=lambda: page)
    machines = Object(
        get=lambda instance, **_: Object(
            execute=lambda: {"networkInterfaces": [{"networkIP": f"10.0.0.{instance}"}]}
        )
    )
    groups = Object(listInstances=lambda **_: request, listInstances_next=lambda **_: None)
    service = Object(instanceGroups=lambda: groups, instances=lambda: machines)
    found.append(said(module.GCEClusterResolver("p", "z", "g", 1, credentials=None, service=service)))

    local = module.TPUClusterResolver("local")
    found.append([local.cluster_spec().as_dict(), local.master(), local.task_type, local.task_id])
    found.append([local.get_job_name(), local.get_master(), local.get_coordination_service_leader()])
    found.append([one.name for one in module.KubernetesExecutableLocation])
    return found


def test_they_say_what_tensorflow_s_say() -> None:
    (theirs,) = run("tensorflow", 1, both_say, False)
    (ours,) = run("tensorflow", 1, both_say, True)
    assert ours == theirs and len(ours) == 7 + 16
