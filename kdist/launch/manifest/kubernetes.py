"""Writes a Kubernetes Indexed Job with one pod per worker, stable host names and a shared volume.

If one worker fails, the backends of the other workers notice this, and these workers also fail. Kubernetes
then restarts each pod, and the workers join again at the address of worker 0. The job only defines which
exits count as failures, and ends when the first worker has used up its restarts.
"""

from __future__ import annotations

import argparse
import re
import secrets
from typing import Any

from kdist.cluster import split_address, timeouts
from kdist.cluster.environment import TOKEN_VARIABLE
from kdist.errors import InvalidArgumentError
from kdist.launch.manifest.request import Request
from kdist.launch.manifest.request import add_options as add_common_options
from kdist.launch.options import whole_number
from kdist.launch.plan import THREADS

_PORT = "2222"
# Pods wait for a node, for their image, and after a failure for Kubernetes' back-off (at most 10 minutes).
_JOIN_SECONDS = "1800"
_WRONG_CALL = 2  # exit code of kdist and argparse, and of Python if the script is missing
_WORKER = "worker"  # the name of the container
_CLAIM = "-checkpoints"  # follows the name of the job
_QUANTITY = re.compile(r"[1-9][0-9]*([KMGT]i?)?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kdist manifest kubernetes`."""
    add_common_options(parser, checkpoint_dir="/checkpoints")
    kubernetes = parser.add_argument_group("Kubernetes")
    add = kubernetes.add_argument
    add("--image", required=True, help="container image with kdist, the backend and your script")
    add("--namespace", help="namespace (default: the namespace of kubectl's context)")
    add("--port", default=_PORT, help=f"port of worker 0 (default: {_PORT})")
    add("--claim", metavar="NAME", help="existing PersistentVolumeClaim to mount (default: create a claim)")
    add("--storage", default="10Gi", metavar="SIZE", help="size of the created claim (default: 10Gi)")
    add(
        "--storage-class",
        metavar="NAME",
        help="storage class of the created claim, with access mode ReadWriteMany (default: the default class)",
    )
    add("--shared-memory", default="2Gi", metavar="SIZE", help="size of /dev/shm (default: 2Gi)")
    add("--user", default="1000", metavar="UID", help="user ID that runs the workers (default: 1000)")


def write(request: Request, options: argparse.Namespace) -> str:
    """Returns the manifest as YAML."""
    _check(request, options)
    objects = [_secret(request), _service(request), _job(request, options)]
    if options.claim is None:
        objects.insert(0, _claim(request, options))
    for one in objects:
        if options.namespace:
            one["metadata"]["namespace"] = options.namespace
    from kdist.launch.manifest import yaml  # imports PyYAML, which only this module needs

    return _head(request, options) + yaml.dump(objects)


def _check(request: Request, options: argparse.Namespace) -> None:
    split_address(f"host:{options.port}", "--port")
    for name in ("storage", "shared_memory"):
        if not _QUANTITY.fullmatch(getattr(options, name)):
            raise InvalidArgumentError(
                f"--{name.replace('_', '-')} is not a Kubernetes quantity.",
                received={name: getattr(options, name)},
                hint=f"For example: --{name.replace('_', '-')} 10Gi",
            )
    for name in ("namespace", "claim", "storage_class"):
        value = getattr(options, name)
        if value is not None and not _SUBDOMAIN.fullmatch(value):
            raise InvalidArgumentError(
                f"--{name.replace('_', '-')} is not a Kubernetes name.",
                received={name: value},
                hint="Use lowercase letters, digits, hyphens and dots. Start and end with a letter or a digit.",
            )
    if not re.fullmatch(r"[\w./:@-]+", options.image, re.ASCII):
        raise InvalidArgumentError(
            "--image is not the name of a container image.",
            received={"image": options.image},
            hint="For example: --image registry/train:1",
        )
    if not request.checkpoint_dir.startswith("/") or ":" in request.checkpoint_dir:
        raise InvalidArgumentError(
            "--checkpoint-dir is not an absolute path without colons, so no volume can be mounted there.",
            received={"checkpoint_dir": request.checkpoint_dir},
            hint="For example: --checkpoint-dir /checkpoints",
        )


def _head(request: Request, options: argparse.Namespace) -> str:
    name, where = request.name, f" --namespace {options.namespace}" if options.namespace else ""
    lines = [
        "Written by kdist manifest kubernetes, for Kubernetes 1.29 or later.",
        f"To read the output:  kubectl logs{where} --prefix --follow --max-log-requests {request.num_workers} "
        f"--selector job-name={name}",
        "If the job hangs, generate this file with `-m kdist doctor` instead of the script.",
        "This file contains the secret of the job. Do not publish it.",
        f"To restart:  kubectl delete{where} job {name}    and apply this file again. The checkpoints are kept.",
    ]
    return "".join(f"# {line}\n" for line in lines)


def _object(
    request: Request, kind: str, content: dict[str, Any], suffix: str = "", api: str = "v1"
) -> dict[str, Any]:
    metadata = {"name": request.name + suffix, "labels": _labels(request)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _labels(request: Request) -> dict[str, str]:
    return {"app.kubernetes.io/name": request.name, "app.kubernetes.io/managed-by": "kdist"}


def _claim(request: Request, options: argparse.Namespace) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": options.storage}},
    }
    if options.storage_class:
        spec["storageClassName"] = options.storage_class
    return _object(request, "PersistentVolumeClaim", {"spec": spec}, _CLAIM)


def _secret(request: Request) -> dict[str, Any]:
    """Returns the Secret with the token that authenticates the workers to each other."""
    token = request.variables.get(TOKEN_VARIABLE) or secrets.token_hex(16)
    return _object(request, "Secret", {"stringData": {"token": token}}, "-token")


def _service(request: Request) -> dict[str, Any]:
    """Returns the Service that gives the pods DNS names, even before they are ready."""
    selector = {"job-name": request.name}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return _object(request, "Service", {"spec": spec})


def _job(request: Request, options: argparse.Namespace) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": request.num_workers,
        "parallelism": request.num_workers,
        "backoffLimitPerIndex": request.max_restarts,
        "maxFailedIndexes": 0,  # other workers cannot continue without the failed worker
        "podFailurePolicy": {"rules": _rules(request)},
    }
    if request.seconds is not None:
        spec["activeDeadlineSeconds"] = request.seconds
    spec["template"] = {"metadata": {"labels": _labels(request)}, "spec": _pod(request, options)}
    return _object(request, "Job", {"spec": spec}, api="batch/v1")


