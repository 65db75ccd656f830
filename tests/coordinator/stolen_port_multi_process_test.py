"""Another program takes the ports of the workers and servers before they start, and answers with pickles.

The coordinator must not load these pickles or send data. It must end with an error that names the task.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kdist.coordinator import rpc, tls
from tests.coordinator.clusters import Cluster

_COORDINATE = """
    strategy = kdist.ParameterServerStrategy(timeout=60)
    coordinator = kdist.coordinator.ClusterCoordinator(strategy)
    coordinator.schedule(lambda: 7)
    coordinator.join()
"""


class _Harm:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self._path)!r}, 'w').close()",)


class _Stranger(grpc.GenericRpcHandler):
    """Answers every call as if a function had raised an error, with a pickle that writes a file."""

    def __init__(self, harm: Path) -> None:
        self.heard: list[Any] = []
        pickled = np.frombuffer(pickle.dumps(_Harm(harm)), np.uint8)
        self._answer = list(rpc._written({"raised": True}, [pickled]))

    def service(self, details: Any) -> Any:
        self.heard.append((details.method, details.invocation_metadata))

        def answer(received: Any, context: Any) -> Iterator[bytes]:
            self.heard.append(next(iter(received), None))
            yield from self._answer

        return grpc.stream_stream_rpc_method_handler(answer)


@pytest.mark.kills(servers_secret_not_asked_for="[torch-plain]")
@pytest.mark.parametrize(("backend", "kind"), [("torch", "plain"), ("jax", "another key")])
@pytest.mark.in_turn(4)
def test_a_stranger_at_a_task_s_port_learns_and_runs_nothing(backend: str, kind: str, tmp_path: Path) -> None:
    cluster = Cluster(backend, tmp_path, 1, 1)
    stranger, harm = _Stranger(tmp_path / "harm"), tmp_path / "harm"
    server = grpc.server(ThreadPoolExecutor(8), handlers=[stranger])
    addresses = [*cluster.spec["worker"], *cluster.spec["ps"]]
    for address in addresses:
        if kind == "plain":
            server.add_insecure_port(address)
        else:
            key, certificate, root = tls._identity("a secret of its own")
            credentials = grpc.ssl_server_credentials([(key, certificate)], root, require_client_auth=False)
            server.add_secure_port(address, credentials)
    server.start()
    began = time.monotonic()
    chief = cluster.coordinate(_COORDINATE)
    try:
        assert chief.wait(60) == 1, chief.stdout() + chief.stderr()
        assert time.monotonic() - began < 40  # well before the `timeout` of the strategy
        said = chief.stderr()
        assert f"ps 0 ({cluster.spec['ps'][0]}) failed to authenticate with the secret of this job" in said
        assert "KDIST_CLUSTER_TOKEN" in said
        assert "Channel closed" not in said
        assert stranger.heard == []
        assert not harm.exists()
    finally:
        cluster.close()
        server.stop(0).wait()
