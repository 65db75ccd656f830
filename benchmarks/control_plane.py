"""Cost of messages between workers: kdist's channel with up to 1,024 workers, and gRPC in comparison.

    python benchmarks/control_plane.py [rounds]

The first table has real processes, which gather a message of 100 bytes from each other: with `kdist.control.Channel`,
and with an asyncio server of gRPC in the chief. Both are measured in turns. The second table has one chief, and a
process that simulates all other workers with plain sockets. Their messages have arrived when the chief begins, so the
times contain neither late workers nor a network. The messages and bytes are per exchange.
"""

from __future__ import annotations

import multiprocessing
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection as Pipe

from kdist.control.channel import Channel
from kdist.control.connections import frame

CONTEXT = multiprocessing.get_context("fork")
PROCESSES = (2, 8, 64)
SIMULATED = (2, 8, 64, 256, 1024)
MESSAGE = (
    b'{"counts": [[32], [32], [32]], "kinds": ["0123456789abcdef"], "ended": false, "error": null}'.ljust(100)
)


def with_channel(index: int, count: int, port: int, pipe: Pipe | None) -> Callable[[bytes], list[bytes]]:
    """Returns a function that gathers messages with kdist. The chief sends its port into the pipe."""
    sockets: dict[int, socket.socket] = {}
    if pipe is not None:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
            pipe.send(server.getsockname()[1])
            for _ in range(count - 1):
                other, _ = server.accept()
                sockets[int.from_bytes(other.recv(2), "big")] = other
    else:
        sockets[0] = socket.create_connection(("127.0.0.1", port))
        sockets[0].sendall(index.to_bytes(2, "big"))
    return Channel([f"worker {i}" for i in range(count)], index, sockets).gather


def with_grpc(index: int, count: int, port: int, pipe: Pipe | None) -> Callable[[bytes], list[bytes]]:
    """Returns a function that gathers messages with gRPC."""
    import asyncio
    import threading

    import grpc

    if pipe is None:
        call = grpc.insecure_channel(f"127.0.0.1:{port}").unary_unary("/kdist/gather")
        return lambda data: call(data, wait_for_ready=True).split(b"|")
    loop = asyncio.new_event_loop()
    waiting: list[tuple[bytes, asyncio.Future[bytes]]] = []

    async def gather(request: bytes, context: object = None) -> bytes:
        answer: asyncio.Future[bytes] = loop.create_future()
        waiting.append((request, answer))
        if len(waiting) == count:
            everyone = b"|".join(data for data, _ in waiting)
            for _, other in waiting:
                other.set_result(everyone)
            waiting.clear()
        return await answer

    async def serve() -> None:
        server = grpc.aio.server()
        handlers = {"gather": grpc.unary_unary_rpc_method_handler(gather)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kdist", handlers),))
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True).start()
    return lambda data: asyncio.run_coroutine_threadsafe(gather(data), loop).result().split(b"|")


WAYS = {"kdist": with_channel, "gRPC": with_grpc}


def measure(way: str, count: int, rounds: int) -> float:
    """Returns the median milliseconds of an exchange between real processes."""
    mine, theirs = CONTEXT.Pipe()

    def run(index: int, port: int) -> None:
        pipe = theirs if index == 0 else None
        gather = WAYS[way](index, count, port, pipe)
        gather(MESSAGE)
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            assert len(gather(MESSAGE)) == count
            times.append(time.perf_counter() - began)
        if pipe is not None:
            pipe.send(1000 * statistics.median(times))
            time.sleep(0.5)  # the others read the last answer

    workers = [CONTEXT.Process(target=run, args=(0, 0))]
    workers[0].start()
    port = mine.recv()
    workers += [CONTEXT.Process(target=run, args=(index, port)) for index in range(1, count)]
    for worker in workers[1:]:
        worker.start()
    found: float = mine.recv()
    for worker in workers:
        worker.join(10)
        worker.kill()
    return found


def simulate(count: int, rounds: int) -> dict[str, float]:
    """Returns the milliseconds of the chief, and the messages and bytes of the chief and of another worker."""
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    mine, theirs = CONTEXT.Pipe()

    def others() -> None:
        sockets = [socket.create_connection(server.getsockname()) for _ in range(count - 1)]
        sent = frame(b"m", 0, MESSAGE)
        received = 0
        while theirs.recv():
            for one in sockets:
                one.sendall(sent)
            theirs.send(True)
            received = sum(_read_answer(one) for one in sockets)
            theirs.send(received)
        theirs.close()

    process = CONTEXT.Process(target=others)
    process.start()
    connections = {index: server.accept()[0] for index in range(1, count)}
    channel = Channel([f"worker {index}" for index in range(count)], 0, connections)
    times, used, received = [], [], 0
    for _ in range(rounds):
        mine.send(True)
        mine.recv()
        time.sleep(0.05)  # the messages have arrived
        cpu, began = time.process_time(), time.perf_counter()
        channel.gather(MESSAGE)
        times.append(time.perf_counter() - began)
        received = mine.recv()
        used.append(time.process_time() - cpu)
    mine.send(False)
    process.join(10)
    for connection in connections.values():
        connection.close()
    server.close()
    size = len(frame(b"m", 0, MESSAGE))
    return {
        "ms": 1000 * statistics.median(times),
        "messages": 2 * (count - 1),
        "bytes": size * (count - 1) + received,
        "bytes of another": size + received / max(1, count - 1),
    }


def _read_answer(connection: socket.socket) -> int:
    """Reads frames up to the messages of all workers. Returns the size of this frame."""
    while True:
        head = connection.recv(17, socket.MSG_WAITALL)
        size = int.from_bytes(head[9:], "big")
        while size > 0:
            size -= len(connection.recv(min(size, 1 << 16)))
        if head[4:5] == b"a":
            return 17 + int.from_bytes(head[9:], "big")


def table(rows: Mapping[str, list[str]], head: list[str]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Prints both tables."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    rows = {}
    for count in PROCESSES:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, taken in found.items():
                taken.append(measure(way, count, 200 if count < 64 else 30))
        rows[f"{count}"] = [
            f"{statistics.median(taken):.2f} ({min(taken):.2f}–{max(taken):.2f})" for taken in found.values()
        ]
        print(f"{count} processes: {rows[str(count)]}", file=sys.stderr, flush=True)
    print(table(rows, ["processes", *(f"{way}, ms" for way in WAYS)]))
    print()
    rows = {}
    for count in SIMULATED:
        cost = simulate(count, 4 * rounds)
        rows[f"{count:,}"] = [
            f"{cost['ms']:.1f}",
            f"{cost['messages']:,}",
            f"{cost['bytes']:,.0f}",
            "2",
            f"{cost['bytes of another']:,.0f}",
        ]
    names = ["ms", "messages", "bytes"]
    head = [
        "workers",
        *(f"chief: {name}" for name in names),
        *(f"another worker: {name}" for name in names[1:]),
    ]
    print(table(rows, head))


if __name__ == "__main__":
    main()
