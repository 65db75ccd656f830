"""TPUs that a program reaches over the network: by address, or by name through the API of Cloud TPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from kdist.cluster.addresses import join_address, split_address
from kdist.cluster.clients import asking
from kdist.cluster.errors import ClusterRuntimeError
from kdist.cluster.gce import build_service
from kdist.cluster.metadata_server import Fetch
from kdist.cluster.resolver import require
from kdist.errors import ClusterConfigError

_PORT = 8470


def told_name(tpu: Any, environ: Mapping[str, str]) -> str | None:
    """Returns the TPU's name or address as the user told it: in the argument, else in TensorFlow's variables.

    Raises:
        ClusterConfigError: If several are told.
    """
    if isinstance(tpu, (list, tuple)):
        require(len(tpu) == 1, "One TPU must be named.", 'For example: tpu="my-tpu".', tpu=tpu)
        tpu = tpu[0]
    if tpu:
        return tpu.decode() if isinstance(tpu, bytes) else str(tpu)
    for name in ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME"):
        if environ.get(name):
            return environ[name]
    return node_config(environ).get("tpu_node_name")


def node_config(environ: Mapping[str, str]) -> dict[str, str]:
    """Reads `TPU_CONFIG`, which names a TPU with its project and zone.

    Example:

    >>> from kdist.cluster.cloud_tpu import node_config
    >>> node_config({"TPU_CONFIG": '{"tpu_node_name": "my-tpu", "zone": "us-central1-b"}'})["tpu_node_name"]
    'my-tpu'
    """
    text = environ.get("TPU_CONFIG", "").strip()
    try:
        config = json.loads(text or "{}")
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ClusterConfigError(
            "`TPU_CONFIG` must be a JSON object.",
            received={"TPU_CONFIG": text[:200]},
            hint="""For example: TPU_CONFIG='{"tpu_node_name": "my-tpu", "project": "my-project"}'""",
        )
    return config


@dataclasses.dataclass(frozen=True)
class CloudTPU:
    """A TPU that is named, and where to ask for it."""

    name: str
    project: str | None
    zone: str | None
    credentials: Any
    service: Any
    discovery_url: str | None
    fetch: Fetch

    def addresses(self) -> list[str]:
        """Returns the addresses of the TPU's workers.

        Raises:
            ClusterRuntimeError: If the TPU is not ready, or the API does not answer. It is a `RuntimeError`.
            ClusterConfigError: If an address cannot be read.
        """
        if "://" in self.name:
            return [_with_port(part.strip().removeprefix("grpc://")) for part in self.name.split(",")]
        full = f"projects/{self._project()}/locations/{self._zone()}/nodes/{self.name}"
        with asking("The API of Cloud TPU", f"See what it says: gcloud compute tpus describe {self.name}"):
            service = self.service or build_service("tpu", "v1", self.credentials, self.discovery_url)
            found = service.projects().locations().nodes().get(name=full).execute()
            state = found.get("state")
            endpoints = found.get("networkEndpoints") or [found] if state == "READY" else []
            addresses = [join_address(one["ipAddress"], int(one.get("port", _PORT))) for one in endpoints]
        if state != "READY":
            raise ClusterRuntimeError(
                f"TPU {self.name!r} must be ready.",
                received={"state": state},
                hint=f"See what it waits for: gcloud compute tpus describe {self.name}",
            )
        return addresses

    def _project(self) -> str:
        return self.project or self.fetch("project/project-id") or _missing("project")

    def _zone(self) -> str:
        # "projects/123/zones/us-central1-b"
        return self.zone or (self.fetch("instance/zone") or "").rpartition("/")[2] or _missing("zone")


def _missing(name: str) -> str:
    raise ClusterConfigError(
        f"The {name} of the TPU must be known.",
        received={name: None},
        hint=f'Pass it: TPUClusterResolver("my-tpu", {name}="…").',
    )


def _with_port(text: str) -> str:
    host, port = split_address(text if ":" in text else f"{text}:{_PORT}", "tpu")
    return join_address(host, port)
