"""A model of the time of a training step by the number of workers, and its check against measured steps.

    python benchmarks/step_model.py [rounds]
    python benchmarks/step_model.py predict MEGABYTES COMPUTE_MS HIDDEN GBIT_PER_S LATENCY_US [WORKERS_PER_HOST]

A step takes the time of the computation plus the part of the exchange that it does not hide. The exchange is a ring
between the hosts: 2 (n - 1) messages, and 2 (n - 1) / n times the bytes of the gradients over each link. `HIDDEN` is
the share of the computation during which gradients can already travel. With several workers per host, hosts send once.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

The check needs Linux, root, and `ip` and `tc` of iproute2, as slow_link.py. It takes the parts from two workers over
a link of 1 Gbit/s. Then it predicts steps of PyTorch with two and four workers, over links of 1 Gbit/s and 200 Mbit/s.
`predict` prints a table for 1 to 4,096 workers.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

ROWS_PER_WORKER = 512
KINDS = ("kdist", "kdist alone", "all_reduce", "all_reduce of one number")


def exchange_ms(
    workers: int, megabytes: float, gbit_per_s: float, latency_us: float, per_host: int = 1
) -> float:
    """Returns the milliseconds of an all-reduce in a ring between the hosts."""
    hosts = -(-workers // per_host)
    on_link = 2 * (hosts - 1) / hosts * megabytes * 8 / gbit_per_s
    return on_link + 2 * (hosts - 1) * latency_us / 1e3


def step_ms(compute_ms: float, exchange: float, hidden: float) -> float:
    """Returns the milliseconds of a step that hides the exchange during a share of its computation."""
    return compute_ms + max(exchange - hidden * compute_ms, 0.0)


def measured(megabits: int, workers: int, rounds: int) -> dict[str, float]:
    """Returns the median of the milliseconds of each kind of step."""
    import slow_link

    with slow_link.hosts(megabits, workers) as names:
        times = [
            {kind: slow_link.run_job(names, "torch", kind, ROWS_PER_WORKER * workers) for kind in KINDS}
            for _ in range(rounds)
        ]
    return {kind: statistics.median(each[kind] for each in times) for kind in KINDS}


def check(rounds: int) -> None:
    """Prints predicted and measured steps."""
    sys.path.insert(0, str(Path(__file__).parent))
    import slow_link

    parts = measured(1000, 2, rounds)
    latency_us = parts["all_reduce of one number"] * 1e3 / 2
    megabytes = slow_link.numbers() * 4 / 1e6
    gbit_per_s = megabytes * 8 / (parts["all_reduce"] - 2 * latency_us / 1e3)
    saved = parts["kdist alone"] + parts["all_reduce"] - parts["kdist"]
    hidden = saved / parts["kdist alone"]
    print(
        f"{megabytes:.1f} MB, latency {latency_us:.0f} µs, {gbit_per_s:.2f} of 1 Gbit/s, hidden {hidden:.2f}"
    )
    print(
        f"{'link':>12}{'workers':>9}{'computes':>10}{'exchange':>10}{'predicted':>11}{'step':>8}{'predicted':>11}"
    )
    for megabits in (1000, 200):
        for workers in (2, 4):
            found = parts if (megabits, workers) == (1000, 2) else measured(megabits, workers, rounds)
            exchange = exchange_ms(workers, megabytes, gbit_per_s * megabits / 1000, latency_us)
            step = step_ms(found["kdist alone"], exchange, hidden)
            print(
                f"{megabits:>5} Mbit/s{workers:>9}{found['kdist alone']:>10.1f}{found['all_reduce']:>10.1f}"
                f"{exchange:>11.1f}{found['kdist']:>8.1f}{step:>11.1f}",
                flush=True,
            )


def predict(
    megabytes: float, compute: float, hidden: float, gbit_per_s: float, latency_us: float, per_host: float = 1
) -> None:
    """Prints the step and the efficiency for 1 to 4,096 workers."""
    print(f"{'workers':>8}{'exchange ms':>13}{'step ms':>10}{'efficiency':>12}")
    for workers in (4**i for i in range(7)):
        exchange = exchange_ms(workers, megabytes, gbit_per_s, latency_us, int(per_host))
        step = step_ms(compute, exchange, hidden)
        print(f"{workers:>8}{exchange:>13.1f}{step:>10.1f}{compute / step:>12.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["predict"]:
        predict(*map(float, sys.argv[2:]))
    else:
        check(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
