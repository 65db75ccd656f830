"""`Channel`: messages between workers, and the detection of workers that die, stop, hang or end.

Each worker has one connection to the chief, which relays messages and losses: n connections for n workers.
Frameworks detect most losses later, or do not name the worker. This module uses only the standard library, and
never unpickles data from the network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import queue
import socket
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kdist.control import loss_reasons, stalls, whereabouts
from kdist.control.connections import Connections
from kdist.control.loss_reasons import Loss
from kdist.errors import WorkerTimeoutError

_MESSAGE, _ALL, _LOSSES, _POST, _WAITS, _ASK, _ANSWER = b"m", b"a", b"l", b"p", b"w", b"?", b"!"
# Seconds between two checks of a worker that waits for messages.
_GLANCE = 1.0
# Seconds to wait for the cause if a worker is lost that may have lost another one.
_CAUSE = 0.3
NOTICE_SECONDS = 5.0
"""The time until a lost worker is detected after a framework has reported an error."""
# Seconds to wait for an answer of the chief.
_ANSWER_SECONDS = 2.0
# With more workers, many messages are usually equal, so compression saves most of the bytes.
_MOST_UNCOMPRESSED = 8
_MOST_COMPRESSED = 1 << 24  # bytes, because compression takes longer than a transfer

T = TypeVar("T")


class Channel:
    """The connections of one worker: to all other workers on the chief, otherwise to the chief.

    Args:
        names: The names of all workers.
        worker_index: The index of this worker.
        connections: The connected sockets by the index of the other worker.
        timeout_seconds: The timeout of a message. With `None`, a worker waits while the others are alive.
    """

    def __init__(
        self,
        names: Sequence[str],
        worker_index: int,
        connections: Mapping[int, socket.socket],
        timeout_seconds: float | None = None,
    ) -> None:
        self.names = names
        self.index = worker_index
        self.timeout_seconds = timeout_seconds
        self._connections = Connections(connections, self)
        self._changed = self._connections.changed
        self._losses: dict[int, Loss] = {}
        self._calls: list[Callable[[int, Loss], None]] = []
        self._begun = self._answered = 0  # messages
        self._expecting: dict[int, queue.SimpleQueue[list[bytes] | None]] = {}
        self._arrived: list[deque[bytes]] = [deque() for _ in names]  # on the chief, like the next three
        self._delivered = [0] * len(names)
        self._num_complete = 0  # workers with a message in `_arrived`
        self._waits: dict[int, str] = {}
        self._posts: dict[str, str] = {}
        self._asking = threading.Lock()
        self._num_asked = 0
        self._answers: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._unreported: list[int] = []  # on the chief
        self._reports: queue.SimpleQueue[Callable[[], None]] | None = None
        self._left = False
        self._connections.start()

    # Messages --------------------------------------------------------------------------------------------

    def gather(self, data: bytes) -> list[bytes]:
        """Sends a message to every worker, and returns the messages of all workers. See `begin`."""
        return self.begin(data)()

    def gather_json(self, value: T) -> list[T]:
        return [json.loads(data) for data in self.gather(json.dumps(value).encode())]

    def begin(self, data: bytes, timeout: float | None = None) -> Callable[[], list[bytes]]:
        """Sends a message to every worker, and returns a function that waits for the messages of all workers.

        All workers must call it. The n-th messages of all workers belong together. The function waits at most
        `timeout` seconds, or `timeout_seconds` without it.
        """
        answer: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        with self._changed:
            turn, self._begun = self._begun, self._begun + 1
            self._expecting[turn] = answer
            if self.index == 0:
                self._deliver(0, data)
            else:
                self._connections.send(0, _MESSAGE, 0, data)
        limit = self.timeout_seconds if timeout is None else timeout
        return functools.partial(self._finish, turn, answer, limit)

    def _finish(
        self, turn: int, answer: queue.SimpleQueue[list[bytes] | None], limit: float | None
    ) -> list[bytes]:
        """Waits for the messages of a turn.

        The stall watch checks the file of the innermost frame, and new frames would look like progress. So this
        waits in a function that is not written in Python.
        """
        began = time.monotonic()
        with whereabouts.inside("an exchange of messages"):
            while True:
                left = _GLANCE if limit is None else min(_GLANCE, began + limit - time.monotonic())
                with contextlib.suppress(queue.Empty):
                    if (everyone := answer.get(timeout=max(0.001, left))) is not None:
                        return everyone
                if lost := self._lost_in(turn):
                    raise self.lost_error(lost)
                if limit is not None and time.monotonic() >= began + limit:
                    raise self._late_error(turn, limit)
                if sys.is_finalizing():
                    raise RuntimeError("Cannot wait for messages of other workers: the program ends.")

    def _lost_in(self, turn: int) -> dict[int, str]:
        """Returns the cause if a worker has been lost before it sent its message of a turn."""
        with self._changed:
            if all(loss.delivered > turn for loss in self._losses.values()):
                return {}
            self._changed.wait_for(self._has_cause, _CAUSE)
            return loss_reasons.first_cause(self._losses)

    def _late_error(self, turn: int, limit: float) -> WorkerTimeoutError:
        delivered = self._ask().get("delivered", [0])
        late = [self.names[index] for index, count in enumerate(delivered) if count <= turn]
        who = ", ".join(late or [self.names[0]])
        return WorkerTimeoutError(
            f"{who} did not respond within {limit:g} s. This worker needs it for {whereabouts.describe_wait()}.",
            hint=f"Read the log of {who}, or wait longer: "
            "kdist.experimental.CommunicationOptions(timeout_seconds=3600)",
        )

    def _deliver(self, index: int, data: bytes) -> None:
        """Adds a message of a worker on the chief, and sends the messages of a turn when all have arrived."""
        self._arrived[index].append(data)
        self._delivered[index] += 1
        self._num_complete += len(self._arrived[index]) == 1
        if self._num_complete == len(self.names):
            everyone = [arrived.popleft() for arrived in self._arrived]
            self._num_complete = sum(map(bool, self._arrived))
            self._connections.broadcast(_ALL, 0, join_messages(everyone))
            self._answer(everyone)

    def _answer(self, everyone: list[bytes]) -> None:
        turn, self._answered = self._answered, self._answered + 1
        if (answer := self._expecting.pop(turn, None)) is not None:
            answer.put(everyone)

    # Posts and waiting workers ---------------------------------------------------------------------------

    def post(self, key: str, text: str) -> None:
        """Posts a text: for all workers on the chief, otherwise for the chief. Does not wait."""
        with self._changed:
            self._posts[key] = text
            self._connections.broadcast(_POST, 0, json.dumps([key, text]).encode())

    def look_up(self, key: str) -> str | None:
        """Returns a posted text, or `None`. Does not wait.

        Raises:
            WorkerLostError: If there is no such text, and the chief, which posts and relays texts, is lost.
        """
        with self._changed:
            found = self._posts.get(key)
            if found is None and 0 in self._losses:
                raise self.lost_error({0: self._losses[0].reason})
            return found

    def say(self, text: str | None) -> None:
        """Publishes where this worker waits for the others; `None` when it continues."""
        with self._changed:
            if self.index == 0:
                self._note_wait(0, text or "")
            else:
                self._connections.send(0, _WAITS, self.index, (text or "").encode())

    def _note_wait(self, index: int, text: str) -> None:
        self._waits.pop(index, None)
        if text:
            self._waits[index] = text

    def waiting(self) -> dict[int, str]:
        """Returns the other workers that wait, and where each one waits."""
        found = self._ask().get("waits", {})
        return {int(index): text for index, text in found.items() if int(index) != self.index}

    def _ask(self) -> dict[str, Any]:
        """Returns the state of the workers from the chief; empty if it does not answer in time."""
        if self.index == 0:
            return self._state()
        with self._asking:
            self._num_asked += 1
            with self._changed:
                self._connections.send(0, _ASK, self._num_asked)
            with contextlib.suppress(queue.Empty):
                while True:
                    number, data = self._answers.get(timeout=_ANSWER_SECONDS)
                    if number == self._num_asked:
                        state: dict[str, Any] = json.loads(data)
                        return state
        return {}

    def _state(self) -> dict[str, Any]:
        with self._changed:
            return {"waits": dict(self._waits), "delivered": list(self._delivered)}

    # Losses ----------------------------------------------------------------------------------------------

    @property
    def lost(self) -> dict[int, Loss]:
        """The workers that are lost or have ended, in the order of detection."""
        with self._changed:
            return dict(self._losses)

    def died(self) -> dict[int, str]:
        """Returns the first worker that died, hung or was stopped, and the reason; otherwise nothing."""
        return loss_reasons.first_cause({i: loss for i, loss in self.lost.items() if loss.is_sudden})

    def wait_for_loss(self, timeout: float) -> dict[int, str]:
        """Waits until a worker is lost, and returns its index and the reason; empty if no worker is lost.

        If several workers are lost, returns the first one that died, hung, failed or was stopped, because the
        others may have ended as a consequence. If there is none, returns the first one that ended.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._losses, timeout):
                self._changed.wait_for(self._has_cause, _CAUSE)
            return loss_reasons.first_cause(self._losses)

    def _has_cause(self) -> bool:
        return any(loss.is_cause for loss in self._losses.values())

    def lost_error(self, lost: Mapping[int, str], error: BaseException | str | None = None) -> Exception:
        """Returns the error of this worker after the loss of others; see `stalls.lost_error`."""
        return stalls.lost_error(self.names, self.index, lost, error)

    def on_loss(self, call: Callable[[int, Loss], None]) -> None:
        """Adds a function that a thread calls for each worker that is lost, or was lost before."""
        with self._changed:
            self._calls.append(call)
            for index, loss in self._losses.items():
                self._report(call, index, loss)

    def _report(self, call: Callable[[int, Loss], None], index: int, loss: Loss) -> None:
        if self._reports is None:
            self._reports = queue.SimpleQueue()
            threading.Thread(
                target=_run_all, args=(self._reports,), name="kdist channel: losses", daemon=True
            ).start()
        self._reports.put(functools.partial(call, index, loss))

    def _note(self, index: int, loss: Loss) -> None:
        """Adds a loss, unless it is already known, and wakes all threads that wait."""
        if index in self._losses or index == self.index:
            return
        if self.index == 0:
            loss = dataclasses.replace(loss, delivered=self._delivered[index])
            self._unreported.append(index)
        self._losses[index] = loss
        self._waits.pop(index, None)
        self._changed.notify_all()
        self._wake()
        if not self._left:
            for call in self._calls:
                self._report(call, index, loss)

    def _wake(self) -> None:
        for answer in self._expecting.values():
            answer.put(None)

    # The end ---------------------------------------------------------------------------------------------

    def leave(self, loss: Loss | None = None) -> None:
        """Sends the reason why this worker ends to the others. Only the first call has an effect."""
        with self._changed:
            if not self._left:
                self._left = True
                loss = dataclasses.replace(
                    loss or loss_reasons.of_this_process(), delivered=self._delivered[0]
                )
                self._connections.broadcast(_LOSSES, 0, _packed({self.index: loss}))

    def close(self, loss: Loss | None = None) -> None:
        """Leaves, and closes the connections, so that the others do not report this worker as dead."""
        self.leave(loss)
        self._connections.close()

    # Called by `Connections` -----------------------------------------------------------------------------

    def note_end(self, index: int) -> None:
        """Notes a worker as lost if its connection has ended without a reason."""
        if index in self._losses and self.index > 0:  # the chief has left, and relays no more messages
            loss = self._losses[0]
            self._losses[0] = Loss(loss.kind, loss.reason, self._answered)
            self._wake()
        self._note(index, Loss(loss_reasons.DIED, loss_reasons.REASONS[loss_reasons.DIED], self._answered))

    def note_silence(self, index: int) -> None:
        self._note(
            index, Loss(loss_reasons.STOPPED, loss_reasons.REASONS[loss_reasons.STOPPED], self._answered)
        )

    def finish_round(self) -> None:
        """Sends new losses to the other workers, together: at the end of a job, all workers leave at once."""
        if self._unreported:
            packed = _packed({index: self._losses[index] for index in self._unreported})
            self._unreported.clear()
            self._connections.broadcast(_LOSSES, 0, packed)

    def handle(self, index: int, kind: bytes, about: int, data: bytes) -> None:
        """Handles a frame of another worker."""
        if kind == _LOSSES:
            for lost, letter, reason, delivered in json.loads(data):
                self.names[lost]  # raises an error if there is no such worker
                if self.index > 0 or lost == index:  # only the chief reports others
                    self._note(lost, Loss(loss_reasons.KINDS[letter], str(reason), int(delivered)))
        elif kind == _POST:
            key, text = json.loads(data)
            self._posts[str(key)] = str(text)
        elif kind == _MESSAGE and self.index == 0:
            self._deliver(index, data)
        elif kind == _WAITS and self.index == 0:
            self._note_wait(index, data.decode())
        elif kind == _ASK and self.index == 0:
            self._connections.send(index, _ANSWER, about, json.dumps(self._state()).encode())
        elif kind == _ANSWER and index == 0:
            self._answers.put((about, data))
        elif kind == _ALL and index == 0:
            self._answer(split_messages(data))
        else:
            raise ValueError(f"unexpected frame {kind!r}")


def _packed(lost: Mapping[int, Loss]) -> bytes:
    entries = [[index, loss.kind.decode(), loss.reason, loss.delivered] for index, loss in lost.items()]
    return json.dumps(entries).encode()


def _run_all(calls: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        calls.get()()


def join_messages(messages: Sequence[bytes]) -> bytes:
    """Packs one message per worker, and compresses them if this saves time."""
    lengths = ",".join(str(len(message)) for message in messages).encode()
    packed = b"".join([lengths, b";", *messages])
    compresses = len(messages) > _MOST_UNCOMPRESSED and len(packed) < _MOST_COMPRESSED
    return b"z" + zlib.compress(packed, level=1) if compresses else b"-" + packed


def split_messages(packed: bytes) -> list[bytes]:
    """Returns the messages of `join_messages`."""
    data = zlib.decompress(packed[1:]) if packed.startswith(b"z") else packed[1:]
    lengths, _, rest = data.partition(b";")
    return list(_cut(rest, [int(length) for length in lengths.split(b",")]))


def _cut(data: bytes, lengths: Sequence[int]) -> Iterator[bytes]:
    ends = [*itertools.accumulate(lengths)]
    return (data[start:end] for start, end in zip([0, *ends], ends, strict=False))
