"""The part of the exchange that training does not hide, for two workers over a slow link.

    python benchmarks/slow_link.py torch|jax|tensorflow [megabits per second] [rounds]
    python benchmarks/slow_link.py compression torch|jax|tensorflow [megabits per second] [rounds]

Two network namespaces of this machine are two hosts, and `tc` limits the link between them (default: 1000 Mbit/s per
direction). It needs Linux, root, and `ip` and `tc` of iproute2. For the wide MLP of over_loops.py, each round measures,
one after the other:

- a step of two workers, with kdist and with DDP by hand;
- the same step of two processes that exchange nothing, at the same time;
- one all-reduce of as many bytes as the gradients have, by the backend of DDP (gloo).

The part that is not hidden is the difference of the first two, divided by the third. The benchmark prints it for each
global batch size in `ROWS`, because larger batches compute longer and hide more.

The second form compares the steps of kdist with and without compression, for 128 rows. With 0 megabits, the workers
are two processes of this machine, which exchange through sockets.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import over_loops

MODEL = "wide"
ROWS = (128, 1024, 2048)
STEPS = {128: 20}  # of other batch sizes: 6
NETWORK = "10.78.0"
PORT = 29617


def ip(*arguments: str, program: str = "ip") -> None:
    subprocess.run([program, *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def hosts(megabits: int, count: int = 2) -> Iterator[list[str]]:
    """Creates namespaces that links and a switch connect; yields their names."""
    switch = "kdist-bench-switch"
    names = [f"kdist-bench-{i}" for i in range(count)]
    links = [f"kdbench{i}" for i in range(count)]
    with contextlib.ExitStack() as cleanup:
        for name in (switch, *names):
            ip("netns", "add", name)
            cleanup.callback(ip, "netns", "del", name)  # also deletes the links
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, (name, link) in enumerate(zip(names, links, strict=True), start=1):
            ip(
                "link",
                "add",
                link,
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                f"to{number}",
                "netns",
                switch,
            )
            ip("-n", switch, "link", "set", f"to{number}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", link)
            for device in (link, "lo"):
                ip("-n", name, "link", "set", device, "up")
            limit = ("tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms")
            ip("-n", name, "qdisc", "add", "dev", link, "root", *limit, program="tc")
        yield names


def maker_of(kind: str) -> Callable[[str], Callable[[], Any]]:
    """Returns the function that prepares a contender in a worker."""
    if kind.startswith("all_reduce"):
        return lambda name: all_reduces(1 if "one number" in kind else numbers())
    if kind.startswith("ddp"):
        return lambda name: over_loops.with_torch(name, "alone" if "alone" in kind else "ddp")
    import keras

    import kdist

    if "alone" in kind:
        return lambda name: over_loops.with_fit(
            name, kdist.OneDeviceStrategy("cpu:0"), keras, num_parts=int(os.environ["WORLD_SIZE"])
        )
    compression = kind.partition(" ")[2] or None
    ring = "RING" if "GLOO_SOCKET_IFNAME" not in os.environ else "AUTO"
    options = kdist.experimental.CommunicationOptions(implementation=ring, compression=compression)
    strategy = kdist.MultiWorkerMirroredStrategy(communication_options=options)
    return lambda name: over_loops.with_fit(name, strategy, keras)


def numbers() -> int:
    """Returns the number of weights of the model."""
    return sum((a + 1) * b for a, b in itertools.pairwise(over_loops.WIDTHS[MODEL]))


def all_reduces(size: int) -> Callable[[], Any]:
    import torch

    torch.distributed.init_process_group("gloo")
    flat = torch.ones(size)

    def epoch() -> None:
        for _ in range(over_loops.STEPS[MODEL]):
            torch.distributed.all_reduce(flat)

    return epoch


def run_worker(kind: str, rows: int) -> None:
    over_loops.ROWS, over_loops.STEPS[MODEL] = rows, STEPS.get(rows, 6)
    print("milliseconds", over_loops.milliseconds(maker_of(kind)(MODEL), MODEL))
    if kind == "ddp" or kind.startswith("all_reduce"):
        import torch

        torch.distributed.destroy_process_group()  # gloo's threads can abort the process when it ends


def run_job(names: list[str], backend: str, kind: str, rows: int) -> float:
    """Returns the milliseconds per step of a job with a worker on each host; `rows` are in a global batch."""
    one_thread = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    one_thread |= {"TF_NUM_INTEROP_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    alike = {
        "MASTER_ADDR": f"{NETWORK}.1" if names[0] else "127.0.0.1",
        "MASTER_PORT": str(PORT),
        "LOCAL_RANK": "0",
    }
    alike |= dict.fromkeys(("WORLD_SIZE", "GROUP_WORLD_SIZE"), str(len(names)))
    alike |= {"LOCAL_WORLD_SIZE": "1", "KERAS_BACKEND": backend}
    jobs = [
        subprocess.Popen(
            [*inside(name), sys.executable, __file__, "worker", kind, str(rows)],
            env=os.environ
            | one_thread
            | alike
            | {"RANK": str(i), "GROUP_RANK": str(i)}
            | ({"GLOO_SOCKET_IFNAME": f"kdbench{i}"} if name else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, name in enumerate(names)
    ]
    printed = [job.communicate() for job in jobs]
    if any(job.returncode for job in jobs):
        raise SystemExit("\n".join(err for _, err in printed))
    return max(float(out.split("milliseconds")[1]) for out, _ in printed)


def inside(name: str) -> list[str]:
    """Returns the beginning of a command that runs in a namespace; an empty name is this machine itself."""
    return ["ip", "netns", "exec", name] if name else []


def compare_compression(backend: str, megabits: int, rounds: int) -> None:
    kinds = ("kdist", "kdist bfloat16", "kdist powersgd")
    with hosts(megabits) if megabits else contextlib.nullcontext(["", ""]) as names:
        times = [{kind: run_job(names, backend, kind, 128) for kind in kinds} for _ in range(rounds)]
    for kind in kinds:
        found = sorted(each[kind] for each in times)
        print(f"{kind:15} step {statistics.median(found):6.1f} ms ({found[0]:.1f} to {found[-1]:.1f})")


def main(backend: str, megabits: int, rounds: int) -> None:
    kinds = ("kdist", "ddp", "kdist alone", "ddp alone", "all_reduce")
    with hosts(megabits) as names:
        for rows in ROWS:
            times = [{kind: run_job(names, backend, kind, rows) for kind in kinds} for _ in range(rounds)]
            for kind in ("kdist", "ddp"):
                alone = f"{kind} alone"
                parts = sorted((each[kind] - each[alone]) / each["all_reduce"] for each in times)
                step, computes, exchange = (
                    statistics.median(each[key] for each in times) for key in (kind, alone, "all_reduce")
                )
                print(
                    f"{rows:5} rows  {kind:5} step {step:6.1f} ms, without exchange {computes:6.1f} ms, all-reduce "
                    f"{exchange:6.1f} ms, not hidden {statistics.median(parts):.2f} "
                    f"({parts[0]:.2f} to {parts[-1]:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        run_worker(sys.argv[2], int(sys.argv[3]))
    else:
        is_comparison = sys.argv[1] == "compression"
        given = sys.argv[1 + is_comparison :]
        megabits, rounds = (int(number) for number in (*given[1:], *("1000", "3")[len(given) - 1 :]))
        (compare_compression if is_comparison else main)(given[0], megabits, rounds)
