"""The server of a task of type "worker" or "ps", for backends without parameter servers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kdist.backends.coordination import Engine
from kdist.cluster.roles import task_name
from kdist.coordinator.group import GroupTask
from kdist.coordinator.rpc import Handler, Message, Peer, Service
from kdist.coordinator.store import ParameterStore
from kdist.coordinator.worker import SessionTask, Task
from kdist.errors import StrategyScopeError


class GrpcServer:
    """Serves the coordinator that connected last."""

    def __init__(self, address: str, job_name: str, engine: Engine, secret: str) -> None:
        self._address = address
        self._engine = engine
        self._job_name = job_name
        self._session = ""
        self._serves: ParameterStore | SessionTask | None = None
        self._handlers: Mapping[str, Handler] = {}
        self._lock = threading.Lock()
        self._secret = secret
        self._service = Service(address, self._handler_of, self._secret)

    def join(self) -> None:
        self._service.wait()

    def _begin(self, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        keras.config.set_floatx(header["floatx"])
        with self._lock:
            self._session = header["session"]
            if self._job_name == "ps":
                self._serves = ParameterStore(self._engine)
            else:
                if isinstance(self._serves, SessionTask):
                    self._serves.close()
                addresses = header["servers"]
                peers = [
                    Peer(task_name("ps", i, one), one, self._secret, session=self._session)
                    for i, one in enumerate(addresses)
                ]
                task = GroupTask if header["synchronous"] else Task
                self._serves = task(self._engine, header["index"], self._address, peers)
            self._handlers = {name: getattr(self._serves, name) for name in self._serves.METHODS}
        return {}, ()

    def _handler_of(self, header: Mapping[str, Any]) -> Handler:
        """Returns the function that answers a call."""
        if header["method"] == "begin":
            return self._begin
        with self._lock:
            if not self._session:  # this process has restarted, and the caller has a session with the old one
                return lambda header, arrays: ({"is_new": True}, ())
            self._check(header["session"])
            handler = self._handlers[header["method"]]

        def answer(header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
            try:
                return handler(header, arrays)
            finally:
                # The next session closes the connections that this call uses. Then it fails with another error.
                self._check(header["session"])

        return answer

    def _check(self, session: str) -> None:
        if session != self._session:
            raise StrategyScopeError(
                "This task now serves another coordinator, which connected later.",
                hint="Use one coordinator at a time per cluster, or restart the cluster.",
            )
