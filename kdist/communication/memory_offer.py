"""Connects workers of one machine, so that they can read each other's memory."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence

from kdist.communication.shared_memory import SLOT, SLOTS, SharedMemory

# Workers that may share memory: each one is connected with all others.
_MOST_WORKERS = 16
_JOIN_SECONDS = 10.0


class Offer:
    """This worker's part of the connection: it waits for the others under a name, which they receive.

    `description` is a JSON value for the others. It is `None` if this worker cannot share memory, or does not want to.
    """

    def __init__(self, index: int, count: int, is_wanted: bool) -> None:
        self._index, self._count = index, count
        self.description: dict[str, object] | None = None
        self._listener: socket.socket | None = None
        if not is_wanted or not 1 < count <= _MOST_WORKERS or not hasattr(os, "memfd_create"):
            return
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                machine = [file.read().strip(), os.stat("/proc/self/ns/net").st_ino, os.getuid()]
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(f"\0kdist-{secrets.token_hex(16)}")
            self._listener.listen(_MOST_WORKERS)
        except OSError:
            return
        name = self._listener.getsockname().decode()
        self.description = {"machine": machine, "name": name}

    def connect(
        self, offers: Sequence[dict[str, object] | None], gather: Callable[[bool], list[bool]], seconds: float
    ) -> SharedMemory | None:
        """Connects the workers if all of them are on this machine. A sum takes at most `seconds`.

        `offers` contains the descriptions of all workers, and `gather` gathers a value from every worker.
        Returns `None` on all workers if any worker cannot connect.
        """
        machines = [offer and offer["machine"] for offer in offers]
        if machines[0] is None or any(machine != machines[0] for machine in machines):
            if self._listener is not None:
                self._listener.close()
            return None
        memory = None
        try:
            memory = self._connect([str(offer["name"]) for offer in offers if offer], seconds)
        except OSError:
            pass
        finally:
            if self._listener is not None:
                self._listener.close()
        if all(gather(memory is not None)):
            return memory
        if memory is not None:
            memory.close()
        return None

    def _connect(self, names: Sequence[str], seconds: float) -> SharedMemory:
        assert self._listener is not None
        me, count = self._index, self._count
        mine = os.memfd_create("kdist")
        files = {me: mine}
        peers: dict[int, socket.socket] = {}
        try:
            os.ftruncate(mine, SLOTS * SLOT)
            self._listener.settimeout(_JOIN_SECONDS)
            for index in range(me):
                peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                peer.settimeout(_JOIN_SECONDS)
                peer.connect(names[index])
                peers[index] = peer
                _send_file(peer, me, mine)
                _, files[index] = _receive_file(peer)
            while len(peers) < count - 1:
                peer, _ = self._listener.accept()
                peer.settimeout(_JOIN_SECONDS)
                index, file = _receive_file(peer)
                peers[index], files[index] = peer, file
                _send_file(peer, me, mine)
            regions = [mmap.mmap(files[index], SLOTS * SLOT) for index in range(count)]
        except BaseException:
            for peer in peers.values():
                peer.close()
            raise
        finally:
            for file in files.values():
                os.close(file)
        return SharedMemory(me, peers, regions, seconds)


def _send_file(peer: socket.socket, index: int, file: int) -> None:
    uid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    if uid != os.getuid():
        raise PermissionError("another user's process")
    socket.send_fds(peer, [bytes([index])], [file])


def _receive_file(peer: socket.socket) -> tuple[int, int]:
    message, files, _, _ = socket.recv_fds(peer, 1, 1)
    if not message or len(files) != 1:
        raise ConnectionError("the other worker gave up")
    return message[0], files[0]