def _rules(request: Request) -> list[dict[str, Any]]:
    """Returns the rules for exits that do not count as restarts, and for exits that a restart cannot fix."""

    def code(action: str, value: int) -> dict[str, Any]:
        codes = {"containerName": _WORKER, "operator": "In", "values": [value]}
        return {"action": action, "onExitCodes": codes}

    rules = [code("FailJob", _WRONG_CALL)]
    if request.max_restarts:  # otherwise a preempted job also ends, as with `kdist run`
        evicted = {"type": "DisruptionTarget", "status": "True"}
        rules += [
            code("Ignore", timeouts.PREEMPTED),
            {"action": "Ignore", "onPodConditions": [evicted]},
        ]
    return rules


def _pod(request: Request, options: argparse.Namespace) -> dict[str, Any]:
    user = whole_number("--user", options.user, 0)
    pod: dict[str, Any] = {
        # Workers do not use the Kubernetes API. The volume belongs to the group of their user.
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": user != 0,
            "runAsUser": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "subdomain": request.name,
        "restartPolicy": "Never",  # the kubelet ignores the rules; the Job creates new pods
        "terminationGracePeriodSeconds": request.grace,
        # Otherwise Python is process 1, which SIGTERM does not terminate unless the script handles it.
        "shareProcessNamespace": True,
    }
    if request.gpus:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    shared_memory = {"medium": "Memory", "sizeLimit": options.shared_memory}
    return pod | {
        "containers": [_container(request, options)],
        "volumes": [
            {
                "name": "checkpoints",
                "persistentVolumeClaim": {"claimName": options.claim or request.name + _CLAIM},
            },
            {"name": "shared-memory", "emptyDir": shared_memory},
        ],
    }


def _container(request: Request, options: argparse.Namespace) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": _WORKER,
        "image": options.image,
        # Kubernetes expands `$(…)`, and makes one `$` of `$$`.
        "command": [word.replace("$", "$$") for word in request.command],
        "env": _environment(request, options),
    }
    container["securityContext"] = {"allowPrivilegeEscalation": False}
    if resources := _resources(request):
        container["resources"] = resources
    # NCCL and the processes of a DataLoader use far more shared memory than the default of 64 MiB.
    container["volumeMounts"] = [
        {"name": "checkpoints", "mountPath": request.checkpoint_dir},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    return container


def _environment(request: Request, options: argparse.Namespace) -> list[dict[str, Any]]:
    name = request.name
    variables = {
        "KDIST_NUM_WORKERS": str(request.num_workers),
        "KDIST_COORDINATOR_ADDRESS": f"{name}-0.{name}:{options.port}",
        timeouts.JOIN_VARIABLE: _JOIN_SECONDS,
    }
    if request.cpus is not None:  # a container sees all cores of its node
        variables |= dict.fromkeys(THREADS, str(request.cpus))
    variables |= {key: value.replace("$", "$$") for key, value in request.variables.items()}
    variables.pop(TOKEN_VARIABLE, None)  # it is in the Secret
    failures = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"
    told: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in variables.items()]
    token = {"secretKeyRef": {"name": f"{name}-token", "key": "token"}}
    told.append({"name": TOKEN_VARIABLE, "valueFrom": token})
    if timeouts.RESTART_VARIABLE not in variables:
        told.append({"name": timeouts.RESTART_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": failures}}})
    return told


def _resources(request: Request) -> dict[str, dict[str, str]]:
    """Returns a worker's resources, without a CPU limit, because throttling one worker delays all others."""
    requests, limits = {}, {}
    if request.cpus is not None:
        requests["cpu"] = str(request.cpus)
    if request.megabytes is not None:
        requests["memory"] = limits["memory"] = f"{request.megabytes}Mi"
    if request.gpus:
        limits["nvidia.com/gpu"] = str(request.gpus)
    resources = {"requests": requests, "limits": limits}
    return {kind: amounts for kind, amounts in resources.items() if amounts}
