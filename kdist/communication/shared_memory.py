"""Sums arrays of workers on one machine in shared memory, which is faster than gloo's sockets.

Each worker copies its array to its own memory, which all workers can read, and sends a message to the others. Nothing
runs in the background, so that a lost worker leaves nothing behind. Unix sockets carry the messages: their system calls
also order the accesses to the memory, and they report a worker that died at once.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import mmap
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import ml_dtypes
import numpy as np

from kdist.communication import interrupts
from kdist.errors import KdistError, WorkerMismatchError, check_equal_arrays

if TYPE_CHECKING:
    import numpy.typing as npt

# A worker can start a few sums before it waits. Each one has a slot of this size, in bytes.
_WINDOW, SLOT = 3, 8 << 20
# A slot is free when it is reached again, without another message: before a worker starts sum n, it has finished
# sum n - _WINDOW. The others had then started this sum, and had thus finished sum n - 2 * _WINDOW.
SLOTS = 2 * _WINDOW
# Up to this size, in bytes, each worker adds all arrays. Of larger ones, it adds a part for all workers.
_SMALL = 64 << 10
# The interval, in seconds, at which a waiting worker checks whether the others are alive.
_LOOK = 1.0
# The kind, and of a start the number of bytes and the dtype. A text with the shapes follows.
_MESSAGE = struct.Struct("<cqq")
_TEXT = 200  # the most bytes of this text
_STARTED, _ADDED = b"S", b"A"
_DTYPES = [
    *map(np.dtype, ("float32", "float64", "float16", ml_dtypes.bfloat16)),
    *map(np.dtype, ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")),
]
# The bytes of a piece of large arrays, so that a worker adds while another worker still copies.
_PIECE = 1 << 20

Form: TypeAlias = tuple[int, int, bytes]
"""The bytes, dtype and shapes of a sum."""


class SharedMemory:
    """The connected workers of a machine. All workers start the same sums in the same order.

    There is a socket per other worker, and a region of memory per worker. A sum takes at most `seconds`.
    """

    def __init__(
        self, index: int, peers: dict[int, socket.socket], regions: Sequence[mmap.mmap], seconds: float
    ) -> None:
        self.index, self.regions, self.seconds = index, regions, seconds
        self.unfinished: collections.deque[Sum] = collections.deque()
        self.check_others: Callable[[], None] = lambda: None  # raises an error if a worker is lost
        # On JAX, each program that sums takes this array from the previous program, so that sums have one order.
        self.turn: object = None
        self.num_added = 0  # sums of which each worker added a part
        self._num_started = 0
        self._peers = peers
        self._polls = {worker: select.poll() for worker in peers}
        for worker, peer in peers.items():
            peer.setblocking(True)
            self._polls[worker].register(peer, select.POLLIN)
        self._counts = {kind: dict.fromkeys(peers, 0) for kind in (_STARTED, _ADDED)}  # of messages
        # Of each worker, the sizes and dtypes of the sums that it started first.
        self._forms = {worker: collections.deque[Form]() for worker in peers}

    def can_sum(self, dtype: npt.DTypeLike) -> bool:
        return dtype in _DTYPES

    def pieces_of(self, array: np.ndarray) -> list[np.ndarray]:
        """Divides a flat array into pieces that `start` can sum. Small pieces overlap in time."""
        size = _PIECE // array.itemsize
        return [array[start : start + size] for start in range(0, max(1, array.size), size)]

    def start(
        self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray] | None = None, shapes: str = ""
    ) -> Sum:
        """Starts to sum flat arrays of one dtype over all workers, in place unless there are `results`.

        All workers must pass the same `shapes`, a text about the shapes of the tensors.
        """
        found = Sum(self, self._num_started, arrays, arrays if results is None else results, shapes)
        self._num_started += 1
        self.unfinished.append(found)
        if len(self.unfinished) <= _WINDOW:
            found.send()
        return found

    def sum_all(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray], shapes: str = "") -> None:
        """Sums flat arrays of one dtype and any size over all workers; see `start`.

        After Ctrl-C, the sum continues, because programs of JAX cannot continue after an error.
        `interrupts` raises the `KeyboardInterrupt` afterwards.
        """
        if 0 < sum([array.nbytes for array in arrays]) <= _PIECE:
            self._wait_for_sum(self.start(arrays, results, shapes))
            return
        pieces: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        left = 0
        for array, result in zip(arrays, results, strict=True):
            start = 0
            while start < array.size:
                if not left:
                    pieces.append(([], []))
                    left = max(1, _PIECE // array.itemsize)
                end = min(array.size, start + left)
                pieces[-1][0].append(array[start:end])
                pieces[-1][1].append(result[start:end])
                left -= end - start
                start = end
        for started in [self.start(*piece, shapes) for piece in pieces]:
            self._wait_for_sum(started)

    def _wait_for_sum(self, started: Sum) -> None:
        try:
            started.wait()
        except KeyboardInterrupt:
            interrupts.note_ignored()
            started.wait()  # a second Ctrl-C interrupts the sum

    def have_equal(self, text: str) -> bool:
        """Returns whether all workers pass the same text, as their next sum."""
        try:
            self.sum_all(
                [np.zeros(1, "int8")], [np.empty(1, "int8")], hashlib.sha256(text.encode()).hexdigest()
            )
        except WorkerMismatchError:
            return False
        return True

    def finish(self, last: Sum) -> None:
        """Finishes the started sums up to one of them, in their order."""
        while not last.has_ended:
            self.unfinished[0].finish()
            self.unfinished.popleft()
            if len(self.unfinished) >= _WINDOW:
                self.unfinished[_WINDOW - 1].send()

    def send(self, kind: bytes, size: int = 0, dtype: int = 0, shapes: bytes = b"") -> None:
        """Sends a message to all other workers. A worker that needs more from one that has ended notices it."""
        message = _MESSAGE.pack(kind, size, dtype) + shapes
        for peer in self._peers.values():
            try:  # `contextlib.suppress` takes longer
                peer.send(message)
            except (BrokenPipeError, ConnectionResetError):
                pass

    def wait_for(self, kind: bytes, number: int, deadline: float) -> None:
        """Waits until all other workers have sent the message of this kind and number.

        The stack stays the same meanwhile, so that the stall watch does not mistake the wait for progress.

        Raises:
            TimeoutError: At the deadline.
            ConnectionError: If a worker has ended.
        """
        counts = self._counts[kind]
        for worker in counts:
            while counts[worker] <= number:
                # Often the message is already there, and polling would cost another system call.
                if self._receive(worker):
                    continue
                if not self._polls[worker].poll(max(0.0, min(_LOOK, deadline - time.monotonic())) * 1000):
                    self.check_others()
                    if time.monotonic() >= deadline:
                        raise TimeoutError

    def _receive(self, worker: int) -> bool:
        """Handles a message of a worker, if there is one."""
        try:
            data = self._peers[worker].recv(_MESSAGE.size + _TEXT, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # The worker ended before it read all messages. What it sent before is still there.
            data = self._peers[worker].recv(_MESSAGE.size + _TEXT)
        if not data:
            raise ConnectionError(f"worker {worker} closed the connection")
        kind, size, dtype = _MESSAGE.unpack_from(data)
        self._counts[kind][worker] += 1
        if kind == _STARTED:
            self._forms[worker].append((size, dtype, data[_MESSAGE.size :]))
        return True

    def check_form(self, form: Form) -> None:
        """Raises an error if another worker started the next sum with another array."""
        forms = {self.index: form}
        for worker, waiting in self._forms.items():
            forms[worker] = waiting.popleft()
        if {*forms.values()} != {form}:
            check_equal_arrays(
                [
                    f"{size} bytes of {_DTYPES[dtype]} {shapes.decode()}".rstrip()
                    for _, (size, dtype, shapes) in sorted(forms.items())
                ]
            )

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


class Sum:
    """A sum that has started.

    Args:
        memory: The connected workers.
        number: The number of sums before it.
        arrays: Flat arrays of one dtype.
        results: Arrays of the same sizes, which receive the sums.
        shapes: A text about the shapes of the tensors.
    """

    def __init__(
        self,
        memory: SharedMemory,
        number: int,
        arrays: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        shapes: str,
    ) -> None:
        self._memory, self.number, self._arrays, self._results = memory, number, arrays, results
        self._dtype = arrays[0].dtype
        self._ends = list(itertools.accumulate([array.size for array in arrays]))
        size = self._ends[-1] * self._dtype.itemsize
        self._form = size, _DTYPES.index(self._dtype), shapes.encode()[:_TEXT]
        self._deadline = time.monotonic() + memory.seconds
        self.has_ended = False
        self._slots: list[np.ndarray] = []  # the arrays of all workers
        self._stages = self._run()
        self._need: tuple[bytes, int] | None = None
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        """Returns whether the sum is there, or has failed."""
        return self.has_ended

    def wait(self) -> None:
        """Waits for the sum.

        Raises:
            RuntimeError: If another worker has ended, or the time is over.
            WorkerLostError: If another worker is lost.
            WorkerMismatchError: If the workers started the sum with different arrays.
        """
        self._memory.finish(self)
        if self._error is not None:
            raise self._error

    def send(self) -> None:
        """Makes the arrays visible to the other workers."""
        count, offset = self._ends[-1], self.number % SLOTS * SLOT
        self._slots = [np.frombuffer(r, self._dtype, count, offset) for r in self._memory.regions]
        for array, part in zip(self._arrays, self._parts_of(self._slots[self._memory.index]), strict=True):
            np.copyto(part, array)
        self._memory.send(_STARTED, *self._form)

    def finish(self) -> None:
        """Waits for the others, and adds. All earlier sums are finished."""
        try:
            while need := self._need or next(self._stages, None):
                self._need = need  # Ctrl-C may interrupt the wait
                self._memory.wait_for(*need, self._deadline)
                self._need = None
            if not self.has_ended:
                self._error = RuntimeError("Ctrl-C interrupted the sum.")
        except TimeoutError:
            self._error = RuntimeError(f"Timed out after {self._memory.seconds:g} s.")
        except OSError as error:
            self._error = RuntimeError(f"Connection closed: {error}")
        except KdistError as error:
            self._error = error
        self.has_ended = True

    def _run(self) -> Iterator[tuple[bytes, int]]:
        """Adds. Yields the messages, as kind and number, that all other workers must send first."""
        memory, slots = self._memory, self._slots
        yield _STARTED, self.number
        memory.check_form(self._form)
        if len(slots) == 2 or self._form[0] <= _SMALL:
            for total, *parts in zip(self._results, *map(self._parts_of, slots), strict=True):
                _add_in_order(parts, total)
        else:
            parts = [np.array_split(slot, len(slots)) for slot in slots]
            mine = [part[memory.index] for part in parts]
            np.copyto(mine[memory.index], _add_in_order(mine, np.empty_like(mine[0])))
            memory.send(_ADDED)
            memory.num_added += 1
            yield _ADDED, memory.num_added - 1
            whole = np.concatenate([part[worker] for worker, part in enumerate(parts)])
            for result, part in zip(self._results, self._parts_of(whole), strict=True):
                np.copyto(result, part)
        self.has_ended = True

    def _parts_of(self, flat: np.ndarray) -> list[np.ndarray]:
        """Divides an array into parts of the sizes of the summed arrays."""
        if len(self._ends) == 1:
            return [flat]
        return [flat[start:end] for start, end in zip((0, *self._ends), self._ends, strict=False)]


def _add_in_order(arrays: Sequence[np.ndarray], total: np.ndarray) -> np.ndarray:
    """Adds the arrays in the order of the workers, so that all workers get the same bits."""
    np.add(arrays[0], arrays[1], out=total)
    for array in arrays[2:]:
        np.add(total, array, out=total)
    return total
